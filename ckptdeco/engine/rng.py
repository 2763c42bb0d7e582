"""Random number streams: what a layer call draws from, and how a recompute sees the same numbers (R19).

Watched at every call: the CPU generator of torch, the generators of the devices in use, and every `torch.Generator`
among the arguments and attributes of the layer. Python's and NumPy's global generators are dearer to read: calls that
are checked by value read them, and so do all calls of a layer once one of them was seen drawing there. Devices are
never initialised just to read their state.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from ctypes import string_at
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Draws", "Stream", "Watch", "capture", "devices_of", "other_streams", "restore"]

Devices = tuple[torch.device, ...]
_ENDS = 64  # bytes


class Stream(Protocol):
    """A source of random numbers whose state can be read and set."""

    @property
    def get(self) -> Callable[[], Any]:
        """Reads the present state."""

    @property
    def set(self) -> Callable[[Any], Any]:
        """Makes a state the present one."""

    def same(self, a: Any, b: Any) -> bool:
        """Whether two states are equal."""


Draws = tuple[tuple[Stream, Any], ...]  # streams that a call drew from, with their states at its entry


class _OfGenerator:
    """A `torch.Generator`; by default that of the CPU."""

    __slots__ = ("get", "set")

    def __init__(self, generator: torch.Generator) -> None:
        self.get: Callable[[], Any] = generator.get_state
        self.set: Callable[[Any], Any] = generator.set_state

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return _ends(a) == _ends(b)


def _ends(state: Tensor) -> bytes:
    """What tells two states of one generator apart.

    Any draw moves the counters at the head of the state or the spare normal at its tail, and a whole turn of the
    Mersenne Twister changes its words, the first of which are in the head.
    """
    n, address = state.numel(), state.data_ptr()
    if n <= 2 * _ENDS:
        return string_at(address, n)
    return string_at(address, _ENDS) + string_at(address + n - _ENDS, _ENDS)


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
        return bool(a[0] == b[0] and a[2:] == b[2:] and a[1].tobytes() == b[1].tobytes())


_CPU: Stream = _OfGenerator(torch.default_generator)
_ONLY_CPU: dict[int, Stream] = {id(_CPU): _CPU}
_PYTHON: Stream = _OfPython()
_NUMPY: Stream = _OfNumPy()


def devices_of(tensors: list[Tensor]) -> Devices:
    """The accelerator devices among those of `tensors` (meta and CPU have no stream of their own)."""
    if all(tensor.is_cpu for tensor in tensors):
        return ()
    found: list[torch.device] = []
    for tensor in tensors:
        device = tensor.device
        if device.type not in ("cpu", "meta") and device not in found:
            found.append(device)
    return tuple(found)


def other_streams(devices: Devices, generators: Sequence[torch.Generator], with_host: bool) -> tuple[Stream, ...]:
    """The streams to watch during a call besides that of the CPU; `with_host`: Python's and NumPy's, too."""
    if not (devices or generators or with_host):
        return ()
    streams: list[Stream] = [*map(_OfDevice, devices), *map(_OfGenerator, generators)]
    if with_host:
        streams.append(_PYTHON)
        if "numpy" in sys.modules:
            streams.append(_NUMPY)
    return tuple(streams)


class _Last(threading.local):
    """The last entry state on this thread, and its ends."""

    state: Tensor | None = None
    ends: bytes = b""


_last = _Last()


class Watch:
    """The streams as a layer call found them, and which of them it drew from.

    Reading the state of the CPU generator copies 5 kB, which makes it the dearest part of a call. So it is read at
    entry only, one object serves all calls that found the same state, and the recompute sets it back whether the call
    drew or not. Calls that are checked by value (`is_exact`) read it at exit, too, and know.
    """

    __slots__ = ("cpu", "drew", "is_exact", "moved", "others", "states")

    def __init__(self, others: tuple[Stream, ...], is_exact: bool) -> None:
        self.others = others
        self.states = [stream.get() for stream in others] if others else []
        self.moved: Draws = ()  # of `others`
        self.drew = True  # on the CPU generator, as far as is known
        self.is_exact = is_exact
        state = torch.default_generator.get_state()
        ends = _ends(state)
        last = _last
        if ends == last.ends and last.state is not None:
            state = last.state
        else:
            last.state, last.ends = state, ends
        self.cpu = state

    def end(self) -> None:
        """The call is over."""
        if self.others:
            self.moved = tuple(
                [(s, state) for s, state in zip(self.others, self.states, strict=True) if not s.same(state, s.get())]
            )
            self.states = []
        if self.is_exact:
            self.drew = not _CPU.same(self.cpu, _CPU.get())

    def drew_on_host(self) -> bool:
        """Whether it drew from Python's or NumPy's generator."""
        return any(stream is _PYTHON or stream is _NUMPY for stream, _ in self.moved)

    def streams(self) -> dict[int, Stream]:
        """The streams that a recompute sets or must not move."""
        if not self.moved:
            return _ONLY_CPU
        return {**_ONLY_CPU, **{id(stream): stream for stream, _ in self.moved}}

    def set_back(self) -> None:
        """Set the streams to what the call found."""
        torch.default_generator.set_state(self.cpu)
        for stream, state in self.moved:
            stream.set(state)

    def is_broken(self) -> bool:
        """Whether a recompute that has just ended drew from the CPU generator although the call did not."""
        return self.is_exact and not self.drew and _ends(self.cpu) != _ends(torch.default_generator.get_state())


def capture(streams: Iterable[Stream]) -> Draws:
    """The present states."""
    return tuple([(stream, stream.get()) for stream in streams])


def restore(states: Draws) -> None:
    """Set streams back."""
    for stream, state in states:
        stream.set(state)
