"""`@checkpointable`: declares what may be recomputed; the active policy decides what is.

The only module that uses wrapt. A decorated call without an active policy, or without grad, goes straight to the
function. Otherwise it is placed in its chain, the policy is asked, and the engine runs it.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import wrapt
from torch import nn

from ckptdeco import context
from ckptdeco.context import elsewhere, innermost
from ckptdeco.engine.call import Inputs, Options, run
from ckptdeco.engine.closures import rerunnable
from ckptdeco.engine.contexts import ContextFn, InContexts
from ckptdeco.engine.dataflow import Chain, Upstream, stamp_outputs, trace_inputs
from ckptdeco.engine.layer import LayerInfo, layer_info
from ckptdeco.engine.overlap import run_in_window
from ckptdeco.engine.passes import current_log
from ckptdeco.engine.pending import forget
from ckptdeco.engine.record import PassLog, Record
from ckptdeco.engine.running import running
from ckptdeco.engine.selection import InSelection
from ckptdeco.engine.torch_private import disable_dynamo, is_inside_torch_checkpoint, is_plain_autograd
from ckptdeco.engine.tree import tensors_in
from ckptdeco.errors import PolicyError
from ckptdeco.policy import Policy, Site
from ckptdeco.save import Chosen
from ckptdeco.schedule.actions import Action
from ckptdeco.schedule.chain import Chain as KnownChain
from ckptdeco.schedule.simulator import Layer

__all__ = ["LayerForward", "checkpointable", "is_decorated"]

_NOT_GIVEN: Any = object()
context.at_leave(forget)  # values that wait for a further backward go with the policy (R26)
F = TypeVar("F", bound=Callable[..., Any])


@overload
def checkpointable(function: F, /) -> F: ...
@overload
def checkpointable(*, name: str | None = None) -> Callable[[F], F]: ...


def checkpointable(function: Any = _NOT_GIVEN, /, *, name: str | None = None) -> Any:
    """Declare that a layer's calls may be checkpointed: decorates `forward`, any method, or a plain function.

    Nothing changes until a policy is active. Under one, the saved tensors of a call may be dropped after forward and
    recomputed in backward, alone or together with the calls before it, with the same random numbers, autocast,
    module state and arguments. The decorated callable keeps its name, signature, source and binding; modules that
    have it can be deep-copied and pickled, and keep their state_dict keys.

    Args:
        function: what to decorate.
        name: what errors, `explain()` and `only=` call it; default the layer's qualified name in its model.

    Returns:
        The decorated function, or a decorator if only `name` is given.

    Raises:
        PolicyError: `function` cannot be called.

    Cost:
        Memory: none of its own. Compute: under 1 µs a call while no policy is active or grad is off.

    Example:
        >>> import torch, ckptdeco
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(4, 4)
        ...     @ckptdeco.checkpointable
        ...     def forward(self, x):
        ...         return self.linear(x).tanh()
        >>> layers = [Block() for _ in range(6)]
        >>> x = torch.ones(2, 4)
        >>> with ckptdeco.policy(segment=3):
        ...     for layer in layers:
        ...         x = layer(x)
        >>> x.sum().backward()
    """
    if function is _NOT_GIVEN:
        return partial(_decorate, name=name)
    return _decorate(function, name=name)


def _decorate(function: Any, name: str | None) -> Any:
    plain = inspect.unwrap(function) if callable(function) else function
    if inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise PolicyError(
            "function",
            function,
            "it returns before its work is done, so nothing of it could be recomputed",
            "decorate the layer's forward, which returns tensors",
        )
    if isinstance(function, (classmethod, staticmethod)) or callable(function):
        if isinstance(function, type):
            raise PolicyError(
                "function",
                function,
                "a class is not a layer call",
                "decorate the class's forward method with @ckptdeco.checkpointable",
            )
        return Checkpointable(function, name)
    raise PolicyError(
        "function", function, "only something callable can be decorated", "put @ckptdeco.checkpointable above a def"
    )


if TYPE_CHECKING:
    _FunctionWrapper = wrapt.FunctionWrapper[Any, Any]
    _BoundFunctionWrapper = wrapt.BoundFunctionWrapper[Any, Any]
else:  # older releases of wrapt have no type parameters
    _FunctionWrapper, _BoundFunctionWrapper = wrapt.FunctionWrapper, wrapt.BoundFunctionWrapper


class Checkpointable(_FunctionWrapper):
    """A decorated function; copies and pickles as the function itself would."""

    def __init__(self, wrapped: Any, name: str | None = None) -> None:
        super().__init__(wrapped, _at_call if name is None else partial(_at_named_call, name))
        self._self_name = name

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Functions are copied as themselves; a bound method is bound to the copy of its object.
        wrapped = copy.deepcopy(self.__wrapped__, memo)
        return self if wrapped is self.__wrapped__ else Checkpointable(wrapped, self._self_name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wrapped = self.__wrapped__
        if getattr(wrapped, "__self__", None) is not None or not hasattr(wrapped, "__qualname__"):
            return Checkpointable, (wrapped, self._self_name)
        return wrapped.__qualname__  # found again by its name, as every function

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)


class LayerForward(Checkpointable):
    """The decorated forward of one layer instance, set as its attribute `forward` (see `ckptdeco.decorate`).

    Args:
        layer: the layer.
        wrapped: the forward to decorate: a bound method, or what another library set on the instance.
    """

    def __init__(self, layer: nn.Module, wrapped: Any) -> None:
        reference = weakref.ref(layer)
        _FunctionWrapper.__init__(self, wrapped, partial(_at_layer_call, reference))
        self._self_layer = reference
        self._self_name = None

    def take_off(self, layer: nn.Module) -> None:
        """Give the layer back the forward that it had."""
        wrapped: Any = self.__wrapped__
        if getattr(wrapped, "__self__", None) is layer and wrapped.__func__ is type(layer).forward:
            del layer.__dict__["forward"]
        else:
            layer.__dict__["forward"] = wrapped

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        layer: Any = copy.deepcopy(self._self_layer(), memo)
        copied = layer.__dict__.get("forward")  # there, unless the layer is being copied and this for its sake
        return copied if copied is not None else LayerForward(layer, copy.deepcopy(self.__wrapped__, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return LayerForward, (self._self_layer(), self.__wrapped__)


def _at_layer_call(
    layer: weakref.ref[nn.Module], wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`_at_call` for the forward of one instance, which need not be a bound method."""
    return _at_call(wrapped, layer(), args, kwargs)


class _BoundCheckpointable(_BoundFunctionWrapper):
    """What `layer.forward` is; copies and pickles as a bound method would."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(copy.deepcopy(_self_of(self), memo), self.__wrapped__.__name__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (_self_of(self), self.__wrapped__.__name__)

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)


Checkpointable.__bound_function_wrapper__ = _BoundCheckpointable  # type: ignore[misc]


def is_decorated(function: Any) -> bool:
    """Whether a function or bound method is a decorated one."""
    return isinstance(function, (Checkpointable, _BoundCheckpointable))


def _self_of(bound: Any) -> Any:
    return bound.__wrapped__.__self__


def _at_call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What wrapt runs at a call of a decorated function."""
    if innermost() is None:  # the common case pays for two looks
        if elsewhere.active and torch.is_grad_enabled():
            elsewhere.note()
        return wrapped(*args, **kwargs)
    return _at_named_call(None, wrapped, instance, args, kwargs)


def _at_named_call(name: str | None, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same, with the name that the user gave."""
    entry = context.active()
    if entry is None or not torch.is_grad_enabled():
        return wrapped(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        return _call_uncompiled(entry, name, wrapped, instance, args, kwargs)
    if not is_plain_autograd() or is_inside_torch_checkpoint():  # plain: R32; torch recomputes the whole region
        return wrapped(*args, **kwargs)
    return _call(entry, name, wrapped, instance, args, kwargs)


@disable_dynamo
def _call_uncompiled(
    entry: context.Entry, name: str | None, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The decorated call of a compiled region, which it breaks in two: the compiler cannot see through the engine."""
    if not is_plain_autograd() or is_inside_torch_checkpoint():
        return wrapped(*args, **kwargs)
    return _call(entry, name, wrapped, instance, args, kwargs)


class _ChainState:
    """What one policy decided for one chain of this pass."""

    __slots__ = ("at_backward", "known", "limit", "options", "policy")

    def __init__(self, policy: Policy, known: KnownChain) -> None:
        self.policy = policy
        self.options = Options(policy.preserve_rng_state, policy.determinism_check, policy.early_stop, policy.debug)
        self.known = known
        self.limit = policy.segment_limit(known)
        self.at_backward = partial(policy.at_backward, chain=known)


def _call(
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
        return _run_unmatched(entry.counting, body, inputs, chain, upstream)
    state: _ChainState = chain.context
    position = upstream.position + 1
    chain.length = max(chain.length, position + 1)
    action = _decide(policy, Site(layer, info.name, position, state.known), frame)
    log = PassLog(policy) if frame is not None and frame.again else current_log(policy, position == 0)
    record = Record(info.name, position, action, log)
    record.broken_by = upstream.broken_by
    record.input_bytes = _bytes_with_graph(inputs.tensors)
    log.records.append(record)
    if action is Action.SAVE:
        result = run_in_window(body, args, kwargs)
        _stamp(result, chain, position)
    else:
        if policy.selection is not None:
            body = _selecting(policy.selection, body, state.limit)
        result = run(
            body, inputs, upstream, action, info=info, options=state.options, at_backward=state.at_backward,
            limit=state.limit, chain=chain, position=position, record=record,
        )  # fmt: skip
    if type(body) is InSelection and record.dropped_bytes:
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
    return InContexts(body, selection)


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


def _decide(policy: Policy, site: Site, frame: Any) -> Action:
    """Ask the policy; nested calls get the same answer in the recompute of the call around them (R22)."""
    if frame is None:
        return policy.at_forward(site)
    if frame.again and frame.n_nested < len(frame.decisions):
        action: Action = frame.decisions[frame.n_nested]
    else:
        action = policy.at_forward(site)
        frame.decisions.append(action)
    frame.n_nested += 1
    return action


def _stamp(result: Any, chain: Chain, position: int) -> list[Any]:
    return stamp_outputs(tensors_in(result), None, chain, position, running.frame)


def _run_unmatched(entry: context.Entry, body: context.Within, inputs: Inputs, chain: Chain, upstream: Upstream) -> Any:
    """Run a layer that `only=` or `skip=` leaves out; chains go on through it."""
    if entry.unmatched_backward and not entry.n_matched:
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
