"""Bringing dropped tensors back: the walk over references (R9, R18, R24-R26, R31, R35).

The first unpack of a dropped tensor walks the references of its call back to the nearest kept inputs and runs the
calls forward from there, as the schedule says: with saved tensors (SAVE), or without, keeping the input on the way
(DROP_KEEP) or not (DROP). What a SAVE run brings back waits on its call, per backward pass, until it is unpacked.
No lock is held while user code runs; a thread that finds nothing waiting recomputes for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ckptdeco.engine import observe, pending, rng
from ckptdeco.engine.collect import Waiting, tensor_mismatch
from ckptdeco.engine.exclusive import one_at_a_time
from ckptdeco.engine.groups import check_overlap, is_group, pass_id
from ckptdeco.engine.kept import Changed, Kept
from ckptdeco.engine.overlap import Window, rewinds
from ckptdeco.engine.rerun import run_again
from ckptdeco.engine.saved import Saved, modified
from ckptdeco.engine.torch_private import graph_task_id
from ckptdeco.errors import InputModifiedError, RecomputeError
from ckptdeco.schedule.actions import Action

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call

__all__ = ["serve"]

_Values = dict[tuple[int, int], Tensor]  # (id of a call, output index) -> value, while a walk needs it


def serve(call: Call, saved: Saved) -> Tensor:
    """The tensor of a dropped slot, recomputed if need be; handed out and dropped (R9)."""
    task = graph_task_id()
    waiting = call.waiting.get(task)
    if waiting is None or waiting.is_read_again or saved.index not in waiting:
        task, found = _look_further(call, saved)
    else:
        found = waiting.pop(saved.index)
    value, version = found
    if value._version != version:
        raise modified(saved)
    saved.task = task
    if call.protection.has_custom_functions:
        saved.remember(value)
    return value


def _look_further(call: Call, saved: Saved) -> tuple[int, tuple[Tensor, int]]:
    """What waits for another pass or was handed out before, or else is recomputed; with the number of its pass."""
    task = pass_id()
    if is_group(task):
        check_overlap(call, saved, task)
    waiting = call.waiting.get(task)
    if waiting is None:
        waiting = _adopt_leftover(call, task)
    found = None
    if waiting is not None:
        found = waiting.get(saved.index) if waiting.is_read_again else waiting.pop(saved.index, None)
    if found is None:
        was_read = task != -1 and saved.task == task
        if was_read and (alive := saved.handed_out()) is not None:
            return task, (alive, alive._version)
        waiting = _recompute(call, task)
        waiting.is_read_again = was_read
        found = waiting.get(saved.index) if was_read else waiting.pop(saved.index, None)
        if found is None:
            raise tensor_mismatch(call, saved, None)
    return task, found


def _adopt_leftover(call: Call, task: int) -> Waiting | None:
    """Values that a backward pass which ended left (R26)."""
    waiting = call.waiting.pop(pending.LEFTOVER, None)
    if waiting is not None and task != -1:
        pending.note(task, call)
        call.waiting[task] = waiting
    return waiting


def _recompute(target: Call, task: int) -> Waiting:
    """Run the calls from the nearest kept inputs to `target`; returns what waits for `target`."""
    pending.drop_leftover()
    target.record.log.is_over = True
    observer = observe.observer
    if observer is not None:
        observer.recompute_begins(target)
    values: _Values = {}
    order = _walk(target, task, values) if target.has_references else [target]
    if target.devices:
        result = _run_and_restore(target, task, order, values)
    else:
        result = one_at_a_time(target.info.label, _run_and_restore, target, task, order, values)
    target.rebuilt.pop(task, None)  # calls are needed from the last to the first: nobody starts here again
    if task != -1:
        pending.note(task, target)
        target.waiting[task] = result
    else:  # not within a backward: nobody would tell when it ends
        for call in order:
            call.waiting.pop(task, None)
            call.rebuilt.pop(task, None)
    if observer is not None:
        observer.recompute_ended(target)
    return result


def _run_and_restore(target: Call, task: int, order: list[Call], values: _Values) -> Waiting:
    """Run the calls of a walk; leave the random number streams, and in case of an error everything, as they were."""
    window = Window()
    before = _read_streams(order)
    try:
        window.open()
        if before:
            rewinds.begin()
        result = _run_walk(target, task, order, values)
        _restore(before, window)
    except BaseException:  # not `finally`: see undo.py
        _restore(before, window)
        for call in order:
            call.waiting.pop(task, None)
            call.rebuilt.pop(task, None)
        raise
    return result


def _restore(before: rng.Draws, window: Window) -> None:
    if before:
        rng.restore(before)
        rewinds.end()
    window.close()


def _run_walk(target: Call, task: int, order: list[Call], values: _Values) -> Waiting:
    """Run the calls of a walk in order."""
    if len(order) == 1 and not values:  # the common case: the target's own inputs are kept
        target.unpacked = True
        result = Waiting()
        run_again(target, _inputs(target, task, values, {}), result, is_target=True)
        return result
    uses: dict[tuple[int, int], int] = {}
    for call in order:
        call.unpacked = True
        for reference in _open_references(call, task):
            key = (id(reference.call), reference.index)
            uses[key] = uses.get(key, 0) + 1
    result = Waiting()
    for call, action in zip(order, _actions(order, target), strict=True):
        inputs = _inputs(call, task, values, uses)
        if action is Action.DROP_KEEP and call is not order[0]:
            _keep_again(call, task, inputs)
        waiting = Waiting() if action is Action.SAVE else None
        outputs = run_again(call, inputs, waiting, is_target=call is target)
        del inputs
        if call is target:
            assert waiting is not None
            result = waiting
            break
        for index, output in enumerate(outputs):
            if (id(call), index) in uses:
                values[id(call), index] = output.detach()
        del outputs
        if waiting is not None:
            pending.note(task, call)
            call.waiting[task] = waiting
    return result


def _read_streams(order: list[Call]) -> rng.Draws:
    """The present states of all streams that the calls of a walk draw from."""
    drawn: dict[Any, None] = {}
    for call in order:
        if call.watch is not None and call.watch.moved:
            drawn.update(dict.fromkeys([stream for stream, _ in call.watch.moved]))
    return rng.capture(drawn) if drawn else ()


def _open_references(call: Call, task: int) -> list[Any]:
    return [] if task in call.rebuilt else call.references()


def _walk(target: Call, task: int, values: _Values) -> list[Call]:
    """The calls to run, each after those it refers to; fills `values` with what need not be recomputed."""
    order: list[Call] = []
    seen = {id(target)}
    stack: list[tuple[Call, int]] = [(target, 0)]
    while stack:
        call, step = stack.pop()
        references = _open_references(call, task)
        if step == len(references):
            order.append(call)
            continue
        stack.append((call, step + 1))
        reference = references[step]
        key = (id(reference.call), reference.index)
        if key in values:
            continue
        value = _boundary(reference)
        if value is not None:
            values[key] = value
        elif id(reference.call) not in seen:
            seen.add(id(reference.call))
            stack.append((reference.call, 0))
    return order


def _boundary(reference: Any) -> Tensor | None:
    try:
        value: Tensor | None = reference.boundary()
    except Changed:
        return None  # a promoted output was changed since: its producer still gives the right value
    return value


def _actions(order: list[Call], target: Call) -> Sequence[Action]:
    """The schedule's second answer for this walk; all calls between boundary and target are neighbours."""
    n = len(order)
    if n == 1:
        return (Action.SAVE,)
    first = target.position - n + 1
    actions = tuple(target.at_backward(first, target.position))
    if len(actions) != n or actions[-1] is not Action.SAVE:
        raise RecomputeError(
            target.info.label,
            f"needs one action per layer call from {first} to {target.position}, SAVE last; the policy's at_backward "
            f"gave {[getattr(action, 'name', action) for action in actions]}",
            "return target - first + 1 actions from at_backward, the last of them Action.SAVE.",
        )
    return actions


def _inputs(call: Call, task: int, values: _Values, uses: dict[tuple[int, int], int]) -> list[Tensor]:
    """The values of all inputs of a call that is about to run again."""
    rebuilt = call.rebuilt.get(task)
    inputs: list[Tensor] = []
    for i, source in enumerate(call.sources):
        if type(source) is Kept:
            try:
                inputs.append(source.get())
            except Changed as error:
                raise InputModifiedError(
                    call.info.label,
                    call.input_name(i),
                    "do not change a layer's input in place after the call; write x = x + layer(x) instead of "
                    "x += layer(x).",
                ) from error
        elif rebuilt is not None:
            inputs.append(rebuilt[i])
        else:
            assert not isinstance(source, Kept)
            key = (id(source.call), source.index)
            uses[key] -= 1
            inputs.append(values[key] if uses[key] else values.pop(key))
    return inputs


def _keep_again(call: Call, task: int, inputs: list[Tensor]) -> None:
    """Make the input of a call a boundary for the rest of this backward (levels)."""
    if task not in call.rebuilt:
        pending.note(task, call)
        call.rebuilt[task] = {i: inputs[i] for i, source in enumerate(call.sources) if type(source) is not Kept}
