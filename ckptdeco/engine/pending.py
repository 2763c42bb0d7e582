"""Recomputed values that wait, across backward passes (R26).

Values that nobody unpacked when a backward pass ends go, except those of its last recompute: layer-by-layer
`autograd.grad` calls ask for these next. They go when another recompute starts, the next forward begins or the policy
is left. Calls are held weakly, so nothing here prolongs a call's life.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

from ckptdeco.engine.groups import is_group, note_in_group
from ckptdeco.engine.torch_private import at_end_of_backward, graph_task_id

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call

__all__ = ["LEFTOVER", "drop_leftover", "forget", "note"]

LEFTOVER = -3  # the backward pass they belonged to has ended
# By backward pass: the thread it runs on, and the calls with values, in order of recompute.
_calls: dict[int, tuple[int, list[weakref.ref[Call]]]] = {}
_leftover: list[weakref.ref[Call]] = []


def note(task: int, call: Call) -> None:
    """Values wait on `call` in this backward pass."""
    if task == -1:
        return
    if is_group(task):
        note_in_group(task, call)
        return
    known = _calls.get(task)
    if known is None:
        _calls[task] = known = (threading.get_ident(), [])
        at_end_of_backward(partial(_end, task))
    known[1].append(weakref.ref(call))


def _end(task: int) -> None:
    # What an earlier pass left stays: this one used some of it, or else its own recompute has dropped it.
    _, calls = _calls.get(task, (0, []))
    alive = [call for reference in calls if (call := reference()) is not None]
    last_walk = True
    for call in reversed(alive):
        call.rebuilt.pop(task, None)
        waiting = call.waiting.pop(task, None)
        if waiting and last_walk and not call.is_alone:
            _leftover.append(weakref.ref(call))
            call.waiting[LEFTOVER] = waiting
            last_walk = bool(call.references())  # a walk begins at the call whose inputs are all kept
    _calls.pop(task, None)  # at last: `forget` finds what an interrupt left


def drop_leftover() -> None:
    """Let go of values left by a backward pass that has ended."""
    while _leftover:
        try:
            call = _leftover.pop()()
        except IndexError:  # another thread was faster
            return
        if call is not None:
            call.waiting.pop(LEFTOVER, None)


def forget() -> None:
    """Let go of all that waits, unless a backward pass runs on this thread.

    Called when a forward begins: a backward that failed never got to its end.
    """
    drop_leftover()
    if _calls and graph_task_id() == -1:
        here = threading.get_ident()
        for task in [task for task, (thread, _) in list(_calls.items()) if thread == here]:
            for reference in _calls.pop(task, (0, []))[1]:
                call = reference()
                if call is not None:
                    call.waiting.pop(task, None)
                    call.rebuilt.pop(task, None)
