"""What a layer call draws from random number streams, and how its recompute sees the same numbers (R19).

Every call looks at the process's generators when it begins and when it ends, and at those of the devices in use and
of the layer's own. A recompute sets the streams that its call drew from, and they go on afterwards where they were;
all others are left alone: the recompute must not draw from them either, but another thread may, such as one that
loads data. Devices are never initialised just to read their state.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ckptdeco.engine.host_rng import global_streams, look
from ckptdeco.engine.overlap import has_other_threads
from ckptdeco.engine.streams import OfDevice, Stream, bytes_of

__all__ = ["Devices", "Draws", "Watch", "capture", "devices_of", "restore"]

Devices = tuple[torch.device, ...]
Draws = tuple[tuple[Stream, Any], ...]  # streams that a call drew from, with their states at its entry


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


class Watch:
    """The streams as a layer call found them, and which of them it drew from.

    Cost:
        Compute: about 2 µs a call, and as much in its recompute; the states are read in full where something was drawn
        since the last look. Memory: the states of the streams that the call drew from, 5 kB for each.
    """

    __slots__ = ("ends", "found", "moved", "others", "quiet", "seen", "states")

    def __init__(self, devices: Devices = (), others: tuple[Stream, ...] = ()) -> None:
        self.moved: Draws = ()  # what it drew from
        self.ends: tuple[tuple[int, int], ...] = ()  # their states at entry and end, if there are other threads
        self.quiet: tuple[Stream, ...] = ()  # what it did not draw from
        self.seen: Any = look()  # the global ones at entry
        self.found: Any = None  # the same before the last recompute
        self.others = (*map(OfDevice, devices), *others) if devices or others else ()
        self.states = [(stream.mark(), stream.get()) for stream in self.others] if self.others else ()

    def end(self, is_setter: bool = False) -> str:
        """The call is over. Returns why it cannot be recomputed, if so.

        A layer that sets streams itself (`is_setter`), say to a seed, may leave them as it found them.
        """
        seen = self.seen
        streams = seen.streams
        marks = [stream.mark() for stream in streams]
        if is_setter and not has_other_threads():
            self.moved = tuple(zip(streams, seen.states, strict=True))
        elif marks == seen.marks and not self.others:
            self.quiet = streams
        else:
            before = [*zip(seen.marks, seen.states, strict=True), *self.states]
            marks += [stream.mark() for stream in self.others]
            watched = [*zip((*streams, *self.others), before, marks, strict=True)]
            self.moved = tuple([(stream, state) for stream, (mark, state), now in watched if mark != now])
            self.quiet = tuple([stream for stream, (mark, _), now in watched if mark == now])
            self.states = ()
            if self.moved and has_other_threads():
                self.ends = tuple([(_digest(state), _digest(stream.get())) for stream, state in self.moved])
        return "it imported numpy.random" if global_streams() is not streams else ""

    def set_back(self) -> list[Any]:
        """Set the streams that the call drew from to what it found; returns the marks of the others."""
        self.found = look()
        for stream, state in self.moved:
            stream.set(state)
        return [stream.mark() for stream in self.quiet]

    def before(self, streams: list[Stream]) -> tuple[Draws, Draws]:
        """Streams with their states at entry, and before this recompute; nothing if these are not known."""
        entry = dict(zip(self.seen.streams, self.seen.states, strict=True))
        found = dict(zip(self.found.streams, self.found.states, strict=True))
        if not all(stream in entry and stream in found for stream in streams):
            return (), ()
        return tuple([(s, entry[s]) for s in streams]), tuple([(s, found[s]) for s in streams])

    def add(self, draws: Draws) -> None:
        """The call drew from these streams, too, although it left them as it found them."""
        streams = [stream for stream, _ in draws]
        self.quiet = tuple([stream for stream in self.quiet if stream not in streams])
        self.moved += draws

    def shares_draws(self) -> bool:
        """Whether it drew from a generator that all threads of the process share."""
        return bool(self.moved) and any(stream in global_streams() for stream, _ in self.moved)

    def is_disturbed(self) -> bool:
        """Whether a complete run that has just ended left a stream elsewhere than forward did.

        Where it was set to will do, too: the layer drew nothing, and in forward it was another thread that did.
        """
        return any(
            _digest(stream.get()) not in ends
            for (stream, _), ends in zip(self.moved, self.ends, strict=False)
            if type(stream) is not OfDevice
        )

    def has_moved(self, marks: list[Any]) -> list[Stream]:
        """The streams that moved since `set_back` although the call did not draw from them."""
        now = [stream.mark() for stream in self.quiet]
        if now == marks:
            return []
        return [stream for stream, one, other in zip(self.quiet, marks, now, strict=False) if one != other]


def _digest(state: Any) -> int:
    """Equal for equal states; marks only tell whether something was drawn since."""
    return hash(bytes_of(state.cpu()) if isinstance(state, Tensor) else pickle.dumps(state))


def capture(streams: Iterable[Stream]) -> Draws:
    """The present states."""
    return tuple([(stream, stream.get()) for stream in streams])


def restore(states: Draws) -> None:
    """Set streams back."""
    for stream, state in states:
        stream.set(state)
