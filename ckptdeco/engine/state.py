"""The state of a layer's module tree: read at entry, put back for a recompute, left as it was afterwards (R11, R19).

Forward and recompute must read the same flags, parameters, buffers and attributes, whatever the program did to the
module in between. A `Snapshot` holds, per module, its attribute values by identity; per parameter and buffer, the
entry itself with its version, address and `requires_grad`. Buffers that the layer is known to write are cloned.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ckptdeco.engine.fingerprint import fingerprint

__all__ = ["BufferKey", "ModuleTree", "Snapshot", "buffer_values"]

BufferKey = tuple[int, str]  # identity of a module's buffer dictionary, name
_Entry = tuple[dict[str, Any], str, Tensor, int, int, bool]  # owner dict, name, tensor, version, address, requires_grad

# Types of attribute values that lead to no graph: the common ones, so that most layers need no closer look.
_GRAPHLESS = frozenset({bool, int, float, str, type(None), tuple, dict, OrderedDict, set, torch.dtype, torch.device})


class ModuleTree:
    """The modules of one layer, found once, and again when a child was added or replaced. Holds them weakly: it lives
    in a register that must not keep a model alive."""

    __slots__ = ("_children", "_modules")

    def __init__(self, root: nn.Module) -> None:
        self._find(root)

    def _find(self, root: nn.Module) -> list[nn.Module]:
        modules = list(root.modules())
        self._modules = [weakref.ref(module) for module in modules]
        self._children = _children_of(modules)
        return modules

    def modules(self, root: nn.Module) -> list[nn.Module]:
        """The root and all modules below it."""
        modules: list[Any] = [module() for module in self._modules]
        if None in modules or _children_of(modules) != self._children:
            return self._find(root)
        return modules


def _children_of(modules: list[nn.Module]) -> list[int]:
    return [*map(id, chain.from_iterable([module._modules.values() for module in modules]))]


def buffer_values(modules: list[nn.Module]) -> dict[BufferKey, int | None]:
    """Fingerprints of all buffers: kernels (batch_norm) write them without a new version."""
    return {
        (id(module._buffers), name): fingerprint(buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _entries_of(modules: list[nn.Module]) -> list[_Entry]:
    """Every parameter and buffer with what tells whether it was changed."""
    entries: list[_Entry] = []
    for module in modules:
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is not None:
                    entries.append((owner, name, tensor, tensor._version, _address(tensor), tensor.requires_grad))
    return entries


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # tensors without storage of their own
        return 0


class Snapshot:
    """State of a module tree at entry of one layer call."""

    __slots__ = ("attributes", "clones", "entries", "has_unusual_attributes", "modules")

    def __init__(self, modules: list[nn.Module], written: frozenset[BufferKey]) -> None:
        self.modules = modules
        self.attributes = [module.__dict__.copy() for module in modules]
        values = chain.from_iterable([attributes.values() for attributes in self.attributes])
        self.has_unusual_attributes = not _GRAPHLESS.issuperset(map(type, values))
        if self.has_unusual_attributes:
            self.attributes = [_without_graphs(attributes) for attributes in self.attributes]
        self.entries = _entries_of(modules)
        self.clones: list[tuple[dict[str, Any], str, Tensor]] = []
        if written:
            with torch.no_grad():
                self.clones = [
                    (owner, name, tensor.clone())
                    for owner, name, tensor, *_ in self.entries
                    if (id(owner), name) in written
                ]

    def written_buffers(self) -> set[BufferKey]:
        """The buffers that were replaced or written since entry, as far as their versions tell, and their siblings:
        a kernel that writes several may count a version for one only (batch_norm)."""
        owners = set()
        for owner, name, tensor, version, _, _ in self.entries:
            if (tensor._version != version or owner.get(name) is not tensor) and not isinstance(tensor, nn.Parameter):
                owners.add(id(owner))
        if not owners:
            return owners
        return {(id(owner), name) for owner, name, *_ in self.entries if id(owner) in owners}

    def changed_parameter(self) -> str | None:
        """Name of a parameter or buffer that no longer holds the values forward read, or None."""
        for owner, name, tensor, version, address, _ in self.entries:
            if tensor._version != version or _address(tensor) != address:
                if any(owner is cloned and name == other for cloned, other, _ in self.clones):
                    continue
                return self._qualified(owner, name)
        return None

    def _qualified(self, owner: dict[str, Any], name: str) -> str:
        for prefix, module in self.modules[0].named_modules():
            if module._parameters is owner or module._buffers is owner:
                return f"{prefix}.{name}" if prefix else name
        return name

    def put_back(self) -> Callable[[], None]:
        """Put the state of entry back for a recompute; returns what sets the present state again afterwards.

        The recompute writes to clones of the buffers that its layer writes; the module's own keep their values.
        """
        present = [module.__dict__ for module in self.modules]
        before = self.attributes
        if not _are_same(present, before):
            before = [attributes.copy() for attributes in present]
            for now, entry in zip(present, self.attributes, strict=True):
                _replace(now, entry)
        undo: list[Callable[[], Any]] = []
        for owner, name, tensor, _, _, requires_grad in self.entries:
            if owner.get(name) is not tensor:
                undo.append(partial(owner.__setitem__, name, owner.get(name)))
                owner[name] = tensor
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                undo.append(partial(tensor.requires_grad_, tensor.requires_grad))
                tensor.requires_grad_(requires_grad)
        for owner, name, value in self.clones:
            undo.append(partial(owner.__setitem__, name, owner.get(name)))
            owner[name] = value.clone()
        return partial(_leave, present, before, undo)


def _leave(present: list[dict[str, Any]], before: list[dict[str, Any]], undo: list[Callable[[], Any]]) -> None:
    for action in reversed(undo):
        action()
    if not _are_same(present, before):
        for now, attributes in zip(present, before, strict=True):
            _replace(now, attributes)


def _are_same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    """Whether two lists of attribute dictionaries hold the very same values."""
    return [*map(len, a)] == [*map(len, b)] and all(
        map(is_, chain.from_iterable([x.values() for x in a]), chain.from_iterable([x.values() for x in b]))
    )


def _without_graphs(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy that does not keep the graph of a tensor that a layer stored on itself (it may lead to earlier calls)."""
    return {
        name: value.detach().requires_grad_() if isinstance(value, Tensor) and value.grad_fn is not None else value
        for name, value in attributes.items()
    }


def _replace(target: dict[str, Any], values: dict[str, Any]) -> None:
    """Make `target` hold exactly `values`, touching it only where it differs."""
    if not _are_same([target], [values]):
        target.clear()
        target.update(values)
