"""Bringing dropped tensors back: the walk, and running a layer call again (R9, R18, R22-R26, R31, R35).

The first unpack of a dropped tensor walks the references of its call back to the nearest kept inputs and runs the
calls forward from there, as the schedule says: with saved tensors (SAVE), or without, keeping the input on the way
(DROP_KEEP) or not (DROP). What a SAVE run brings back waits on its call, per backward pass, until it is unpacked.
No lock is held while user code runs; a thread that finds nothing waiting recomputes for itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ckptdeco.engine import ambient, pending, rng
from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.running import Frame, running
from ckptdeco.engine.saved import Saved, is_parameter
from ckptdeco.engine.torch_private import graph_task_id
from ckptdeco.engine.trace import Trace, first_difference
from ckptdeco.engine.tree import flatten, rebuild
from ckptdeco.errors import (
    InputModifiedError,
    ModifiedTensorError,
    ParameterModifiedError,
    RandomnessError,
    RecomputeError,
    SavedTensorMismatch,
    StaleGraphError,
    TensorMeta,
    ValueMismatch,
)
from ckptdeco.schedule.actions import Action

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call

__all__ = ["Waiting", "serve", "traced"]

_NOTHING: AbstractContextManager[None] = nullcontext()
_Values = dict[tuple[int, int], Tensor]  # (id of a call, output index) -> value, while a walk needs it


class Waiting(dict[int, tuple[Tensor, int]]):
    """Recomputed saved tensors of one call that wait to be unpacked, by slot, with the version they had when saved."""

    __slots__ = ("is_read_again",)

    def __init__(self) -> None:
        super().__init__()
        self.is_read_again = False  # a custom Function reads its saved tensors twice: keep them (R31)


def serve(call: Call, saved: Saved) -> Tensor:
    """The tensor of a dropped slot, recomputed if need be; handed out and dropped (R9)."""
    call.unpacked = True
    call.record.log.is_over = True
    task = graph_task_id()
    found = _take(call, saved, task)
    if found is None and saved.task == task and task != -1:
        again = saved.handed() if saved.handed is not None else None
        if again is not None:
            return again
    if found is None:
        was_read = saved.task == task and task != -1
        waiting = _recompute(call, task)
        waiting.is_read_again = was_read
        found = waiting.get(saved.index) if was_read else waiting.pop(saved.index, None)
        if found is None:
            raise _mismatch(call, saved, None)
    value, version = found
    if value._version != version:
        raise ModifiedTensorError(
            call.info.label,
            f"saved tensor {saved.index}",
            "use the out-of-place operation, or clone the tensor before it is changed.",
        )
    saved.handed = weakref.ref(value)
    saved.task = task
    return value


def _take(call: Call, saved: Saved, task: int) -> tuple[Tensor, int] | None:
    """A value that waits from this backward, or from one that ended with values left (R26)."""
    waiting = call.waiting.get(task)
    if waiting is None:
        waiting = call.waiting.pop(pending.LEFTOVER, None)
        if waiting is None:
            return None
        if task != -1:
            call.waiting[task] = waiting
            pending.note(task, call)
    if waiting.is_read_again:
        return waiting.get(saved.index)
    return waiting.pop(saved.index, None)


def _recompute(target: Call, task: int) -> Waiting:
    """Run the calls from the nearest kept inputs to `target`; returns what waits for `target`."""
    pending.drop_leftover()
    values: _Values = {}
    order = _walk(target, task, values)
    actions = _actions(order, target)
    uses: dict[tuple[int, int], int] = {}
    for call in order:
        for reference in _open_references(call, task):
            key = (id(reference.call), reference.index)
            uses[key] = uses.get(key, 0) + 1

    devices, preserve = target.devices, target.options.preserve_rng_state
    before = rng.capture(devices) if preserve else None
    result = Waiting()
    try:
        for call, action in zip(order, actions, strict=True):
            inputs = _inputs(call, task, values, uses)
            if action is Action.DROP_KEEP and call is not order[0]:
                _keep_again(call, task, inputs)
            waiting = Waiting() if action is Action.SAVE else None
            outputs = _run_again(call, inputs, waiting, is_target=call is target)
            del inputs
            for index, output in enumerate(outputs):
                if (id(call), index) in uses:
                    values[id(call), index] = output.detach()
            del outputs
            if waiting is not None and call is not target:
                call.waiting[task] = waiting
                pending.note(task, call)
            elif waiting is not None:
                result = waiting
    except BaseException:
        for call in order:
            call.waiting.pop(task, None)
            call.rebuilt.pop(task, None)
        raise
    finally:
        if before is not None:
            _settle_rng(before, devices, order)
    target.rebuilt.pop(task, None)  # calls are needed from the last to the first: nobody starts here again
    if task != -1:
        target.waiting[task] = result
        pending.note(task, target)
    else:
        for call in order:
            call.waiting.pop(task, None)
    return result


def _settle_rng(before: rng.RngState, devices: rng.Devices, order: list[Call]) -> None:
    """Leave the streams as they were; they must not have moved unless a call drew in forward, too (R19)."""
    may_draw = any(call.rng is not None for call in order)
    if may_draw:
        rng.restore(devices, before)
    elif not rng.is_same(before, rng.capture(devices)):
        rng.restore(devices, before)
        raise RandomnessError(" … ".join(dict.fromkeys((order[0].info.label, order[-1].info.label))))


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
        return reference.boundary()
    except RuntimeError:
        return None  # a promoted output was changed since: its producer still gives the right value


def _actions(order: list[Call], target: Call) -> Sequence[Action]:
    """The schedule's second answer for this walk; all calls between boundary and target are neighbours."""
    n = len(order)
    if n == 1:
        return (Action.SAVE,)
    actions = tuple(target.at_backward(target.position - n + 1, target.position))
    if len(actions) != n or actions[-1] is not Action.SAVE:
        raise RecomputeError(
            target.info.label,
            f"needs one action per layer call from {target.position - n + 1} to {target.position}, SAVE last; "
            f"the policy's at_backward gave {[a.name for a in actions]}",
            "return target - first + 1 actions from at_backward, the last of them Action.SAVE.",
        )
    return actions


def _inputs(call: Call, task: int, values: _Values, uses: dict[tuple[int, int], int]) -> list[Tensor]:
    """The values of all inputs of a call that is about to run again."""
    rebuilt = call.rebuilt.get(task)
    inputs: list[Tensor] = []
    for i, source in enumerate(call.sources):
        if hasattr(source, "get"):
            try:
                inputs.append(source.get())
            except RuntimeError as error:
                raise InputModifiedError(
                    call.info.label,
                    f"input {i}",
                    "do not change a layer's input in place after the call; write x = x + y instead of x += y.",
                ) from error
            continue
        if rebuilt is not None:
            inputs.append(rebuilt[i])
            continue
        key = (id(source.call), source.index)
        uses[key] -= 1
        inputs.append(values[key] if uses[key] else values.pop(key))
    return inputs


def _keep_again(call: Call, task: int, inputs: list[Tensor]) -> None:
    """Make the input of a call a boundary for the rest of this backward (levels)."""
    if task in call.rebuilt:
        return
    call.rebuilt[task] = {i: inputs[i] for i, source in enumerate(call.sources) if not hasattr(source, "get")}
    pending.note(task, call)


class _Own(torch.autograd.Function):
    """Hands an input over as a non-leaf that shares storage, so that the layer may change it in place (R30)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: D102
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: D102
        return grad


def _prepare(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    """Inputs with the `requires_grad` that this call saw (R22)."""
    prepared: list[Tensor] = []
    for i, (value, (requires_grad, is_leaf)) in enumerate(zip(inputs, call.flags, strict=True)):
        if i in call.mutated:
            value = value.detach().clone().requires_grad_(requires_grad)
            prepared.append(_Own.apply(value) if requires_grad else value)
        elif is_leaf and value.requires_grad == requires_grad and value.grad_fn is None:
            prepared.append(value)
        else:
            prepared.append(value.detach().requires_grad_(requires_grad))
    return prepared


def traced(call: Call, debug: bool) -> AbstractContextManager[object]:
    """Record the operators of a forward when `debug` asks for it."""
    if not debug:
        return _NOTHING
    trace = Trace()
    call.trace = trace.operators
    return trace


def _run_again(call: Call, inputs: list[Tensor], waiting: Waiting | None, is_target: bool) -> list[Tensor]:
    """Run one layer call again and return its output tensors (none if it was stopped early)."""
    call.record.n_recomputed += 1
    run = _Rerun(call, waiting, may_stop=is_target and call.options.early_stop and call.protection.is_stop_safe)
    if call.snapshot is not None:
        name = call.snapshot.changed_parameter()
        if name is not None:
            raise ParameterModifiedError(
                call.info.label,
                f"parameter or buffer {name}",
                "call backward before optimizer.step(), or before anything else that writes to the weights.",
            )
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if call.snapshot is not None:
            stack.enter_context(call.snapshot.entered())
        stack.enter_context(ambient.entered(call.ambient, call.devices))
        prepared = _prepare(call, inputs)
        args, kwargs = rebuild(call.template, prepared)
        if call.rng is not None:
            rng.restore(call.devices, call.rng)
        outer = running.frame, running.recomputing
        running.frame, running.recomputing = Frame(call.decisions, again=True), True
        stack.enter_context(saved_tensors_hooks(run.pack, run.unpack))
        if call.trace is not None:
            run.trace = stack.enter_context(Trace())
        try:
            result = call.body(*args, **kwargs)
        except _Stop:
            result = None
        finally:
            running.frame, running.recomputing = outer
            run.end()
    run.verify()
    outputs: list[Tensor] = []
    if not run.stopped:
        flatten(result, outputs)
    return outputs


class _Stop(BaseException):
    """Ends a recompute whose last needed tensor exists (R10). Not an `Exception`: user code shall not catch it."""


class _Cell:
    """What a recompute's own graph holds in place of a saved tensor, until the run ends (R23)."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor | None) -> None:
        self.value = value


class _Rerun:
    """The saved-tensor hooks of one run of a call in backward."""

    __slots__ = ("call", "cells", "error", "last", "may_stop", "n", "stopped", "trace", "waiting")

    def __init__(self, call: Call, waiting: Waiting | None, may_stop: bool) -> None:
        self.call = call
        self.waiting = waiting
        self.n = 0
        self.cells: list[_Cell] = []
        self.error: BaseException | None = None
        self.stopped = False
        self.trace: Trace | None = None
        self.may_stop = may_stop and waiting is not None
        self.last = -1
        if self.may_stop:
            self.last = max((i for i, slot in enumerate(call.slots) if slot is not None and slot() is not None), default=-1)

    def pack(self, tensor: Tensor) -> _Cell:
        if self.stopped:  # user code swallowed the stop (R20)
            raise _Stop
        index = self.n
        self.n += 1
        value = tensor if tensor.grad_fn is None else tensor.detach()
        slots = self.call.slots
        slot = slots[index] if index < len(slots) else None
        saved = None if slot is None else slot()
        if saved is not None:
            if saved.meta != (tensor.shape, tensor.dtype, tensor.device):
                self.error = _mismatch(self.call, saved, tensor, self.trace)
                raise self.error
            if self.waiting is not None:
                self.waiting[index] = value, value._version
        if index == self.last:
            self.stopped = True
            raise _Stop
        cell = _Cell(value)
        self.cells.append(cell)
        return cell

    def unpack(self, cell: _Cell) -> Tensor:
        if cell.value is None:
            raise StaleGraphError(self.call.info.label)
        return cell.value

    def end(self) -> None:
        """Let go of what the run's own graph held."""
        for cell in self.cells:
            cell.value = None
        self.cells = []

    def verify(self) -> None:
        """Compare the run with forward (R12, R22); raises."""
        if self.error is not None:  # raised before, but user code swallowed it
            raise self.error
        call = self.call
        n_forward = len(call.slots)
        if not self.stopped and self.n != n_forward and not (self.n > n_forward and call.options.early_stop):
            raise _count_mismatch(call, self.n, self.trace)
        if self.waiting is not None:
            _verify_values(call, self.waiting)


def _verify_values(call: Call, waiting: Waiting) -> None:
    for index, (value, _) in waiting.items():
        slot = call.slots[index]
        saved = None if slot is None else slot()
        if saved is not None and saved.values is not None:
            if fingerprint(value) != saved.values:
                raise ValueMismatch(call.info.label, f"saved tensor {index} ({TensorMeta.of(value)})")
            if call.options.determinism_check != "values":
                saved.values = None  # verified once (R12)


def _mismatch(call: Call, saved: Saved, tensor: Tensor | None, trace: Trace | None = None) -> SavedTensorMismatch:
    assert saved.meta is not None
    shape, dtype, device = saved.meta
    return SavedTensorMismatch(
        call.info.label,
        saved.index,
        TensorMeta(tuple(shape), dtype, device),
        None if tensor is None else TensorMeta.of(tensor),
        trace=first_difference(call.trace, None if trace is None else trace.operators),
    )


def _count_mismatch(call: Call, n: int, trace: Trace | None) -> SavedTensorMismatch:
    return SavedTensorMismatch(
        call.info.label,
        None,
        len(call.slots),
        n,
        trace=first_difference(call.trace, None if trace is None else trace.operators),
    )
