"""Random number streams: what a layer call draws from, and how a recompute sees the same numbers (R19).

The CPU generator of torch is read at entry and exit of every call, which costs a few microseconds; so are the
generators of the devices in use and every `torch.Generator` among the arguments and attributes of the layer. Python's
and NumPy's global generators are dearer to read: calls that are checked by value read them, and so do all calls of a
layer once one of them was seen drawing there. Devices are never initialised just to read their state.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Draws", "Stream", "capture", "devices_of", "moved", "restore", "streams_of", "torch_streams"]

Devices = tuple[torch.device, ...]


class Stream(Protocol):
    """A source of random numbers whose state can be read and set."""

    def get(self) -> Any:
        """The present state."""

    def set(self, state: Any) -> None:
        """Make `state` the present one."""

    def same(self, a: Any, b: Any) -> bool:
        """Whether two states are equal."""


Draws = tuple[tuple[Stream, Any], ...]  # streams that a call drew from, with their states at its entry


class _OfGenerator:
    """A `torch.Generator`; by default that of the CPU."""

    __slots__ = ("get", "set")

    def __init__(self, generator: torch.Generator) -> None:
        self.get = generator.get_state
        self.set = generator.set_state

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b)


class _OfDevice:
    """The default generator of one accelerator device."""

    __slots__ = ("device", "module")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device.type)

    def get(self) -> Any:
        return self.module.get_rng_state(self.device)

    def set(self, state: Any) -> None:
        self.module.set_rng_state(state, self.device)

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b)


class _OfPython:
    """The global generator of the module `random`."""

    get = staticmethod(random.getstate)
    set = staticmethod(random.setstate)

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return bool(a == b)


class _OfNumPy:
    """NumPy's global generator."""

    @staticmethod
    def get() -> Any:
        return sys.modules["numpy"].random.get_state(legacy=True)

    @staticmethod
    def set(state: Any) -> None:
        sys.modules["numpy"].random.set_state(state)

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return a[0] == b[0] and a[2:] == b[2:] and a[1].tobytes() == b[1].tobytes()


_CPU: Stream = _OfGenerator(torch.default_generator)
_ONLY_CPU: tuple[Stream, ...] = (_CPU,)
_PYTHON: Stream = _OfPython()
_NUMPY: Stream = _OfNumPy()


def devices_of(tensors: list[Tensor]) -> Devices:
    """The accelerator devices among those of `tensors` (meta and CPU have no stream of their own)."""
    found: list[torch.device] = []
    for tensor in tensors:
        device = tensor.device
        if device.type not in ("cpu", "meta") and device not in found:
            found.append(device)
    return tuple(found)


def torch_streams(devices: Devices) -> tuple[Stream, ...]:
    """The default generators of the CPU and of `devices`."""
    return (_CPU, *map(_OfDevice, devices)) if devices else _ONLY_CPU


def streams_of(devices: Devices, generators: Sequence[torch.Generator], with_host: bool) -> tuple[Stream, ...]:
    """The streams to watch during a call; `with_host`: Python's and NumPy's, too."""
    streams = torch_streams(devices)
    if generators:
        streams += tuple(map(_OfGenerator, generators))
    if with_host:
        streams += (_PYTHON, _NUMPY) if "numpy" in sys.modules else (_PYTHON,)
    return streams


def is_host(stream: Stream) -> bool:
    """Whether it is Python's or NumPy's."""
    return stream is _PYTHON or stream is _NUMPY


def capture(streams: Sequence[Stream]) -> list[Any]:
    """The present states."""
    return [stream.get() for stream in streams]


def moved(streams: Sequence[Stream], before: list[Any]) -> Draws:
    """The streams that were drawn from since `before`, with the states they had then."""
    return tuple([(s, state) for s, state in zip(streams, before, strict=True) if not s.same(state, s.get())])


def restore(states: Draws) -> None:
    """Set streams back."""
    for stream, state in states:
        stream.set(state)
