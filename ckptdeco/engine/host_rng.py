"""The global generators of the process: torch's for the CPU, Python's, and NumPy's once the program has imported it.

Every layer call looks at them when it begins and when it ends (R19). To read a state in full takes 0.7 µs (torch), 8 µs
(Python) and 34 µs (NumPy). So the mark of a stream is a few bytes of its state: its position, its first words, and the
normal number in store. A draw moves the position; if it comes to the same place again, all words have changed. The
state is only read, or with torch kept, when the mark has changed. Of Python's and NumPy's generators these bytes are
looked at where they are, in places that are checked once against what the public functions say. If they are not as
expected, the states are read in full: slower, and as exact.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable
from ctypes import c_char, string_at
from typing import Any

import torch

from ckptdeco.engine.overlap import rewinds
from ckptdeco.engine.streams import Stream, comparable

__all__ = ["CPU", "Seen", "global_streams", "look"]

_HEAD = object.__basicsize__  # bytes before an object's own fields
_N_WORDS = 624
_TWISTER = struct.Struct(f"i{_N_WORDS}I")  # position, words
_FIRST = 64  # bytes that are compared


class _Global:
    """A global generator."""

    __slots__ = ("get", "mark", "set")

    def __init__(self, mark: Callable[[], Any], get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        self.mark = mark
        self.get = get
        self.set = set


def _bytes_at(address: int, n: int) -> Any:
    """Memory whose present bytes are its attribute `raw`."""
    return (c_char * n).from_address(address)


def _python_mark() -> Callable[[], Any]:
    """Looks at the words of Python's generator, and at the normal number that it has in store."""
    generator: Any = getattr(random.random, "__self__", None)
    is_usual = type(generator) is random.Random
    if sys.implementation.name == "cpython" and is_usual:
        start = id(generator) + _HEAD
        position, *state = _TWISTER.unpack(_bytes_at(start, _TWISTER.size).raw)
        if (*state, position) == random.getstate()[1]:
            first = _bytes_at(start, _FIRST)
            return lambda: (first.raw, generator.gauss_next)
    return random.getstate


def _numpy_mark(module: Any) -> Callable[[], Any]:
    """Looks at the words of NumPy's generator, and at the object that has a normal number in store."""

    def in_full() -> Any:
        return comparable(module.get_state(legacy=False))

    if sys.implementation.name != "cpython" or not hasattr(module, "get_bit_generator"):
        return in_full
    place = _place_of_spare(module)
    if place is None:
        return in_full
    get_bits = module.get_bit_generator
    spare = _bytes_at(id(module.rand.__self__) + _HEAD + place[0], place[1])
    bits = get_bits()
    words = _words_of(bits)

    def mark() -> Any:
        nonlocal bits, words
        if get_bits() is not bits:  # set_bit_generator gave it another one
            bits = get_bits()
            words = _words_of(bits)
        return in_full() if words is None else (words[0].raw, words[1].raw, spare.raw)

    return mark


def _words_of(bits: Any) -> Any:
    """The first words of a Mersenne Twister, and its position behind the last; None for other bit generators."""
    if type(bits).__name__ != "MT19937":
        return None
    address = bits.ctypes.state_address
    *state, position = struct.unpack(f"{_N_WORDS}Ii", _bytes_at(address, _TWISTER.size).raw)
    known = bits.state["state"]
    if state != known["key"].tolist() or position != known["pos"]:
        return None
    return _bytes_at(address, _FIRST), _bytes_at(address + 4 * _N_WORDS, 4)


def _place_of_spare(module: Any) -> tuple[int, int] | None:
    """Where in a `RandomState` object its spare normal number is: start and number of bytes."""
    holder = module.RandomState(1)
    fields = _bytes_at(id(holder) + _HEAD, type(holder).__basicsize__ - _HEAD)
    holder.standard_normal()
    before, position = fields.raw, holder.get_state()[2]
    spare = struct.pack("d", holder.get_state()[4])
    holder.standard_normal()
    changed = [i for i, (a, b) in enumerate(zip(before, fields.raw, strict=True)) if a != b]
    if not changed or holder.get_state()[2] != position:
        return None
    start, end = changed[0] // 8 * 8, changed[-1] // 8 * 8 + 8
    return (start, end - start) if spare in before[start:end] and end - start <= _FIRST else None


def _cpu_mark() -> tuple[bytes, bytes]:
    """Both ends of the state of torch's generator for the CPU: position and first words, and the normals in store."""
    state = torch.default_generator.get_state()
    address = state.data_ptr()
    return string_at(address, _FIRST), string_at(address + state.numel() - _FIRST, _FIRST)


CPU: Stream = _Global(_cpu_mark, torch.default_generator.get_state, torch.default_generator.set_state)
_PYTHON: Stream = _Global(_python_mark(), random.getstate, random.setstate)
_streams: tuple[Stream, ...] = (CPU, _PYTHON)


def global_streams() -> tuple[Stream, ...]:
    """The streams that every call is watched for."""
    global _streams
    if len(_streams) == 2 and "numpy.random" in sys.modules:
        module: Any = sys.modules["numpy.random"]
        if hasattr(module, "set_state"):  # else it is being imported
            numpy = _Global(_numpy_mark(module), lambda: module.get_state(legacy=False), module.set_state)
            _streams = (CPU, _PYTHON, numpy)
    return _streams


class Seen:
    """The global streams at one moment; one object serves all moments between which nothing was drawn."""

    __slots__ = ("marks", "states", "streams")

    def __init__(self, streams: tuple[Stream, ...], marks: list[Any], states: list[Any]) -> None:
        self.streams = streams
        self.marks = marks
        self.states = states


_last = Seen((), [], [])


def look() -> Seen:
    """The global streams as they are."""
    global _last
    streams = global_streams()
    last = _last
    before = rewinds.of_others(0)
    marks = [stream.mark() for stream in streams]
    while marks != last.marks:
        known = dict(zip(last.streams, zip(last.marks, last.states, strict=True), strict=True))
        states = []
        for stream, mark in zip(streams, marks, strict=True):
            found = known.get(stream)
            states.append(stream.get() if found is None or found[0] != mark else found[1])
        last = Seen(streams, marks, states)
        marks = [stream.mark() for stream in streams]  # once more, in case another thread drew in between
    if not before[1] and rewinds.of_others(0) == before:  # else a state may be another than at its mark
        _last = last
    return last
