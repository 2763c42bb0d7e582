"""`torch.utils.checkpoint.GraphExecGroup`: several backward passes that share one recompute.

Outside of a group, recomputed values belong to one backward pass (R26). Under one they belong to the group: a layer
call is recomputed once for all its passes, and what no pass asks for goes when the group or the call does. A saved
tensor serves one pass of a group; a second one that asks for it overlaps with the first, which torch forbids.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from ckptdeco.engine.torch_private import exec_group, graph_task_id
from ckptdeco.errors import GroupOverlapError

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call
    from ckptdeco.engine.saved import Saved

__all__ = ["check_overlap", "is_group", "note_in_group", "pass_id"]

_numbers = itertools.count(-1000, -1)  # backward passes have numbers above zero
_number_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_calls: dict[int, list[weakref.ref[Call]]] = {}  # with values of a group


def pass_id() -> int:
    """What recomputed values belong to now: the backward pass that runs, or its group; -1 outside of backward."""
    task = graph_task_id()
    group = None if task == -1 else exec_group()
    return task if group is None else _number(group)


def is_group(task: int) -> bool:
    """Whether it is the number of a group, not of one backward pass."""
    return task <= -1000


def _number(group: Any) -> int:
    number = _number_of.get(group)
    if number is None:
        number = _number_of[group] = next(_numbers)
        weakref.finalize(group, _end, number).atexit = False
    return number


def note_in_group(group: int, call: Call) -> None:
    """Values wait on `call` for passes of this group."""
    _calls.setdefault(group, []).append(weakref.ref(call))


def _end(group: int) -> None:
    for reference in _calls.pop(group, ()):
        call = reference()
        if call is not None:
            call.waiting.pop(group, None)
            call.rebuilt.pop(group, None)


def check_overlap(call: Call, saved: Saved, group: int) -> None:
    """Note which pass of the group asks for a saved tensor.

    Raises:
        GroupOverlapError: another one did before.
    """
    task = graph_task_id()
    if saved.task == group and saved.group_task != task:
        raise GroupOverlapError(call.info.label, saved.index)
    saved.group_task = task
