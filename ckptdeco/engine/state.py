"""The state of a layer's module tree: read at entry, put back for a recompute, left as it was afterwards (R11, R19).

Forward and recompute must read the same flags, parameters, buffers and attributes, whatever the program did to the
module in between. A `Snapshot` holds, per module, its attribute values by identity; per parameter and buffer, the
entry itself with its version, address and `requires_grad`. Buffers that the layer is known to write are cloned.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ckptdeco.engine.fingerprint import fingerprint

__all__ = ["BufferKey", "ModuleTree", "Snapshot", "buffer_values"]

BufferKey = tuple[int, str]  # identity of a module's buffer dictionary, name
_Entry = tuple[dict[str, Any], str, Tensor, int, int, bool]  # owner dict, name, tensor, version, address, requires_grad


class ModuleTree:
    """The modules of one layer, found once, and again when a child was added or replaced. Holds them weakly: it lives
    in a register that must not keep a model alive."""

    __slots__ = ("_children", "_modules")

    def __init__(self, root: nn.Module) -> None:
        self._find(root)

    def _find(self, root: nn.Module) -> list[nn.Module]:
        modules = list(root.modules())
        self._modules = [weakref.ref(module) for module in modules]
        self._children = [tuple(map(id, module._modules.values())) for module in modules]
        return modules

    def modules(self, root: nn.Module) -> list[nn.Module]:
        """The root and all modules below it."""
        modules: list[Any] = [module() for module in self._modules]
        for module, children in zip(modules, self._children, strict=True):
            if module is None or tuple(map(id, module._modules.values())) != children:
                return self._find(root)
        return modules


def entries_of(modules: list[nn.Module]) -> list[_Entry]:
    """Every parameter and buffer with what tells whether it was changed."""
    return [
        (owner, name, tensor, tensor._version, _address(tensor), tensor.requires_grad)
        for module in modules
        for owner in (module._parameters, module._buffers)
        for name, tensor in owner.items()
        if tensor is not None
    ]


def buffer_values(modules: list[nn.Module]) -> dict[BufferKey, int | None]:
    """Fingerprints of all buffers: kernels (batch_norm) write them without a new version."""
    return {
        (id(module._buffers), name): fingerprint(buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


class Snapshot:
    """State of a module tree at entry of one layer call."""

    __slots__ = ("attributes", "clones", "entries", "modules")

    def __init__(self, modules: list[nn.Module], written: frozenset[BufferKey]) -> None:
        self.modules = modules
        self.attributes = [_without_graphs(module.__dict__) for module in modules]
        self.entries = entries_of(modules)
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
        owners = {
            id(owner)
            for owner, name, tensor, version, _, _ in self.entries
            if not isinstance(tensor, nn.Parameter) and (owner.get(name) is not tensor or tensor._version != version)
        }
        if not owners:
            return set()
        return {(id(owner), name) for owner, name, tensor, *_ in self.entries if id(owner) in owners}

    def changed_parameter(self) -> str | None:
        """Name of a parameter or buffer that no longer holds the values forward read, or None."""
        cloned = {(id(owner), name) for owner, name, _ in self.clones}
        for owner, name, tensor, version, address, _ in self.entries:
            if (id(owner), name) in cloned:
                continue
            if tensor._version != version or _address(tensor) != address:
                return self._qualified(owner, name)
        return None

    def _qualified(self, owner: dict[str, Any], name: str) -> str:
        for prefix, module in self.modules[0].named_modules():
            if module._parameters is owner or module._buffers is owner:
                return f"{prefix}.{name}" if prefix else name
        return name

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put the state of entry back while a recompute runs, and the present state afterwards.

        The recompute writes to clones of the buffers that its layer writes; the module's own keep their values.
        """
        present = [module.__dict__ for module in self.modules]
        before = [attributes.copy() for attributes in present]
        flags: list[tuple[Tensor, bool]] = []
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for now, entry in zip(present, self.attributes, strict=True):
                _replace(now, entry)
            for owner, name, tensor, _, _, requires_grad in self.entries:
                if owner.get(name) is not tensor:
                    replaced.append((owner, name, owner.get(name)))
                    owner[name] = tensor
                if tensor.requires_grad != requires_grad and tensor.is_leaf:
                    flags.append((tensor, tensor.requires_grad))
                    tensor.requires_grad_(requires_grad)
            for owner, name, value in self.clones:
                replaced.append((owner, name, owner.get(name)))
                owner[name] = value.clone()
            yield
        finally:
            for owner, name, value in reversed(replaced):
                owner[name] = value
            for tensor, requires_grad in flags:
                tensor.requires_grad_(requires_grad)
            for now, attributes in zip(present, before, strict=True):
                _replace(now, attributes)


def _is_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a.values(), b.values()))


def _without_graphs(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy that does not keep the graph of a tensor that a layer stored on itself (it may lead to earlier calls)."""
    return {
        name: value.detach().requires_grad_() if isinstance(value, Tensor) and value.grad_fn is not None else value
        for name, value in attributes.items()
    }


def _replace(target: dict[str, Any], values: dict[str, Any]) -> None:
    """Make `target` hold exactly `values`, touching it only where it differs."""
    if not _is_same(target, values):
        target.clear()
        target.update(values)
