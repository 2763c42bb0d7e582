"""Kinds of random number streams, and how those that a layer holds are found (R19).

A layer may draw from a `torch.Generator`, from an instance of Python's `random.Random`, or from a `Generator`,
`RandomState` or `BitGenerator` of NumPy: as an argument, as an attribute of its own or of its class, or through a
variable that its functions refer to. NumPy is only looked at if the program has imported it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from ctypes import string_at
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from ckptdeco.engine.attributes import is_plain_object
from ckptdeco.engine.roots import referred

__all__ = ["OfDevice", "OfGenerator", "Stream", "bytes_of", "comparable", "streams_in"]

# The global ones are watched anyway (host_rng); NumPy's is looked up when it is needed.
_PYTHON: Any = getattr(random.random, "__self__", None)
_MAX_DEPTH = 4  # of containers, objects and functions one inside the other


class Stream(Protocol):
    """A source of random numbers whose state can be read and set."""

    @property
    def mark(self) -> Callable[[], Any]:
        """Gives something that compares equal as long as nothing is drawn."""

    @property
    def get(self) -> Callable[[], Any]:
        """Reads the present state."""

    @property
    def set(self) -> Callable[[Any], Any]:
        """Makes a state the present one."""


def bytes_of(state: Tensor) -> bytes:
    """The state of a generator of torch, as bytes."""
    return string_at(state.data_ptr(), state.numel())


class OfGenerator:
    """A `torch.Generator`."""

    __slots__ = ("get", "set")

    def __init__(self, generator: torch.Generator) -> None:
        self.get: Callable[[], Any] = generator.get_state
        self.set: Callable[[Any], Any] = generator.set_state

    def mark(self) -> bytes:
        """All bytes of the state."""
        return bytes_of(self.get())


class OfDevice:
    """The default generator of one accelerator device."""

    __slots__ = ("device", "module")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device.type)

    def get(self) -> Any:
        """Reads the present state."""
        return self.module.get_rng_state(self.device)

    def set(self, state: Any) -> None:
        """Makes a state the present one."""
        self.module.set_rng_state(state, self.device)

    def mark(self) -> bytes:
        """All bytes of the state."""
        return bytes_of(self.get().cpu())


class _OfObject:
    """An object that reads and sets its state by methods."""

    __slots__ = ("get", "set")

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        self.get = get
        self.set = set

    def mark(self) -> Any:
        return comparable(self.get())


class _OfBitGenerator:
    """A bit generator of NumPy, which may be behind several `Generator` objects."""

    __slots__ = ("bits",)

    def __init__(self, bits: Any) -> None:
        self.bits = bits

    def get(self) -> Any:
        return self.bits.state

    def set(self, state: Any) -> None:
        self.bits.state = state

    def mark(self) -> Any:
        return comparable(self.bits.state)


def comparable(state: Any) -> Any:
    """A state of NumPy's with its arrays as bytes, whose comparison is then one truth value."""
    if isinstance(state, dict):
        return {key: comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


def streams_in(places: Iterable[Any]) -> list[Stream]:
    """The streams among values, and in containers, plain objects and variables of functions there."""
    numpy_random = sys.modules.get("numpy.random")
    found: dict[int, Stream] = {}
    seen: set[int] = set()
    stack = [(place, 0) for place in places]
    while stack:
        value, depth = stack.pop()
        stream = _stream_of(value, numpy_random)
        if stream is not None:
            found[id(value)] = stream
        elif depth < _MAX_DEPTH and id(value) not in seen:
            seen.add(id(value))
            stack += [(item, depth + 1) for item in _items_of(value)]
    return list(found.values())


def _stream_of(value: Any, numpy_random: Any) -> Stream | None:
    if isinstance(value, torch.Generator):
        return None if value is torch.default_generator else OfGenerator(value)
    if isinstance(value, random.Random):
        if isinstance(value, random.SystemRandom) or value is _PYTHON:
            return None
        return _OfObject(value.getstate, value.setstate)
    if numpy_random is None:
        return None
    if isinstance(value, numpy_random.Generator):
        return _OfBitGenerator(value.bit_generator)
    if isinstance(value, numpy_random.BitGenerator):
        return _OfBitGenerator(value)
    if isinstance(value, numpy_random.RandomState) and value is not numpy_random.rand.__self__:
        return _OfObject(lambda: value.get_state(legacy=False), value.set_state)
    return None


def _items_of(value: Any) -> Iterable[Any]:
    """What is looked at inside a value."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (FunctionType, classmethod, staticmethod)):
        function = getattr(value, "__wrapped__", value)  # a decorated function also is one
        return _variables_of(function) if type(function) is FunctionType else ()
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, BuiltinMethodType):
        return (value.__self__,)
    if isinstance(value, property):
        return (value.fget,)
    return vars(value).values() if is_plain_object(value) else ()


def _variables_of(function: FunctionType) -> Iterator[Any]:
    """What a function of the user's refers to: in its closure, in its globals, and in modules named there."""
    if str(function.__module__).split(".")[0] in ("torch", "numpy", "ckptdeco"):
        return
    for value in referred(function):
        if isinstance(value, ModuleType):
            if value.__name__.split(".")[0] not in ("torch", "numpy"):
                yield from [vars(value)[name] for name in function.__code__.co_names if name in vars(value)]
        elif value is not function:
            yield value
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
