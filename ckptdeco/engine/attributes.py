"""Values that a layer stores on itself or is given: noticing that a call changed them, and keeping them as they were.

Plain values are replaced and compared by identity. Containers, plain tensors and objects (a KV cache) may be changed in
place, which only a closer look finds: it is taken at calls that are checked by value, and once it found something, the
layer's calls keep copies (R19, R23).
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from operator import attrgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ckptdeco.engine.frozen import copy_frozen, freeze
from ckptdeco.engine.tree import flatten

__all__ = ["ATOMS", "as_non_leaf", "is_plain_object", "keep_value", "leads_to_graph", "signature", "versions_of"]

# Types of values that lead to no graph and cannot be changed in place.
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_CONTAINERS = (list, dict, OrderedDict, defaultdict, tuple)
_MAX_DEPTH = 4
_version = attrgetter("_version")


class _Own(torch.autograd.Function):
    """Hands a tensor over as a non-leaf that shares storage, so that the layer may change it in place (R30)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def as_non_leaf(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that may be changed in place although `tensor` is a leaf that requires grad."""
    with torch.enable_grad():
        own: Tensor = _Own.apply(tensor)  # type: ignore[no-untyped-call]
    return own


def versions_of(tensors: list[Tensor]) -> list[int]:
    """Version counters; 0 for inference tensors, which have none."""
    try:
        return [*map(_version, tensors)]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def signature(value: Any, depth: int = 0) -> Any:
    """Something that compares unequal after `value` was changed in place, as far as that can be seen."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if isinstance(value, Tensor):
        return id(value), *versions_of([value])
    if depth < _MAX_DEPTH:
        if kind in (list, tuple, deque):
            return id(value), [signature(item, depth + 1) for item in value]
        if kind in (dict, OrderedDict, defaultdict):
            return id(value), [(signature(k), signature(v, depth + 1)) for k, v in value.items()]
        if kind in (set, frozenset):
            return id(value), set(map(id, value))
        if is_plain_object(value):
            return id(value), signature(vars(value), depth)
        frozen = freeze(value)
        if frozen is not None:
            return id(value), frozen[0], [signature(item, depth + 1) for item in frozen[1]]
    return id(value)


def is_plain_object(value: Any) -> bool:
    """Whether it is an instance of a class written in Python that holds its state in attributes, such as a cache."""
    if isinstance(value, (nn.Module, type, Enum, FunctionType, MethodType, ModuleType)) or not hasattr(
        value, "__dict__"
    ):
        return False
    kind: Any = type(value)
    is_usual = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return bool(is_usual) and kind.__module__ != "builtins" and not any(vars(c).get("__slots__") for c in kind.__mro__)


def leads_to_graph(value: Any) -> bool:
    """Whether a tensor with a graph is the value, or in it."""
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if is_plain_object(value):
        return any(isinstance(item, Tensor) and item.grad_fn is not None for item in vars(value).values())
    if type(value) not in _CONTAINERS:
        return False
    tensors: list[Tensor] = []
    flatten(value, tensors)
    return any(tensor.grad_fn is not None for tensor in tensors)


def keep_value(value: Any, clone: bool, depth: int = 0) -> Any:
    """A copy to hold until a recompute: containers are new, tensors lead to no graph.

    Tensors have memory of their own if the layer is known to write them (`clone`).
    """
    kind = type(value)
    if kind in ATOMS or isinstance(value, nn.Module):
        return value
    if isinstance(value, Tensor):
        return _keep_tensor(value, clone)
    if depth > _MAX_DEPTH:
        return value
    if kind in (list, tuple):
        return kind([keep_value(item, clone, depth + 1) for item in value])
    if kind in (dict, OrderedDict):
        return kind([(key, keep_value(item, clone, depth + 1)) for key, item in value.items()])
    if kind is defaultdict:
        return defaultdict(value.default_factory, [(k, keep_value(v, clone, depth + 1)) for k, v in value.items()])
    if kind in (set, deque):
        return copy.copy(value)
    if is_plain_object(value):
        kept = object.__new__(kind)
        vars(kept).update(keep_value(vars(value), clone, depth))
        return kept
    return copy_frozen(value, lambda item: keep_value(item, clone, depth + 1))


def _keep_tensor(tensor: Tensor, clone: bool) -> Tensor:
    if isinstance(tensor, nn.Parameter) or not (clone or tensor.grad_fn is not None):
        return tensor
    kept = tensor.detach()
    if clone:
        kept = kept.clone()
    if not tensor.requires_grad:
        return kept
    kept.requires_grad_()
    if tensor.grad_fn is None or not clone:
        return kept
    return as_non_leaf(kept)
