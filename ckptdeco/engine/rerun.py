"""Running one layer call again, in backward (R12, R18, R20, R22, R23, R30).

The run sees what forward saw: arguments with the recorded `requires_grad`, random numbers, autocast, module state. It
always builds a graph, since kernels and user code may behave otherwise without (R18); its hooks decide whether the
saved tensors are collected or let go at once.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ckptdeco.engine import ambient, hooks, rng
from ckptdeco.engine.attributes import as_non_leaf
from ckptdeco.engine.changes import learn_changes
from ckptdeco.engine.collect import Rerun, Stop, Waiting
from ckptdeco.engine.fingerprint import is_noise
from ckptdeco.engine.host_rng import CPU
from ckptdeco.engine.overlap import disturbed, has_other_threads
from ckptdeco.engine.running import Frame, running
from ckptdeco.engine.torch_private import (
    fresh_memory_filled,
    grad_mode,
    is_torch_function_on,
    pop_hooks,
    push_hooks,
    set_grad_mode,
    torch_function_on,
)
from ckptdeco.engine.trace import Draws, Trace
from ckptdeco.engine.tree import rebuild_arguments, tensors_in
from ckptdeco.engine.undo import Undo
from ckptdeco.errors import (
    CheckpointError,
    ParameterModifiedError,
    RandomnessError,
    TensorMeta,
    ValueMismatch,
)

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call
    from ckptdeco.engine.state import Snapshot
    from ckptdeco.engine.streams import Stream

__all__ = ["run_again", "traced"]

_MAX_ATTEMPTS = 25  # while other threads draw


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
    if call.protection.watched_sites:
        learn_changes(call.protection, is_over=True)
    modes = ambient.missing_dispatch_modes(call.ambient) if call.ambient.dispatch_modes else ()
    takes_part = call.protection.modes_take_part
    if modes and call.is_checked and not takes_part.get(modes):
        takes_part[modes] = _do_modes_take_part(call, inputs)  # asked anew at each call: they may begin to
    has_watchers = call.is_checked and takes_part.get(modes) is False
    may_stop = is_target and call.options.early_stop and call.protection.is_stop_safe and call.structure is None
    watch = call.watch if call.watch is not None and call.watch.ends and has_other_threads() else None
    for attempt in range(_MAX_ATTEMPTS):
        run = Rerun(call, waiting, may_stop and watch is None)
        run.has_modes = not has_watchers
        outputs = _run(call, inputs, run)
        if watch is None or not run.is_disturbed:
            break
        if waiting is not None and attempt < _MAX_ATTEMPTS - 1:
            waiting.clear()
        time.sleep(min(attempt, 20) / 1000)  # let the other thread come to the end of what it does
    else:
        if watch is not None and _draws(call, inputs, [stream for stream, _ in watch.moved]):
            raise disturbed(call.info.label)
    if run.drew and not has_other_threads():
        run, outputs = _run_from_entry(call, inputs, run, outputs, may_stop)
    suspects = run.verify()
    if run.drew:
        _confirm_draw(call, inputs)
    if suspects and waiting is not None:
        _explain_difference(call, inputs, waiting, suspects)
    return outputs


def _run(call: Call, inputs: list[Tensor], run: Rerun) -> list[Tensor]:
    """Run the call's forward under the hooks of `run`, in the surroundings and state of forward."""
    marks: Any = None
    undo, pack = Undo(), run.pack
    try:
        hooks.put_back(undo, call.hooks, call.snapshots)
        for snapshot in call.snapshots:
            _put_back(call, snapshot, undo)
        if call.watch is not None:
            marks = call.watch.set_back()
        undo.append(partial(_leave, run, pack, running.frame, running.recomputing, grad_mode()))
        try:
            _enter_surroundings(call, run, undo)
            args, kwargs = rebuild_arguments(call.template, _prepare(call, inputs))
            if run.trace is not None:
                run.trace.operators.clear()  # those that made the inputs are not the layer's
            running.set(Frame(call.decisions, again=True, collector=run), True)
            push_hooks(pack, run.unpack)
            result = call.context.copy().run(run.body, *args, **kwargs)
        except Stop:
            result = None
        undo.run()
    except BaseException:
        undo.insist()
        raise
    if call.watch is not None:
        run.is_disturbed = not run.stopped and call.watch.is_disturbed()
        run.drew = call.watch.has_moved(marks)
    has_stray = [snapshot for snapshot in call.snapshots if snapshot.has_stray]
    if has_stray and run.stopped and not call.protection.replaces_attributes:
        call.protection.is_stop_safe = False  # code after the stop would have undone it
    return [] if run.stopped else tensors_in(result)


def _leave(run: Rerun, pack: Any, frame: Frame | None, recomputing: bool, has_grad: bool) -> None:
    """What every run undoes when it is over; may be called again."""
    pop_hooks(pack)
    set_grad_mode(has_grad)
    running.set(frame, recomputing)
    run.end()


def _trial(call: Call, waiting: Waiting | None) -> Rerun:
    """A run that only answers a question, in contexts of its own: those of the recompute (`context_fn`) stay unused."""
    run = Rerun(call, waiting, may_stop=False)
    run.body = getattr(call.body, "anew", lambda: call.body)()
    return run


def _run_from_entry(
    call: Call, inputs: list[Tensor], run: Rerun, outputs: list[Tensor], may_stop: bool
) -> tuple[Rerun, list[Tensor]]:
    """A stream moved in the recompute that forward left as it found it, and there are no other threads (any more).

    A layer that sets the stream itself, say to a seed, may come back to where forward began. So it is run from there,
    and must come back again; else it draws what forward did not.
    """
    assert call.watch is not None
    entry, found = call.watch.before(run.drew)
    if not found:
        raise RandomnessError(call.info.label)
    try:
        now = rng.capture(run.drew)
        if not _moves(call, inputs, found):  # a thread that is gone has drawn
            rng.restore(now)
            run.drew = []
            return run, outputs
        if _moves(call, inputs, entry):
            raise RandomnessError(call.info.label)
        rng.restore(entry)
        call.watch.add(entry)
        if run.waiting is not None:
            run.waiting.clear()
        again = Rerun(call, run.waiting, may_stop)
        again.has_modes = run.has_modes
        outputs = _run(call, inputs, again)
        rng.restore(found)
    except BaseException:  # not `finally`: see undo.py
        rng.restore(found)
        raise
    call.protection.sets_streams = True
    return again, outputs


def _moves(call: Call, inputs: list[Tensor], states: rng.Draws) -> bool:
    """Whether a run that finds streams in these states leaves them in others."""
    rng.restore(states)
    marks = [stream.mark() for stream, _ in states]
    _run(call, inputs, _trial(call, None))
    return [stream.mark() for stream, _ in states] != marks


def _confirm_draw(call: Call, inputs: list[Tensor]) -> None:
    """A stream moved in the recompute, but not in forward: because of the layer, or of another thread?

    One that loads data may draw at any time. So the call is run again and again: the layer draws each time.
    """
    for attempt in range(_MAX_ATTEMPTS):
        time.sleep(min(attempt, 20) / 1000)
        again = _trial(call, None)
        _run(call, inputs, again)
        if not again.drew:
            return
    if _draws(call, inputs, again.drew):
        raise RandomnessError(call.info.label)


def _draws(call: Call, inputs: list[Tensor], streams: list[Stream]) -> bool:
    """Whether the layer draws numbers from these streams. From torch's for the CPU, its operators tell for sure."""
    if any(stream is not CPU for stream in streams):
        return True
    with Draws() as draws:
        _run(call, inputs, _trial(call, None))
    return bool(draws.is_seen)


def _put_back(call: Call, snapshot: Snapshot, undo: Undo) -> None:
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
    snapshot.put_back(undo, is_untouched, hide_grads=call.has_inner_backward)


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


def _enter_surroundings(call: Call, run: Rerun, undo: Undo) -> None:
    """Grad mode, autocast and the tracing of operators for a run."""
    is_usual = is_torch_function_on() and not torch.is_inference_mode_enabled()
    is_usual = is_usual and not run.fills_memory and call.trace is None
    if is_usual and ambient.capture(call.devices) == call.ambient:
        set_grad_mode(True)
        return
    stack = ExitStack()
    undo.append(stack.close)
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch_function_on())  # backward of a tensor subclass switches it off
    set_grad_mode(True)
    ambient.enter(stack, call.ambient, call.devices, with_dispatch_modes=run.has_modes)
    if call.trace is not None:
        stack.enter_context(run.tracing())
    if run.fills_memory:
        stack.enter_context(fresh_memory_filled())


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
                own = own.view_as(own) if own.layout is torch.strided else as_non_leaf(own)
        prepared.append(own)
    for i in call.mutated:
        requires_grad, is_leaf = call.flags[i]
        value = inputs[i].detach().clone().requires_grad_(requires_grad)
        prepared[i] = as_non_leaf(value) if requires_grad and not is_leaf else value
    return prepared
