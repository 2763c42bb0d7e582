"""The global generators of the process: torch's for the CPU, Python's, and NumPy's once the program has imported it.

Every layer call looks at them when it begins and when it ends (R19). To read a state in full takes 0.7 µs (torch), 8 µs
(Python) and 34 µs (NumPy). So the mark of a stream is a few bytes of its state: its position, its first words, and the
normal number in store. A draw moves the position; if it comes to the same place again, all words have changed. The
state is only read when the mark has changed. These bytes are looked at where they are, in places that are checked once
against what the public functions say. If they are not as expected, the states are read in full: slower, and as exact.
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
from ckptdeco.engine.streams import Stream, bytes_of, comparable
from ckptdeco.engine.torch_private import generator_address

__all__ = ["CPU", "Seen", "global_streams", "look"]

_HEAD = object.__basicsize__  # bytes before an object's own fields
_N_WORDS = 624
_TWISTER = struct.Struct(f"i{_N_WORDS}I")  # position, words
_FIRST = 64  # bytes that are compared
# Of torch's generators: position and words in memory; the public state before its normals, and these.
_STATE = struct.Struct(f"{1 + _N_WORDS}I")
_PUBLIC = struct.Struct(f"QiiQ{_N_WORDS}Q")
_NORMALS = struct.Struct("3di4xf?3x")
_AFTER = 32  # bytes behind the words that hold normals


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


def _cpu_mark(generator: torch.Generator) -> Callable[[], Any]:
    """Looks at the position and first words of a generator of torch for the CPU, and at its normals in store."""

    def in_full() -> tuple[bytes, bytes]:
        state = generator.get_state()
        address = state.data_ptr()
        return string_at(address, _FIRST), string_at(address + state.numel() - _FIRST, _FIRST)

    places = _places_in_generator() if sys.implementation.name == "cpython" else None
    if places is None:
        return in_full
    start, single, double = places
    address = generator_address(generator)
    first, after = _bytes_at(address + start, _FIRST), _bytes_at(address + start + _STATE.size, _AFTER)

    def mark() -> Any:
        held = after.raw  # a normal in store counts if the byte behind it says so
        if held[single + 4] or held[double + 8]:
            return (
                first.raw,
                held[single + 4] and held[single : single + 4],
                held[double + 8] and held[double : double + 8],
            )
        return first.raw

    return mark


def _places_in_generator() -> tuple[int, int, int] | None:
    """Where torch's generator for the CPU has its position and words, and behind them normals of both precisions."""
    generator = torch.Generator()
    torch.randint(0, 9, (3,), generator=generator)
    state = bytes_of(generator.get_state())
    if len(state) != _PUBLIC.size + _NORMALS.size:
        return None
    packed = _STATE.pack(*_PUBLIC.unpack_from(state)[3:])
    address = generator_address(generator)
    start = string_at(address, 4 * _FIRST).find(packed[:_FIRST])
    if start < 0 or string_at(address + start, _STATE.size) != packed:
        return None
    found = []
    for held in (True, False):  # give it normals to hold, and then none
        normals = _NORMALS.pack(0.0, 1 / 7, 0.0, held, 1 / 3, held)
        generator.set_state(torch.frombuffer(bytearray(state[: _PUBLIC.size] + normals), dtype=torch.uint8))
        found.append(string_at(address + start + _STATE.size, _AFTER))
    single, double = found[0].find(struct.pack("f", 1 / 3)), found[0].find(struct.pack("d", 1 / 7))
    if min(single, double) < 0 or [(f[single + 4], f[double + 8]) for f in found] != [(1, 1), (0, 0)]:
        return None
    return start, single, double


CPU: Stream = _Global(
    _cpu_mark(torch.default_generator), torch.default_generator.get_state, torch.default_generator.set_state
)
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
    marks = [stream.mark() for stream in streams]
    if marks == last.marks:
        return last
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
