"""One thread at a time where a recompute sets what belongs to the whole process.

Generators and module state are put back for a recompute and restored afterwards; two threads doing so at once would
see each other's. Backward of CPU tensors runs on the thread that asked for it, so such recomputes take turns. Those of
devices do not: autograd has a thread for each device, and one that waits for another inside a recompute must not hold
what the other needs (R35).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import methodcaller
from typing import ParamSpec, TypeVar

from ckptdeco.errors import RecomputeError

__all__ = ["one_at_a_time"]

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE_S = 600.0
_turn = threading.RLock()
_release = methodcaller("release")


def one_at_a_time(label: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` when other threads' recomputes have ended.

    An error, rather than a deadlock, if that takes ten minutes.
    """
    taken: list[bool] = []
    try:
        # One C call takes the turn and notes that it is taken: no interrupt comes in between.
        taken.extend(map(_turn.acquire, (True,), (_PATIENCE_S,)))
        if not taken[0]:
            raise RecomputeError(
                label,
                f"waited {_PATIENCE_S:.0f} s for the recompute of another thread, which may wait for this one",
                "do not wait for another thread's backward inside a checkpointed layer.",
            )
        result = function(*args, **kwargs)
        _give_back(taken)
    except BaseException:  # not `finally`: see undo.py
        _give_back(taken)
        raise
    return result


def _give_back(taken: list[bool]) -> None:
    if taken == [True]:
        taken.extend(map(_release, (_turn,)))
