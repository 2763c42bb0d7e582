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
from ckptdeco.engine.layer import suggest_name
from ckptdeco.engine.torch_private import disable_dynamo, is_inside_torch_checkpoint, is_plain_autograd
from ckptdeco.errors import PolicyError
from ckptdeco.placement import call_layer

__all__ = ["LayerForward", "checkpointable", "is_decorated"]

_NOT_GIVEN: Any = object()
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
        name: the layer's name in the model that was decorated.
    """

    def __init__(self, layer: nn.Module, wrapped: Any, name: str = "") -> None:
        reference = weakref.ref(layer)
        _FunctionWrapper.__init__(self, wrapped, partial(_at_layer_call, reference))
        self._self_layer = reference
        self._self_name = None
        self._self_suggested = name
        suggest_name(layer, name)

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
        return (
            copied
            if copied is not None
            else LayerForward(layer, copy.deepcopy(self.__wrapped__, memo), self._self_suggested)
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return LayerForward, (self._self_layer(), self.__wrapped__, self._self_suggested)


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
    return call_layer(entry, name, wrapped, instance, args, kwargs)


@disable_dynamo
def _call_uncompiled(
    entry: context.Entry, name: str | None, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The decorated call of a compiled region, which it breaks in two: the compiler cannot see through the engine."""
    if not is_plain_autograd() or is_inside_torch_checkpoint():
        return wrapped(*args, **kwargs)
    return call_layer(entry, name, wrapped, instance, args, kwargs)
