"""Running one layer call again, in backward (R12, R18, R20, R22, R23, R30).

The run sees what forward saw: arguments with the recorded `requires_grad`, random numbers, autocast, module state. It
always builds a graph, since kernels and user code may behave otherwise without (R18); its hooks decide whether the
saved tensors are collected or let go at once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ckptdeco.engine import ambient, hooks
from ckptdeco.engine.attributes import as_non_leaf
from ckptdeco.engine.changes import learn_changes
from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.running import Frame, running
from ckptdeco.engine.torch_private import fresh_memory_filled, is_torch_function_on, torch_function_on
from ckptdeco.engine.trace import Trace, first_difference
from ckptdeco.engine.tree import rebuild_arguments, tensors_in
from ckptdeco.errors import (
    CheckpointError,
    ParameterModifiedError,
    RandomnessError,
    SavedTensorMismatch,
    StaleGraphError,
    TensorMeta,
    ValueMismatch,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptdeco.engine.call import Call
    from ckptdeco.engine.saved import Saved
    from ckptdeco.engine.state import Snapshot

__all__ = ["Waiting", "run_again", "tensor_mismatch", "traced"]


class Waiting(dict[int, tuple[Tensor, int]]):
    """Recomputed saved tensors of one call that wait to be unpacked, by slot, with the version they had when saved."""

    __slots__ = ("is_read_again",)

    def __init__(self) -> None:
        self.is_read_again = False  # a custom Function reads its saved tensors twice: keep them (R31)


class _Stop(BaseException):
    """Ends a recompute whose last needed tensor exists (R10). Not an `Exception`: user code shall not catch it."""


class _Cell:
    """What a recompute's own graph holds in place of a saved tensor, until the run ends (R23)."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor | None) -> None:
        self.value = value


_EMPTY = _Cell(None)  # for the many calls in which no backward runs


def traced(call: Call) -> Trace:
    """Record the operators of a forward (`debug=True`)."""
    trace = Trace()
    call.trace = trace.operators
    return trace


def run_again(call: Call, inputs: list[Tensor], waiting: Waiting | None, is_target: bool) -> list[Tensor]:
    """Run one layer call again and return its output tensors (none if it was stopped early).

    Args:
        call: the layer call.
        inputs: the values of its inputs.
        waiting: collects its saved tensors; None if they are let go.
        is_target: whether its outputs are not needed, so that it may stop early.

    Raises:
        CheckpointError: the run does not match forward.
    """
    call.record.n_recomputed += 1
    if call.protection.witnesses:
        learn_changes(call.protection)
        call.protection.witnesses = {}
    modes = ambient.missing_dispatch_modes(call.ambient) if call.ambient[-1] else ()
    takes_part = call.protection.modes_take_part
    if modes and call.is_checked and waiting is not None and modes not in takes_part:
        takes_part[modes] = _do_modes_take_part(call, inputs)
    may_stop = is_target and call.options.early_stop and call.protection.is_stop_safe and call.structure is None
    run = _Rerun(call, waiting, may_stop)
    run.has_modes = takes_part.get(modes, True)
    outputs = _run(call, inputs, run)
    suspects = run.verify()
    if run.drew:
        _confirm_draw(call, inputs)
    if suspects and waiting is not None:
        _explain_difference(call, inputs, waiting, suspects)
    return outputs


def _run(call: Call, inputs: list[Tensor], run: _Rerun) -> list[Tensor]:
    """Run the call's forward under the hooks of `run`, in the surroundings and state of forward."""
    leave_state: list[Callable[[], bool]] = []
    marks: list[Any] = []
    surroundings = _surroundings(call, run)
    outer = running.frame, running.recomputing
    leave_hooks = None
    try:
        leave_hooks = hooks.put_back(call.hooks, call.snapshots)
        leave_state.extend(_put_back(call, snapshot) for snapshot in call.snapshots)
        if call.watch is not None:
            marks = call.watch.set_back()
        running.frame, running.recomputing = Frame(call.decisions, again=True), True
        with surroundings, saved_tensors_hooks(run.pack, run.unpack):
            args, kwargs = rebuild_arguments(call.template, _prepare(call, inputs))
            result = call.context.copy().run(call.body, *args, **kwargs)
    except _Stop:
        result = None
    finally:
        running.frame, running.recomputing = outer
        run.end()
        if leave_hooks is not None:
            leave_hooks()
        has_stray = [leave() for leave in reversed(leave_state)]
    if call.watch is not None:
        run.drew = call.watch.has_moved(marks)
    if (
        run.stopped and any(has_stray) and not call.protection.replaces_attributes
    ):  # code after the stop would have undone it
        call.protection.is_stop_safe = False
    return [] if run.stopped else tensors_in(result)


def _confirm_draw(call: Call, inputs: list[Tensor]) -> None:
    """A stream moved in the recompute, but not in forward: because of the layer, or of another thread?

    One that loads data may draw at any time. So the call is run once more: the layer draws again.
    """
    second = _Rerun(call, None, may_stop=False)
    _run(call, inputs, second)
    if second.drew:
        raise RandomnessError(call.info.label)


def _put_back(call: Call, snapshot: Snapshot) -> Callable[[], bool]:
    """Put module state back for the run; an error if forward's parameters are no more."""
    is_untouched = snapshot.is_untouched()
    if not is_untouched:
        name = snapshot.changed_parameter()
        if name is not None:
            raise ParameterModifiedError(
                call.info.label,
                f"parameter or buffer {name}",
                "call backward before optimizer.step(), or before anything else that writes to the weights.",
            )
    return snapshot.put_back(is_untouched, hide_grads=call.has_inner_backward)


def _do_modes_take_part(call: Call, inputs: list[Tensor]) -> bool:
    """Whether dispatch modes that were active in forward, and are not now, matter for this layer.

    Those that only watch (they count or log operators) must not see the recompute; others it must run under.
    """
    trial = _Rerun(call, Waiting(), may_stop=False)
    trial.has_modes = False
    try:
        _run(call, inputs, trial)
        return bool(trial.verify())
    except CheckpointError:
        return True
    finally:
        call.is_checked = True


def _explain_difference(call: Call, inputs: list[Tensor], waiting: Waiting, suspects: list[int]) -> None:
    """Saved tensors have other values than in forward: noise, or a wrong recompute?

    Kernels save memory that they never filled (the workspace of an LSTM, the noise of rrelu in eval mode). So the
    call is run once more with all fresh memory filled by torch: what differs again, or shows the filling, is noise and
    is not compared from now on (R12). What is the same as in the first recompute was computed, hence is wrong.
    """
    second = Waiting()
    verdict = _Rerun(call, second, may_stop=False)
    verdict.fills_memory = True
    _run(call, inputs, verdict)
    for index in suspects:
        if index in second and _is_noise(waiting[index][0], second[index][0]):
            call.protection.ignored_slots |= {index}
            continue
        slot = call.slots[index]
        saved = None if slot is None else slot()
        meta = "" if saved is None else f" ({TensorMeta(tuple(saved.meta[0]), *saved.meta[1:])})"
        raise ValueMismatch(call.info.label, f"saved tensor {index}{meta}")


def _is_noise(value: Tensor, filled: Tensor) -> bool:
    """Whether a saved tensor has parts that no kernel wrote; `filled` is from a run with fresh memory filled."""
    if fingerprint(value) != fingerprint(filled):
        return True
    if filled.is_floating_point() or filled.is_complex():
        return bool(filled.isnan().any())
    return filled.dtype is not torch.bool and bool((filled == torch.iinfo(filled.dtype).max).any())


def _surroundings(call: Call, run: _Rerun) -> AbstractContextManager[object]:
    """Grad mode, autocast and the tracing of operators for a run."""
    grad = torch.enable_grad()
    is_usual = is_torch_function_on() and not torch.is_inference_mode_enabled()
    is_usual = is_usual and not run.fills_memory and call.trace is None
    if is_usual and ambient.capture(call.devices) == call.ambient:
        return grad
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch_function_on())  # backward of a tensor subclass switches it off
    stack.enter_context(grad)
    ambient.enter(stack, call.ambient, call.devices, with_dispatch_modes=run.has_modes)
    if call.trace is not None:
        stack.enter_context(run.tracing())
    if run.fills_memory:
        stack.enter_context(fresh_memory_filled())
    return stack


def _prepare(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    """Inputs with the `requires_grad` that this call saw (R22)."""
    prepared: list[Tensor] = []
    for value, (requires_grad, is_leaf) in zip(inputs, call.flags, strict=True):
        # A constant keeps its identity, as a parameter does; the user's own leaf gets no hook a second time.
        is_constant = is_leaf and (not requires_grad or isinstance(value, nn.Parameter))
        if is_constant and value.requires_grad == requires_grad and value.grad_fn is None:
            prepared.append(value)
            continue
        own = value.detach()
        if requires_grad:
            own.requires_grad_()
            if not is_leaf:  # the layer may ask
                own = own.view_as(own)
        prepared.append(own)
    for i in call.mutated:
        requires_grad = call.flags[i][0]
        value = inputs[i].detach().clone().requires_grad_(requires_grad)
        prepared[i] = as_non_leaf(value) if requires_grad else value
    return prepared


class _Rerun:
    """The saved-tensor hooks of one run of a call in backward."""

    __slots__ = (
        "call",
        "cells",
        "drew",
        "error",
        "fills_memory",
        "has_inner_backward",
        "has_modes",
        "last",
        "n",
        "packed",
        "slots",
        "stopped",
        "trace",
        "waiting",
    )

    def __init__(self, call: Call, waiting: Waiting | None, may_stop: bool) -> None:
        self.call = call
        self.slots = call.slots
        self.waiting = waiting
        self.n = 0
        self.cells: list[_Cell] = []
        self.error: BaseException | None = None
        self.has_inner_backward = call.has_inner_backward
        self.fills_memory = False
        self.has_modes = True  # the dispatch modes of forward, if they are not active now
        self.drew = False  # from a stream that forward did not draw from
        self.stopped = False
        self.trace: Trace | None = None
        self.packed: dict[int, int | None] = {}  # fingerprints when saved, if the call is one that has to tell (R20)
        self.last = -1  # slot at which to stop
        if may_stop:
            for index in range(len(self.slots) - 1, -1, -1):
                slot = self.slots[index]
                if slot is not None and slot() is not None:
                    self.last = index
                    break

    def tracing(self) -> Trace:
        """Record the operators of this run."""
        self.trace = Trace()
        return self.trace

    def pack(self, tensor: Tensor) -> _Cell:
        index = self.n
        if self.stopped:  # user code swallowed the stop (R20)
            raise _Stop
        self.n = index + 1
        slots = self.slots
        slot = slots[index] if index < len(slots) else None
        saved = None if slot is None else slot()
        value = tensor if tensor.grad_fn is None else tensor.detach()
        if saved is not None:
            if saved.meta != (tensor.shape, tensor.dtype, tensor.device):
                self.error = tensor_mismatch(self.call, saved, tensor, self.trace)
                raise self.error
            if self.waiting is not None:
                self.waiting[index] = value, value._version
                if self.call.structure is not None:
                    self.packed[index] = fingerprint(value)
        if index == self.last:
            self.stopped = True
            raise _Stop
        if not self.has_inner_backward:
            return _EMPTY
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

    def verify(self) -> list[int]:
        """Compare the run with forward (R22); raises. Returns slots whose values differ, if values are compared."""
        if self.error is not None:  # raised before, but user code swallowed it
            raise self.error
        call = self.call
        n_forward = len(self.slots)
        if not self.stopped and self.n != n_forward and not (self.n > n_forward and call.options.early_stop):
            raise SavedTensorMismatch(call.info.label, None, n_forward, self.n, trace=_trace(call, self.trace))
        if self.waiting is None:
            return []
        if call.structure is not None:
            self._learn_structure(self.waiting)
        if not call.is_checked:
            return []
        if call.options.determinism_check != "values":
            call.is_checked = False  # verified once (R12)
        return self._differing(self.waiting)

    def _learn_structure(self, waiting: Waiting) -> None:
        """The run was not stopped: were its tensors filled when they were saved?"""
        protection = self.call.protection
        if all(fingerprint(waiting[index][0]) == values for index, values in self.packed.items()):
            protection.structures.add(self.call.structure)
        else:
            protection.is_stop_safe = False
        self.call.structure = None

    def _differing(self, waiting: Waiting) -> list[int]:
        found = []
        ignored = self.call.protection.ignored_slots
        for index, (value, _) in waiting.items():
            slot = self.slots[index]
            saved = None if slot is None else slot()
            values = None if saved is None else getattr(saved, "values", None)
            if values is None or index in ignored:
                continue
            if fingerprint(value) not in (values, None):
                found.append(index)
        return found


def tensor_mismatch(call: Call, saved: Saved, tensor: Tensor | None, trace: Trace | None = None) -> SavedTensorMismatch:
    """The error for a slot that got another tensor than in forward, or none."""
    shape, dtype, device = saved.meta
    return SavedTensorMismatch(
        call.info.label,
        saved.index,
        TensorMeta(tuple(shape), dtype, device),
        None if tensor is None else TensorMeta.of(tensor),
        trace=_trace(call, trace),
    )


def _trace(call: Call, trace: Trace | None) -> str:
    return first_difference(call.trace, None if trace is None else trace.operators)
