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

from ckptdeco.engine import ambient, hooks
from ckptdeco.engine.attributes import as_non_leaf
from ckptdeco.engine.changes import learn_changes
from ckptdeco.engine.collect import Rerun, Stop, Waiting
from ckptdeco.engine.fingerprint import is_noise
from ckptdeco.engine.running import Frame, running
from ckptdeco.engine.torch_private import (
    fresh_memory_filled,
    is_torch_function_on,
    pop_hooks,
    push_hooks,
    torch_function_on,
    with_grad,
)
from ckptdeco.engine.trace import Trace
from ckptdeco.engine.tree import rebuild_arguments, tensors_in
from ckptdeco.errors import (
    CheckpointError,
    ParameterModifiedError,
    RandomnessError,
    TensorMeta,
    ValueMismatch,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptdeco.engine.call import Call
    from ckptdeco.engine.state import Snapshot

__all__ = ["run_again", "traced"]


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
    run = Rerun(call, waiting, may_stop)
    run.has_modes = takes_part.get(modes, True)
    outputs = _run(call, inputs, run)
    suspects = run.verify()
    if run.drew:
        _confirm_draw(call, inputs)
    if suspects and waiting is not None:
        _explain_difference(call, inputs, waiting, suspects)
    return outputs


def _run(call: Call, inputs: list[Tensor], run: Rerun) -> list[Tensor]:
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
        with surroundings:
            push_hooks(run.pack, run.unpack)
            try:
                args, kwargs = rebuild_arguments(call.template, _prepare(call, inputs))
                if run.trace is not None:
                    run.trace.operators.clear()  # those that made the inputs are not the layer's
                result = call.context.copy().run(run.body, *args, **kwargs)
            finally:
                pop_hooks()
    except Stop:
        result = None
    finally:
        running.frame, running.recomputing = outer
        run.end()
        if leave_hooks is not None:
            leave_hooks()
        has_stray = [leave() for leave in reversed(leave_state)]
    if call.watch is not None:
        run.drew = call.watch.has_moved(marks)
    if run.stopped and any(has_stray) and not call.protection.replaces_attributes:
        call.protection.is_stop_safe = False  # code after the stop would have undone it
    return [] if run.stopped else tensors_in(result)


def _trial(call: Call, waiting: Waiting | None) -> Rerun:
    """A run that only answers a question, in contexts of its own: those of the recompute (`context_fn`) stay unused."""
    run = Rerun(call, waiting, may_stop=False)
    run.body = getattr(call.body, "anew", lambda: call.body)()
    return run


def _confirm_draw(call: Call, inputs: list[Tensor]) -> None:
    """A stream moved in the recompute, but not in forward: because of the layer, or of another thread?

    One that loads data may draw at any time. So the call is run once more: the layer draws again.
    """
    second = _trial(call, None)
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
    trial = _trial(call, Waiting())
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
    call is run twice more with all fresh memory filled by torch: what follows the filling, and only that, is noise and
    is not compared from now on (R12). What is the same as in the first recompute was computed, hence is wrong; so is
    what is as in forward now, and what every run computes anew.
    """
    filled = [_run_filled(call, inputs), _run_filled(call, inputs)]
    for index in suspects:
        slot = call.slots[index]
        saved = None if slot is None else slot()
        again = [run[index][0] for run in filled if index in run]
        if saved is not None and len(again) == 2 and is_noise(saved.values, waiting[index][0], *again):
            call.protection.ignored_slots |= {index}
            continue
        meta = "" if saved is None else f" ({TensorMeta(tuple(saved.meta[0]), *saved.meta[1:])})"
        raise ValueMismatch(call.info.label, f"saved tensor {index}{meta}")


def _run_filled(call: Call, inputs: list[Tensor]) -> Waiting:
    """What a run with all fresh memory filled saves."""
    waiting = Waiting()
    run = _trial(call, waiting)
    run.fills_memory = True
    _run(call, inputs, run)
    return waiting


def _surroundings(call: Call, run: Rerun) -> AbstractContextManager[object]:
    """Grad mode, autocast and the tracing of operators for a run."""
    is_usual = is_torch_function_on() and not torch.is_inference_mode_enabled()
    is_usual = is_usual and not run.fills_memory and call.trace is None
    if is_usual and ambient.capture(call.devices) == call.ambient:
        return with_grad()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch_function_on())  # backward of a tensor subclass switches it off
    stack.enter_context(torch.enable_grad())
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
