"""What the engine knows of a layer: its name for people, and what its calls did so far (R19).

Facts are kept per layer and per way of calling it (training or not, autocast, argument structure): a layer that
draws, writes or mutates only in training is protected only there. They are found weakly by the layer's identity, so
nothing is written on the user's module.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from pathlib import PurePath
from typing import Any

from torch import nn

from ckptdeco.engine.changes import Witness
from ckptdeco.engine.state import BufferKey, ModuleTree, is_gathering
from ckptdeco.engine.streams import Stream
from ckptdeco.schedule.actions import Action

__all__ = ["LayerInfo", "Protection", "layer_info", "suggest_name"]

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
Site = tuple[int, Action]  # position of a call in its chain, and what the schedule wanted of it
_MAX_KINDS = 64  # ways of calling a layer, beyond which those of modules that are gone are forgotten


class Protection:
    """What calls of one kind did, and hence what the next call is protected from."""

    __slots__ = (
        "boundary_inputs",
        "changed_later",
        "has_custom_functions",
        "hooks_take_part",
        "ignored_slots",
        "is_stop_safe",
        "known_sites",
        "modes_take_part",
        "mutated_inputs",
        "mutates_arguments",
        "mutates_attributes",
        "n_calls",
        "replaces_attributes",
        "sets_streams",
        "sizes",
        "streams",
        "structures",
        "watched_sites",
        "witnesses",
        "written_buffers",
    )

    def __init__(self) -> None:
        self.n_calls = 0  # that came to their end: what a failed call did is not known
        self.mutated_inputs: frozenset[int] = frozenset()  # inputs changed in place: cloned first
        self.written_buffers: frozenset[BufferKey] = frozenset()  # buffers written: cloned first
        self.boundary_inputs: dict[int, str] = {}  # inputs that may not be references, and why (R16)
        self.changed_later: frozenset[int] = frozenset()  # inputs that the program changes after the call (R33)
        self.witnesses: list[tuple[int, Witness]] = []  # of inputs of the last calls that were watched for that
        self.watched_sites: set[Site] = set()  # of calls that were watched for that, since the last recompute
        self.known_sites: set[Site] = set()  # of those that were followed by one
        self.has_custom_functions = False  # autograd Functions in Python, which may read saved tensors twice
        # whether dispatch modes around forward, by their types, change what it computes, as far as is known
        self.modes_take_part: dict[tuple[type, ...], bool] = {}
        self.hooks_take_part = False  # forward hooks inside change what it computes
        self.streams: tuple[Stream, ...] = ()  # of random numbers, found on the layer, its class and its functions
        self.sets_streams = False  # it sets streams of random numbers itself, and may leave them as it found them
        self.replaces_attributes = False  # it stores other values on its module
        self.mutates_arguments = False  # it changes objects that it is given, such as a cache
        self.mutates_attributes = False  # it changes containers or tensors on its module in place
        self.ignored_slots: frozenset[int] = frozenset()  # saved tensors whose values are noise
        self.is_stop_safe = True  # early stop gives right values (R20)
        self.structures: set[Hashable] = set()  # number and kinds of saved tensors, where it is known whether it does
        self.sizes: dict[Hashable, int] = {}  # bytes that a call saves, by the shapes of its inputs

    def is_check_due(self) -> bool:
        """Whether the next call is checked by value: the 1st, 2nd, 4th, 8th … (R12)."""
        return self.n_calls & (self.n_calls + 1) == 0


class LayerInfo:
    """One layer: a module, another object with a method, or a function."""

    __slots__ = (
        "_reference",
        "facts",
        "label",
        "last_chain",
        "name",
        "parameters",
        "protections",
        "tree",
    )

    def __init__(self, layer: Any, fn: Callable[..., Any], name: str | None) -> None:
        self._reference = _weak(layer)
        self.tree = ModuleTree(layer, _is_inside_gathering(layer)) if isinstance(layer, nn.Module) else None
        self.protections: dict[Hashable, Protection] = {}
        self.last_chain: Any = None  # the chain of the last pass that began here
        self.facts: dict[Hashable, Any] = {}  # what upper layers remember, e.g. whether a policy names this layer
        self.name = name or _name_in_model(layer) or _suggested_name(layer) or _own_name(layer, fn)
        self.parameters = _parameters(fn)
        self.label = f"{self.name} ({_where(fn)})"

    def layer(self) -> Any:
        """The layer, or None when it is gone."""
        return self._reference()

    def protection(self, kind: Hashable) -> Protection:
        """What is known of calls of this kind."""
        known = self.protections.get(kind)
        if known is None:
            if len(self.protections) >= _MAX_KINDS:  # a function that was called for modules that are gone
                self.protections = {k: p for k, p in self.protections.items() if not _is_gone(k)}
            known = self.protections[kind] = Protection()
        return known


def _is_gone(kind: Any) -> bool:
    """Whether a way of calling names a module that is gone."""
    return any(
        isinstance(part, tuple) and part and isinstance(part[0], weakref.ref) and part[0]() is None for part in kind
    )


def _weak(layer: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(layer)
    except TypeError:
        return lambda: layer


_layers: dict[int, LayerInfo] = {}
_suggested: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def suggest_name(layer: nn.Module, name: str) -> None:
    """What to call a layer where it is not called by the forward of a model around it, such as in a loop."""
    _suggested[layer] = name


def layer_info(layer: Any, fn: Callable[..., Any], name: str | None = None) -> LayerInfo:
    """The record of `layer`, made at its first call. `fn` is its decorated forward, `name` what the user calls it."""
    key = id(layer)
    info = _layers.get(key)
    if info is not None and info.layer() is layer:
        return info
    info = LayerInfo(layer, fn, name)
    _layers[key] = info
    try:
        weakref.finalize(layer, _forget, key, info).atexit = False
    except TypeError:
        pass
    return info


def _forget(key: int, info: LayerInfo) -> None:
    if _layers.get(key) is info:
        del _layers[key]


def _suggested_name(layer: Any) -> str | None:
    return _suggested.get(layer) if isinstance(layer, nn.Module) else None


def _own_name(layer: Any, fn: Callable[..., Any]) -> str:
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what a call gives by position, for errors."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple([p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)])


def _where(fn: Callable[..., Any]) -> str:
    """``Block.forward, model.py:41``."""
    plain = getattr(fn, "__func__", fn)
    name = getattr(plain, "__qualname__", type(plain).__name__).replace("<locals>.", "")
    code = getattr(plain, "__code__", None)
    return f"{name}, {PurePath(code.co_filename).name}:{code.co_firstlineno}" if code else name


_names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


def _name_in_model(layer: Any) -> str | None:
    """The layer's qualified name in the outermost module whose forward is running, found on the call stack.

    Only done once a layer: a decorated forward is given its layer, but not the model around it.
    """
    if not isinstance(layer, nn.Module):
        return None
    best = None
    for module in _running_modules():
        if module is not layer:
            best = _qualified(module, layer) or best
    return best


def _is_inside_gathering(layer: nn.Module) -> bool:
    """Whether it runs in a module around it that gathers its parameters (R13)."""
    return any(is_gathering(module) and _qualified(module, layer) is not None for module in _running_modules())


def _running_modules() -> Iterator[nn.Module]:
    """The modules whose call is under way on this thread, innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_name in ("forward", "_call_impl", "__call__", "_wrapped_call_impl"):
            module = frame.f_locals.get(code.co_varnames[0])
            if isinstance(module, nn.Module):
                yield module
        frame = frame.f_back


def _qualified(root: nn.Module, layer: nn.Module) -> str | None:
    names = _names.get(root)
    if names is None or id(layer) not in names:
        names = _names[root] = {id(module): name for name, module in root.named_modules()}
    name = names.get(id(layer))
    if name is None:
        return None
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS) or None
