"""Values that a layer stores on itself: noticing that a call changed them, and keeping them as they were (R19, R23).

Plain values are replaced and compared by identity. Containers and plain tensors may be changed in place, which only a
closer look finds: it is taken at calls that are checked by value, and once it found something, at all calls.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn

from ckptdeco.engine.tree import flatten, rebuild

__all__ = ["ATOMS", "keep_value", "leads_to_graph", "signature"]

# Types of values that lead to no graph and cannot be changed in place.
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_CONTAINERS = (list, dict, OrderedDict, defaultdict, tuple)
_MAX_DEPTH = 4


def signature(value: Any, depth: int = 0) -> Any:
    """Something that compares unequal after `value` was changed in place, as far as that can be seen."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if depth < _MAX_DEPTH:
        if kind in (list, tuple, deque):
            return id(value), [signature(item, depth + 1) for item in value]
        if kind in (dict, OrderedDict, defaultdict):
            return id(value), [(signature(k), signature(v, depth + 1)) for k, v in value.items()]
        if kind in (set, frozenset):
            return id(value), set(map(id, value))
    return id(value)


def leads_to_graph(value: Any) -> bool:
    """Whether a tensor with a graph is the value, or in it."""
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if type(value) not in _CONTAINERS:
        return False
    tensors: list[Tensor] = []
    flatten(value, tensors)
    return any(tensor.grad_fn is not None for tensor in tensors)


def keep_value(value: Any, clone: bool) -> Any:
    """A copy to hold until a recompute: containers are new, tensors lead to no graph.

    Tensors have memory of their own if the layer is known to write them (`clone`).
    """
    kind = type(value)
    if kind in ATOMS or isinstance(value, nn.Module):
        return value
    if isinstance(value, Tensor):
        return _keep_tensor(value, clone)
    if kind in _CONTAINERS:
        tensors: list[Tensor] = []
        template = flatten(value, tensors)
        return rebuild(template, [_keep_tensor(tensor, clone) for tensor in tensors])
    if kind in (set, deque):
        return copy.copy(value)
    return value


def _keep_tensor(tensor: Tensor, clone: bool) -> Tensor:
    if isinstance(tensor, nn.Parameter) or not (clone or tensor.grad_fn is not None):
        return tensor
    kept = tensor.detach()
    if clone:
        kept = kept.clone()
    return kept.requires_grad_() if tensor.requires_grad else kept
