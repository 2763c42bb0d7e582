"""One thread at a time where a recompute sets what belongs to the whole process.

Generators and module state are put back for a recompute and restored afterwards; two threads doing so at once would
see each other's. Backward of CPU tensors runs on the thread that asked for it, so such recomputes take turns. Those of
devices do not: autograd has a thread for each device, and one that waits for another inside a recompute must not hold
what the other needs (R35).
"""

from __future__ import annotations

import threading

from ckptdeco.errors import RecomputeError

__all__ = ["one_at_a_time"]

_PATIENCE_S = 600.0
_turn = threading.RLock()


class one_at_a_time:  # a context manager; written as a generator it would take 1 µs more
    """Wait for other threads' recomputes to end. An error, rather than a deadlock, if that takes ten minutes."""

    __slots__ = ("label",)

    def __init__(self, label: str) -> None:
        self.label = label

    def __enter__(self) -> None:
        if not (_turn.acquire(blocking=False) or _turn.acquire(timeout=_PATIENCE_S)):
            raise RecomputeError(
                self.label,
                f"waited {_PATIENCE_S:.0f} s for the recompute of another thread, which may wait for this one",
                "do not wait for another thread's backward inside a checkpointed layer.",
            )

    def __exit__(self, *exc: object) -> None:
        _turn.release()
