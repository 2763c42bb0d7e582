"""Kept tensors: boundaries and side inputs, held through autograd's own saved-tensor mechanism (R3, R27, R29).

A kept tensor is saved by a tiny autograd Function, so that autograd checks its version when it is asked for again and
the user's own saved-tensor hooks (`save_on_cpu`) see it. What is saved is a detached alias: it shares storage and
version counter with the tensor, but leads to no graph, so keeping it can close no reference cycle.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ckptdeco.engine.torch_private import is_inside_torch_checkpoint

__all__ = ["Kept", "geometry", "keep"]


class _Keep(torch.autograd.Function):
    """Saves one tensor; its node is never part of a backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(value)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        raise AssertionError("the node of a kept tensor is not part of any backward")


_ANCHOR = torch.empty(0, requires_grad=True)  # makes `_Keep` leave a node even if the kept tensor needs no grad


class Kept:
    """One tensor kept for a recompute."""

    __slots__ = ("__weakref__", "is_counted", "n_bytes", "node", "source", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.source = weakref.ref(tensor)
        is_alive_anyway = isinstance(tensor, torch.nn.Parameter)
        self.n_bytes = tensor.nbytes if tensor.layout is torch.strided and not is_alive_anyway else 0
        self.is_counted = False
        self.tensor: Tensor | None = None
        self.node: Any = None
        if tensor.is_inference():  # autograd refuses to save these; they cannot change under autograd's eyes (R17)
            self.tensor = tensor
            self.version = 0
            return
        self.version = tensor._version
        is_constant = tensor.grad_fn is None and tensor.requires_grad  # a parameter: may be held as it is
        self.node = _Keep.apply(_ANCHOR, tensor if is_constant else tensor.detach()).grad_fn

    def get(self) -> Tensor:
        """The tensor again; the object itself if it is a leaf that is still alive.

        Raises:
            RuntimeError: from autograd, when it was changed in place since.
        """
        if self.tensor is not None:
            return self.tensor
        (alias,) = self.node.saved_tensors
        source = self.source()
        if source is not None and source.grad_fn is None and source._version == self.version:
            return source
        return alias


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """What tells two tensors over one storage apart (R17). Raises for tensors that have no plain storage."""
    return (
        tensor._version,
        tensor.data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
        type(tensor),
    )


# Kept tensors by object, so that a mask shared by all layers is saved once (R29). An entry is used only while the very
# tensor object is alive, hence its address cannot have been given to another.
_kept: weakref.WeakValueDictionary[tuple[Any, ...], Kept] = weakref.WeakValueDictionary()


def keep(tensor: Tensor, frame: object) -> Kept:
    """Keep `tensor`, or return what keeps it already. `frame` keeps nested calls apart: their kept inputs are saved
    tensors of the call around them, so each run of that call must keep the same ones."""
    if tensor.is_inference() or is_inside_torch_checkpoint():
        return Kept(tensor)
    key = (id(tensor), id(frame), tensor._version)
    known = _kept.get(key)
    if known is not None and known.source() is tensor:
        return known
    fresh = Kept(tensor)
    _kept[key] = fresh
    return fresh
