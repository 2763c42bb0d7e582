"""Places a decorated call in its chain, asks the policy what becomes of it, and has the engine run it.

Start at `call_layer`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ckptdeco import context
from ckptdeco.engine.call import Inputs, Options, run
from ckptdeco.engine.closures import rerunnable
from ckptdeco.engine.contexts import ContextFn, InSelective
from ckptdeco.engine.dataflow import Chain, Upstream, stamp_outputs, trace_inputs
from ckptdeco.engine.layer import LayerInfo, layer_info
from ckptdeco.engine.overlap import run_in_window
from ckptdeco.engine.passes import current_log
from ckptdeco.engine.pending import forget
from ckptdeco.engine.record import PassLog, Record
from ckptdeco.engine.running import running
from ckptdeco.engine.selection import InSelection
from ckptdeco.engine.tree import tensors_in
from ckptdeco.policy import Policy, Site
from ckptdeco.save import Chosen
from ckptdeco.schedule.actions import Action
from ckptdeco.schedule.chain import Chain as KnownChain
from ckptdeco.schedule.simulator import Layer

__all__ = ["call_layer"]

_FUTILE = "save= gains nothing"  # with the policy, where a layer remembers why its calls are stored whole

context.at_leave(forget)  # values that wait for a further backward go with the policy (R26)


class _ChainState:
    """What one policy decided for one chain of this pass."""

    __slots__ = ("at_backward", "known", "limit", "options", "policy")

    def __init__(self, policy: Policy, known: KnownChain) -> None:
        self.policy = policy
        self.options = Options(policy.preserve_rng_state, policy.determinism_check, policy.early_stop, policy.debug)
        self.known = known
        self.limit = policy.segment_limit(known)
        self.at_backward = partial(policy.at_backward, chain=known)


def call_layer(
    entry: context.Entry, name: str | None, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Place the call in its chain, ask the policy, run it."""
    policy: Policy = entry.policy
    layer = wrapped if instance is None else instance
    info = layer_info(layer, wrapped, name)
    if entry.is_inside:
        return _call_inside(policy, info, layer, wrapped, args, kwargs)
    frame = running.frame
    if frame is None:
        forget()
    is_matched = _is_matched(policy, info, layer)
    entry.counting.note(info.name, is_matched=is_matched)
    inputs = Inputs(args, kwargs)
    upstream = trace_inputs(inputs.tensors, frame)
    chain = upstream.chain
    if chain is None or chain.context.policy is not policy:
        chain = _begin_chain(policy, info, is_first_run=frame is None or not frame.again)
        upstream.position = -1
    body: Any = context.Within(rerunnable(wrapped), _entry_inside(entry))
    if not is_matched:
        return _run_unmatched(entry.counting, info, body, inputs, chain, upstream)
    state: _ChainState = chain.context
    position = upstream.position + 1
    chain.length = max(chain.length, position + 1)
    is_futile = policy.selection is not None and (policy, _FUTILE) in info.facts
    action = _decide(policy, Site(layer, info.name, position, state.known), frame, is_futile=is_futile)
    log = PassLog(policy) if frame is not None and frame.again else current_log(policy, position == 0)
    record = Record(info.name, position, action, log)
    record.broken_by = upstream.broken_by
    record.input_bytes = _bytes_with_graph(inputs.tensors)
    log.records.append(record)
    if action is Action.SAVE:
        if is_futile:
            record.store(info.facts[policy, _FUTILE])
        result = run_in_window(body, args, kwargs)
        _stamp(result, chain, position)
    else:
        if policy.selection is not None:
            body = _selecting(policy.selection, body, state.limit)
        result = run(
            body, inputs, upstream, action, info=info, options=state.options, at_backward=state.at_backward,
            limit=state.limit, chain=chain, position=position, record=record,
        )  # fmt: skip
    if type(body) is InSelection:
        if body.futile:
            info.facts[policy, _FUTILE] = body.futile
        elif record.dropped_bytes:
            record.kept_bytes += body.kept_bytes
            record.dropped_bytes -= body.still_saved_bytes
    _note_cost(chain, position, record)
    return result


def _entry_inside(entry: context.Entry) -> context.Entry | None:
    """What decorated calls inside a decorated call see: no policy, the same (`nested`), or that some of them stay."""
    policy: Policy = entry.policy
    if policy.nested:
        return context.Entry(policy, outer=entry)
    if getattr(policy.selection, "has_layers", False):
        return context.Entry(policy, outer=entry, is_inside=True)
    return None


def _call_inside(policy: Policy, info: LayerInfo, layer: Any, wrapped: Any, args: Any, kwargs: Any) -> Any:
    """A decorated call inside a decorated call, which `save=` may select."""
    selection: Any = policy.selection
    mode = running.selection
    if mode is None or not selection.layer(layer, info.name):
        return wrapped(*args, **kwargs)
    return mode.around_layer(wrapped, args, kwargs)


def _selecting(selection: Chosen | ContextFn, body: Any, limit: int | None) -> Any:
    """The body of a call with `save=`."""
    if isinstance(selection, Chosen):
        return InSelection(body, selection, ends_with_call=limit == 1)
    return InSelective(body, selection)


def _is_matched(policy: Policy, info: LayerInfo, layer: Any) -> bool:
    if policy.only is None and policy.skip is None:
        return True
    is_matched = info.facts.get(policy)
    if is_matched is None:
        is_matched = info.facts[policy] = policy.matches(layer, info.name)
    return is_matched


def _begin_chain(policy: Policy, info: LayerInfo, is_first_run: bool) -> Chain:
    """A new chain that begins at this layer, with what is known of the last one that did."""
    last: Chain | None = info.last_chain
    known = KnownChain()
    if last is not None:
        costs = [last.costs.get(i) for i in range(last.length)] if policy.segment == "auto" else [None]
        known = KnownChain(last.length, None if None in costs else tuple([Layer(1.0, 2.0, *c) for c in costs if c]))
    chain = Chain(_ChainState(policy, known))
    if is_first_run:  # a recompute may stop early: its chain is no measure
        info.last_chain = chain
    return chain


def _note_cost(chain: Chain, position: int, record: Record) -> None:
    """Remember input and saved bytes of a call for the next pass; a stored call keeps what was measured before."""
    if record.dropped_bytes:
        chain.costs[position] = record.input_bytes or record.kept_bytes, record.dropped_bytes
        return
    known = chain.context.known.costs
    if known is not None and position < len(known):
        chain.costs[position] = known[position].input_bytes, known[position].saved_bytes


def _bytes_with_graph(tensors: list[torch.Tensor]) -> int:
    """Bytes of the inputs that carry a graph; sparse ones have none that torch tells."""
    try:
        return sum([t.nbytes for t in tensors if t.grad_fn is not None])
    except RuntimeError:
        return sum([t.nbytes for t in tensors if t.grad_fn is not None and t.layout is torch.strided])


def _decide(policy: Policy, site: Site, frame: Any, *, is_futile: bool) -> Action:
    """Ask the policy; nested calls get the same answer in the recompute of the call around them (R22)."""
    if frame is None:
        return Action.SAVE if is_futile else policy.at_forward(site)
    if frame.again and frame.n_nested < len(frame.decisions):
        action: Action = frame.decisions[frame.n_nested]
    else:
        action = Action.SAVE if is_futile else policy.at_forward(site)
        frame.decisions.append(action)
    frame.n_nested += 1
    return action


def _stamp(result: Any, chain: Chain, position: int) -> list[Any]:
    return stamp_outputs(tensors_in(result), None, chain, position, running.frame)


def _run_unmatched(
    entry: context.Entry, info: LayerInfo, body: context.Within, inputs: Inputs, chain: Chain, upstream: Upstream
) -> Any:
    """Run a layer that `only=` or `skip=` leaves out; chains go on through it."""
    if entry.unmatched_backward and not entry.n_matched and info.name == entry.names[0]:
        # The first layer again, after a backward. Once may be a backward in the midst of forward, of a shared layer.
        entry.unmatched_backward = False
        entry.n_unmatched += 1
        if entry.n_unmatched > 1:
            entry.policy._check_matched(entry)
    result = run_in_window(body, inputs.args, inputs.kwargs)
    _stamp(result, chain, upstream.position)
    if not entry.n_matched:  # find out when the pass is over: its backward has begun
        for output in tensors_in(result)[:1]:
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(partial(_note_backward, entry))
    return result


def _note_backward(entry: context.Entry, grads: Any) -> None:
    entry.unmatched_backward = True
