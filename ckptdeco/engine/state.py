"""The state of a layer's module tree: read at entry, put back for a recompute, left as it was afterwards (R11, R19).

Forward and recompute must read the same flags, parameters, buffers and attributes, whatever the program did to the
module in between. A `Snapshot` holds, per module, its attribute values by identity; per parameter and buffer, the
entry itself with its version, address and `requires_grad`. Buffers that the layer is known to write are cloned.

This runs at each call of each layer, and its cost is that of touching memory: it reads only the attributes that a
class adds to `nn.Module`, and whole columns with `map` rather than one value after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ckptdeco.engine.attributes import ATOMS, keep_value, leads_to_graph, signature, versions_of
from ckptdeco.engine.fingerprint import fingerprint
from ckptdeco.engine.streams import Stream, streams_in
from ckptdeco.engine.undo import Undo

if TYPE_CHECKING:
    from ckptdeco.engine.layer import Protection

__all__ = ["BufferKey", "ModuleTree", "Snapshot", "is_gathering"]

BufferKey = tuple[int, str]  # identity of a module's buffer dictionary, name
_GATHERING = frozenset({"FSDPModule", "FullyShardedDataParallel"})
_SMALL = 1 << 16  # bytes of all buffers of a layer up to which they are cloned at every call

# Attributes that every module has; but for the flag they are dictionaries, and what is in them is looked at.
_BASE = frozenset(nn.Module().__dict__) - {"training"}
_requires_grad = attrgetter("requires_grad")
_N_BASE = len(_BASE) - 1  # an entry has one more than the module holds
_FILLER = "_is_full_backward_hook"
_children = attrgetter("_modules")
_hook_tables = attrgetter("_forward_hooks", "_forward_pre_hooks")
_tensor_tables = attrgetter("_parameters", "_buffers")
_dict = attrgetter("__dict__")
_alive = weakref.ref.__call__
_get: Any = itemgetter.__call__


class ModuleTree:
    """The modules of one layer and where their state is, found once, and again when it changed shape.

    Holds modules weakly, and none of their dictionaries, in which hooks may lead back to them: it lives in a register.
    """

    __slots__ = (
        "_is_inside_gathering",
        "_modules",
        "_size",
        "child_names",
        "children",
        "getters",
        "has_buffers",
        "has_large_buffers",
        "has_lazy",
        "is_gathered",
        "keys",
        "own_code",
        "small_buffers",
    )

    def __init__(self, root: nn.Module, is_inside_gathering: bool = False) -> None:
        self._is_inside_gathering = is_inside_gathering
        self._find(root)

    def _find(self, root: nn.Module) -> list[nn.Module]:
        modules = list(root.modules())
        self._modules = [weakref.ref(module) for module in modules]
        self.children = _children_of(modules)
        self.child_names = [[*module._modules] for module in modules]
        self._size = sum(map(len, map(_dict, modules)))  # attributes were added or removed if it changes
        self.keys = [[key for key in module.__dict__ if key not in _BASE] for module in modules]
        self.getters = [*map(_getter, self.keys)]
        # Modules whose code is not torch's: only these store tensors or generators on themselves while they run.
        self.own_code = [i for i, module in enumerate(modules) if _is_own_code(type(module))]
        # Parameters that hooks around forward gather and free again are theirs: not compared, not put back (R13).
        self.is_gathered = self._is_inside_gathering or any(map(is_gathering, modules))
        owned = [] if self.is_gathered else modules
        buffers = [tensor for module in owned for tensor in module._buffers.values() if tensor is not None]
        self.has_buffers = bool(buffers)
        # Kernels such as batch_norm write buffers without a trace: small ones are never given to a recompute.
        self.small_buffers: frozenset[BufferKey] = frozenset()
        self.has_lazy = any(map(is_lazy, _tensors_of([*chain.from_iterable(map(_tensor_tables, owned))])))
        self.has_large_buffers = not self.has_lazy and sum(map(_n_bytes, buffers)) > _SMALL
        if self.has_lazy:
            self._size = -1  # look again at the next call
        elif not self.has_large_buffers:
            self.small_buffers = frozenset([(id(m._buffers), name) for m in owned for name in m._buffers])
        return modules

    def modules(self, root: nn.Module) -> list[nn.Module]:
        """The root and all modules below it."""
        modules: list[Any] = [*map(_alive, self._modules)]
        try:
            if _children_of(modules) == self.children and sum(map(len, map(_dict, modules))) == self._size:
                return modules
        except AttributeError:  # a child is gone
            pass
        return self._find(root)


def _getter(keys: list[str]) -> itemgetter[Any]:
    """Gives all that a module holds, and one entry more: with two keys at least it gives a tuple."""
    if "training" in keys:
        return itemgetter(*keys, "training")
    return itemgetter(*(keys or [_FILLER]), _FILLER)  # a class whose `training` is a property (compiled modules)


def is_gathering(module: nn.Module) -> bool:
    """Whether hooks around its forward gather the parameters below it and free them again (FSDP)."""
    return any(base.__name__ in _GATHERING for base in type(module).__mro__)


def _is_own_code(kind: type) -> bool:
    return kind is not object and not kind.__module__.startswith("torch.nn.modules.")


def _children_of(modules: list[nn.Module]) -> list[int]:
    return [*map(id, _values(map(_children, modules)))]


def _values(dictionaries: Any) -> Any:
    return chain.from_iterable(map(dict.values, dictionaries))


def _tensors_of(owners: list[dict[str, Any]]) -> list[Tensor]:
    return [tensor for tensor in _values(owners) if tensor is not None]


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _addresses(tensors: list[Tensor]) -> list[int]:
    try:
        return [*map(Tensor.data_ptr, tensors)]
    except (RuntimeError, ValueError):  # tensors without storage of their own, parameters not yet made
        return [0] * len(tensors)


class Snapshot:
    """State of a module tree at entry of one layer call."""

    __slots__ = (
        "addresses", "attributes", "child_names", "children", "clones", "copies", "entries", "flags", "generators",
        "getters", "has_iterators", "has_stray", "hooks", "is_lazy", "keys", "modules", "originals", "own_code",
        "own_tensors", "owners", "signatures", "tensors", "versions",
    )  # fmt: skip

    def __init__(self, tree: ModuleTree, root: nn.Module, protection: Protection) -> None:
        self.modules = modules = tree.modules(root)
        self.keys, self.getters, self.own_code = tree.keys, tree.getters, tree.own_code
        self.children, self.child_names = tree.children, tree.child_names
        # Looked at before and after the call, so it is the dictionaries themselves that are listed.
        self.hooks: list[dict[int, Any]] = [*chain.from_iterable(map(_hook_tables, modules))]
        owned = [] if tree.is_gathered else modules
        self.owners: list[dict[str, Any]] = [*chain.from_iterable(map(_tensor_tables, owned))]
        self.attributes: list[tuple[Any, ...]] = [*map(_get, tree.getters, map(_dict, modules))]
        self.has_iterators = False
        self.has_stray = False  # whether the last recompute left other attributes than those of entry
        self.generators: list[Stream] = []  # of torch: the layer may have made them since its last checked call
        has_unusual_attributes = False
        self.signatures: list[Any] | None = None
        self.originals = self.attributes  # while the call runs
        self.copies: dict[int, tuple[Any, ...]] = {}
        self.own_tensors: set[int] = set()  # ids of plain tensors among the attributes
        for i in tree.own_code:
            if not ATOMS.issuperset(map(type, self.attributes[i])):
                has_unusual_attributes = True
        if has_unusual_attributes:
            self.signatures = self._signatures()
            is_changing = protection.replaces_attributes or protection.mutates_attributes
            values = [value for i in tree.own_code for value in self.attributes[i]]
            self.own_tensors = {id(v) for v in values if type(v) is Tensor and v.grad_fn is None}
            self.generators = streams_in([v for v in values if isinstance(v, (torch.Generator, list, dict))])
            self.has_iterators = any(isinstance(value, Iterator) for value in values)
            # Kernels write plain tensors without a trace, as they do buffers: small ones are cloned.
            small = [v for v in values if type(v) is Tensor and v.grad_fn is None and _n_bytes(v) <= _SMALL]
            if is_changing or small or any(map(leads_to_graph, values)):
                self._keep_attributes(clone=bool(small) or protection.mutates_attributes)
        self.entries: list[Tensor | None] = [*_values(self.owners)]
        self.tensors = [tensor for tensor in self.entries if tensor is not None]
        self.is_lazy = tree.has_lazy
        self.versions: list[int] = versions_of(self.tensors)
        self.flags: list[bool] = [*map(_requires_grad, self.tensors)]
        self.addresses = _addresses(self.tensors)
        self.clones: list[tuple[dict[str, Any], str, Tensor]] = []
        written = protection.written_buffers | tree.small_buffers
        if written:
            self.clones = [
                (owner, name, tensor.detach().clone())
                for owner, name, tensor in self._places()
                if (id(owner), name) in written and not isinstance(tensor, nn.Parameter)
            ]

    def _signatures(self) -> list[Any]:
        return [[*map(signature, self.getters[i](self.modules[i].__dict__))] for i in self.own_code]

    def _keep_attributes(self, clone: bool) -> None:
        """Hold copies where the layer changes what it stores on itself: they lead to no graph of an earlier call."""
        self.attributes = list(self.attributes)
        for i in self.own_code:
            self.copies[i] = self.attributes[i] = tuple([keep_value(value, clone) for value in self.attributes[i]])

    def buffer_values(self) -> dict[BufferKey, int | None]:
        """Fingerprints of all buffers: kernels (batch_norm) write them without a new version."""
        return {
            (id(owner), name): fingerprint(tensor)
            for owner in self.owners
            for name, tensor in owner.items()
            if tensor is not None and not isinstance(tensor, nn.Parameter)
        }

    def attribute_change(self) -> str:
        """What the call, which is over, did to attributes: "" for nothing, "replaced", or "changed in place"."""
        originals, self.originals = self.originals, self.attributes
        signatures, self.signatures = self.signatures, None
        if not self._has_attributes(originals, self.own_code):
            return "replaced"
        try:
            if signatures is not None and signatures != self._signatures():
                return "changed in place"
        except RuntimeError:  # values that cannot be compared
            pass
        return ""

    def attribute_values(self) -> list[tuple[Any, ...]]:
        """What modules with code of their own hold as attributes, and their classes."""
        classes = {base for i in self.own_code for base in type(self.modules[i]).__mro__ if _is_own_code(base)}
        return [self.attributes[i] for i in self.own_code] + [tuple(vars(base).values()) for base in classes]

    def has_written_parameters(self) -> bool:
        """Whether a parameter has another version than at entry."""
        return any(
            present != version and isinstance(tensor, nn.Parameter)
            for tensor, version, present in zip(self.tensors, self.versions, versions_of(self.tensors), strict=True)
        )

    def has_new_tensors(self) -> bool:
        """Whether parameters or buffers were added, removed or replaced (lazy layers)."""
        return self.is_lazy or len(self.entries) != sum(map(len, self.owners))

    def has_other_children(self) -> bool:
        """Whether modules were added, removed or swapped since entry."""
        return _children_of(self.modules) != self.children

    def _places(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Where each tensor stood at entry: the owner's dictionary and the name."""
        names = [(owner, name) for owner in self.owners for name, tensor in owner.items() if tensor is not None]
        if len(names) != len(self.tensors):  # an entry became None or was added meanwhile: by what is still there
            here = {id(tensor): (owner, name) for owner in self.owners for name, tensor in owner.items()}
            names = [here.get(id(tensor), ({}, "a parameter")) for tensor in self.tensors]
        return [(owner, name, tensor) for (owner, name), tensor in zip(names, self.tensors, strict=True)]

    def _holds_the_same(self) -> bool:
        """Whether every owner holds the very tensors of entry."""
        return not self.has_new_tensors() and all(map(is_, _values(self.owners), self.entries))

    def written_buffers(self) -> set[BufferKey]:
        """The buffers that were replaced or written since entry, as far as their versions tell, and their siblings.

        A kernel that writes several may count a version for one only (batch_norm).
        """
        present = versions_of(self.tensors)
        if self.versions == present and self._holds_the_same():
            return set()
        changed = set()
        for (owner, name, tensor), version, now in zip(self._places(), self.versions, present, strict=True):
            if (now != version or owner.get(name) is not tensor) and not isinstance(tensor, nn.Parameter):
                changed.add(id(owner))
        return {(id(owner), name) for owner, name, _ in self._places() if id(owner) in changed}

    def has_new_versions(self) -> bool:
        """Whether a parameter or buffer was written since entry, as far as versions tell."""
        return self.versions != versions_of(self.tensors)

    def is_untouched(self) -> bool:
        """Whether parameters and buffers are what forward read: the common case, in two sweeps."""
        tensors = self.tensors
        return (
            self.versions == versions_of(tensors)
            and self.addresses == _addresses(tensors)
            and self.flags == [*map(_requires_grad, tensors)]
        )

    def changed_parameter(self) -> str | None:
        """Name of a parameter or buffer that no longer holds the values forward read, or None."""
        cloned = {(id(owner), name) for owner, name, _ in self.clones}
        now = zip(versions_of(self.tensors), _addresses(self.tensors), strict=True)
        for (owner, name, _), version, address, present in zip(
            self._places(), self.versions, self.addresses, now, strict=True
        ):
            if present != (version, address) and (id(owner), name) not in cloned:
                return self._qualified(owner, name)
        return None

    def _qualified(self, owner: dict[str, Any], name: str) -> str:
        for prefix, module in self.modules[0].named_modules():
            if module._parameters is owner or module._buffers is owner:
                return f"{prefix}.{name}" if prefix else name
        return name

    def put_back(self, undo: Undo, is_untouched: bool, hide_grads: bool) -> None:
        """Put the state of entry back for a recompute; `undo` gets what sets the present state again afterwards.

        `is_untouched` is the answer of the method of that name; `hide_grads` keeps gradients out of reach of a backward
        within the layer, which forward ran already. The recompute writes to clones of the buffers that its layer
        writes; the module's own keep their values.
        """
        if self.has_other_children():
            self._put_children_back(undo)
        is_same = self.has_same_attributes()
        self.has_stray = False
        undo.append(partial(self._put_attributes_back, None if is_same else [*map(_own_attributes, self.modules)]))
        if not is_same:
            for i, module in enumerate(self.modules):
                _assign(module, self._entry(i))
            for i, values in self.copies.items():  # the recompute may change these in its turn
                fresh = [keep_value(value, clone=True) for value in values]
                _assign(self.modules[i], dict(zip(self.keys[i], fresh, strict=False)))
        if not self._holds_the_same():
            for owner, name, tensor in self._places():
                if owner.get(name) is not tensor:
                    undo.append(partial(owner.__setitem__, name, owner.get(name)))
                    owner[name] = tensor
        if not is_untouched:
            for tensor, flag in zip(self.tensors, self.flags, strict=True):
                if tensor.requires_grad != flag and tensor.is_leaf:
                    undo.append(partial(tensor.requires_grad_, tensor.requires_grad))
                    tensor.requires_grad_(flag)
        for owner, name, value in self.clones:
            undo.append(partial(owner.__setitem__, name, owner.get(name)))
            owner[name] = value.clone()
        if hide_grads:
            for tensor in self.tensors:
                undo.append(partial(setattr, tensor, "grad", tensor.grad))
                tensor.grad = None

    def _put_children_back(self, undo: Undo) -> None:
        known: dict[int, nn.Module | None] = {id(module): module for module in self.modules}
        identities = iter(self.children)
        for module, names in zip(self.modules, self.child_names, strict=True):
            undo.append(partial(module.__dict__.__setitem__, "_modules", module._modules))
            module.__dict__["_modules"] = {name: known.get(next(identities)) for name in names}

    def _put_attributes_back(self, present: list[dict[str, Any]] | None) -> None:
        """Undo what a recompute did to attributes; `present` has those before it, unless they were those of entry."""
        is_same = self.has_same_attributes()
        self.has_stray |= not is_same
        if present is not None:
            for module, values in zip(self.modules, present, strict=True):
                _assign(module, values)
        elif not is_same:
            for i, module in enumerate(self.modules):
                _assign(module, self._entry(i))

    def _entry(self, i: int) -> dict[str, Any]:
        return dict(zip(self.keys[i], self.attributes[i], strict=False))

    def has_same_attributes(self) -> bool:
        """Whether all modules have the attributes of entry."""
        return self._has_attributes(self.attributes, range(len(self.modules)))

    def _has_attributes(self, attributes: list[tuple[Any, ...]], which: Any) -> bool:
        """Whether these modules hold the very values in `attributes`."""
        try:
            modules, getters = self.modules, self.getters
            for i in which:
                values = modules[i].__dict__
                entry = attributes[i]
                if len(values) != _N_BASE + len(entry) or not all(map(is_, getters[i](values), entry)):
                    return False
        except KeyError:  # an attribute is gone
            return False
        return True


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if key not in _BASE}


def _assign(module: nn.Module, values: dict[str, Any]) -> None:
    """Make the module have exactly these attributes, besides those of every module."""
    attributes = module.__dict__
    for key in [key for key in attributes if key not in _BASE and key not in values]:
        del attributes[key]
    for key, value in values.items():
        if key not in attributes or attributes[key] is not value:
            attributes[key] = value
