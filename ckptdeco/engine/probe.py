"""Every call is a probe (R19): what it saved is held while it runs, and at its end it is known what it did."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from ckptdeco.engine.attributes import versions_of
from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.kept import storage_address
from ckptdeco.engine.layer import Protection
from ckptdeco.engine.saved import MODIFIED, NO_TASK, Saved, is_parameter

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call
    from ckptdeco.engine.rng import Watch
    from ckptdeco.engine.state import BufferKey, ModuleTree, Snapshot

__all__ = ["Probe", "learn"]

_meta = attrgetter("shape", "dtype", "device")
_weakly = weakref.ref


def learn(
    call: Call,
    protection: Protection,
    tensors: list[Tensor],
    versions: list[int],
    written: set[int],
    trees: list[tuple[ModuleTree, Module]],
    buffers: Sequence[dict[BufferKey, int | None] | None],
) -> str:
    """What the call did that it was not protected from; "" if nothing. The next call is protected (R19)."""
    surprise = ""
    if written or versions != versions_of(tensors):
        mutated = written | {i for i, (a, b) in enumerate(zip(versions, versions_of(tensors), strict=True)) if a != b}
        if not mutated <= protection.mutated_inputs:
            protection.mutated_inputs |= mutated
            surprise = "it changed an input in place"
        if len({storage_address(tensors[i]) for i in mutated}) < len(mutated):
            surprise = "it changed an input in place that another argument shares"  # clones would not share it
    for snapshot, (tree, _), before in zip(call.snapshots, trees, buffers, strict=True):
        surprise = _learn_state(protection, snapshot, tree, before) or surprise
    return surprise


def _learn_state(
    protection: Protection, snapshot: Snapshot, tree: ModuleTree, before: dict[BufferKey, int | None] | None
) -> str:
    """The same, for the state of one module tree."""
    surprise = ""
    change = snapshot.attribute_change()
    if change == "replaced" and not protection.replaces_attributes:
        protection.replaces_attributes = True
        surprise = "it stored a value on its module"
    elif change == "changed in place" and not protection.mutates_attributes:
        protection.mutates_attributes = True
        surprise = "it changed a value on its module in place"
    if snapshot.has_iterators:  # used up as it goes, and most kinds cannot be copied
        return "it holds an iterator"
    if snapshot.has_new_tensors():
        return "it added or removed a parameter or buffer"
    if before is not None and snapshot.has_other_children():
        return "it added, removed or replaced a module"
    written: set[BufferKey] = set()
    if snapshot.has_new_versions():
        if snapshot.has_written_parameters():  # nothing can protect the next call from that
            return "it wrote a parameter"
        written = snapshot.written_buffers()
    if before:
        after = snapshot.buffer_values()
        written |= {key for key in after if before.get(key) != after[key]}
    if not written <= (protection.written_buffers | tree.small_buffers):
        protection.written_buffers |= written
        surprise = "it wrote a buffer"
    return surprise


def _lead_to_no_graph(saved: Saved) -> None:
    """Hold an alias of the tensor, which itself would close a cycle through its graph."""
    value = saved.value
    if value is not None and value.grad_fn is not None:
        saved.value = value.detach()


class Probe:
    """Holds the saved tensors of a running call until it is known what to do with them."""

    __slots__ = ("held", "saved", "values", "watch")

    def __init__(self, watch: Watch | None = None) -> None:
        self.watch = watch  # of the streams that the call may draw from
        self.saved: list[Saved] = []
        self.held: set[int] = set()  # slots that stay as they are
        self.values: list[int | None] = []  # fingerprints, if the call is checked by value

    def pack(self, tensor: Tensor) -> Saved:
        """The hook: hold the tensor in a slot."""
        saved = Saved()  # a constructor in Python would take 1 µs a call
        saved.value = tensor
        saved.version = tensor._version
        saved.task = NO_TASK
        self.saved.append(saved)
        return saved

    def pack_checked(self, tensor: Tensor) -> Saved:
        """As `pack`, and read the values."""
        self.values.append(None if is_parameter(tensor) else fingerprint(tensor))
        return self.pack(tensor)

    def keep_all(self) -> None:
        """Store everything."""
        for saved in self.saved:
            _lead_to_no_graph(saved)

    def set_apart(self, ranges: list[tuple[int, int]]) -> None:
        """Store these for good: they are not the layer's own (saved by a hook)."""
        indices = {i for start, end in ranges for i in range(start, end)}
        for i in indices:
            _lead_to_no_graph(self.saved[i])
        self.saved = [saved for i, saved in enumerate(self.saved) if i not in indices]
        self.values = [value for i, value in enumerate(self.values) if i not in indices]

    def drop(self, call: Call, buffers: set[int]) -> int:
        """Drop what can be recomputed, and note per slot what was decided (R22).

        `buffers` are the ids of the layer's own: autograd reads the buffer itself, whatever was written to it since.
        """
        slots = call.slots
        kinds: list[Any] = []
        dropped: list[Saved] = []
        for index, saved in enumerate(self.saved):
            value: Any = saved.value
            if saved.task != NO_TASK:  # `autograd.grad` ran inside the call
                call.has_inner_backward = True
                saved.task = NO_TASK
            # The first test is of what `is_parameter` tells, without its frame.
            is_alive = (type(value) is not Tensor or value._is_view()) and is_parameter(value)
            if is_alive or (buffers and id(value) in buffers) or index in self.held:
                if not is_alive:  # an error shall name the layer
                    saved.call, saved.index = call, index
                if value.grad_fn is not None:  # alive anyway, with its version (R8)
                    saved.value = value.detach()
                slots.append(None)
                continue
            saved.call = call
            saved.index = index
            saved.meta = shape, dtype, _ = _meta(value)
            kinds += dtype, len(shape)
            if value._version != saved.version:
                saved.version = MODIFIED  # backward must say so, as without us (R21)
            slots.append(_weakly(saved))
            dropped.append(saved)
        if dropped:
            self._learn_values(call, (len(slots), *kinds), dropped)
        for saved in dropped:  # at last, so that a failure before finds everything as it was
            saved.value = None
        self.saved = []
        return len(dropped)

    def _learn_values(self, call: Call, structure: tuple[Any, ...], dropped: list[Saved]) -> None:
        """Note the values of a call that is checked, or that saved other tensors than checked calls did (R20)."""
        protection = call.protection
        if self.values:
            protection.structures.add(structure)
        elif structure not in protection.structures:
            call.structure = structure
            call.is_checked = call.options.determinism_check != "none"
        elif not call.is_checked:
            return
        for saved in dropped:
            saved.values = fingerprint(saved.value)  # type: ignore[arg-type]
            if self.values and saved.values not in (None, self.values[saved.index]):
                protection.is_stop_safe = False  # saved before it was filled: stopping there would give noise

    def storages(self) -> dict[int, int]:
        """Addresses of what is held, with the bytes there; those of parameters, which live anyway, with none."""
        return {
            storage_address(saved.value): 0 if is_parameter(saved.value) else _n_bytes(saved.value)
            for saved in self.saved
            if saved.value is not None
        }

    def n_bytes(self, buffers: set[int]) -> int:
        """Bytes of the unique storages held, without parameters and the layer's own buffers."""
        storages: dict[int, int] = {}
        for saved in self.saved:
            value: Any = saved.value
            if is_parameter(value) or id(value) in buffers:
                continue
            storages[storage_address(value)] = _n_bytes(value)
        return sum(storages.values())


def _n_bytes(tensor: Tensor) -> int:
    """Bytes of its storage."""
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return tensor.nbytes if tensor.layout is torch.strided else 0
