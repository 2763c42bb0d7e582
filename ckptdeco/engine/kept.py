"""Kept tensors: boundaries and side inputs, held through autograd's own saved-tensor mechanism (R3, R27, R29).

A kept tensor is treated as autograd treats one that it saves: its version is checked when it is asked for again, and
the user's own saved-tensor hooks (`save_on_cpu`) see it, for which a tiny autograd Function saves it; without hooks
that would only cost time. What is held is a detached alias: it shares storage and version counter with the tensor,
but leads to no graph, so keeping it can close no reference cycle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ckptdeco.engine.running import Frame
from ckptdeco.engine.torch_private import has_saved_tensor_hooks, is_inside_torch_checkpoint

__all__ = ["Changed", "Kept", "geometry", "keep", "storage_address", "storage_of"]


class _Keep(torch.autograd.Function):
    """Saves one tensor; its node is never part of a backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("the node of a kept tensor is not part of any backward")


_ANCHOR = torch.empty(0, requires_grad=True)  # makes `_Keep` leave a node even if the kept tensor needs no grad


class Changed(RuntimeError):
    """A kept tensor was changed in place since."""


def _gone() -> None:
    return None


class Kept:
    """One tensor kept for a recompute."""

    __slots__ = (
        "__weakref__", "is_copy", "is_counted", "n_bytes", "node", "source", "source_version", "storage", "tensor",
        "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor) -> None:
        self.source = weakref.ref(tensor)
        self.storage: Callable[[], object] = _gone  # weakly, too: an address may be given to another one
        is_alive_anyway = type(tensor) is not Tensor and isinstance(tensor, torch.nn.Parameter)
        self.n_bytes = tensor.nbytes if tensor.layout is torch.strided and not is_alive_anyway else 0
        self.is_copy = self.is_counted = False
        self.tensor: Tensor | None = None
        self.node: Any = None
        if tensor.is_inference():  # autograd refuses to save these; they cannot change under autograd's eyes (R17)
            self.tensor = tensor
            self.version = self.source_version = 0
            return
        self.version = self.source_version = tensor._version
        # A leaf that requires grad (a parameter) leads to no graph and may be held as it is.
        value = tensor if tensor.grad_fn is None and tensor.requires_grad else tensor.detach()
        if has_saved_tensor_hooks():
            self.node = _Keep.apply(_ANCHOR, value).grad_fn  # type: ignore[no-untyped-call]
        else:
            self.tensor = value

    def get(self) -> Tensor:
        """The tensor again; the object itself if it is a leaf that is still alive.

        Raises:
            Changed: it was changed in place since.
        """
        alias = self.tensor
        if alias is None:
            try:
                (alias,) = self.node.saved_tensors
            except RuntimeError as error:
                # Autograd's own; what a user's hook raises, or a recompute that the tensor asks for, passes through.
                if type(error) is RuntimeError and "modified by an inplace operation" in str(error):
                    raise Changed(str(error)) from error
                raise
        elif alias.is_inference():
            return alias
        elif alias._version != self.version:
            raise Changed(f"is at version {alias._version}; expected version {self.version}")
        source = self.source()
        if source is not None and source.grad_fn is None and source._version == self.source_version:
            return source
        return alias

    def copy(self) -> None:
        """Hold a copy of the values from now on: the program may then change the tensor (R33)."""
        if self.tensor is not None and not self.is_copy:
            self.tensor = self.tensor.detach().clone()
            self.version = self.tensor._version
            self.is_copy = True


def storage_address(tensor: Tensor) -> int:
    """What tells storages apart while they live; tensors without one stand for themselves."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """What tells two tensors over one storage apart (R17). Raises for tensors that have no plain storage."""
    return (
        tensor._version,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
        type(tensor),
    )


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Its storage, None if it has none; another one if `tensor.data` was replaced, which is no new version."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


# Kept tensors by object, so that a mask shared by all layers is saved once (R29). An entry is used only while the very
# tensor object is alive, hence its address cannot have been given to another.
_kept: weakref.WeakValueDictionary[tuple[Any, ...], Kept] = weakref.WeakValueDictionary()


def keep(tensor: Tensor, frame: Frame | None, *, is_stamped: bool = False) -> Kept:
    """Keep `tensor`, or return what keeps it already.

    `frame` keeps nested calls apart: their kept inputs are saved tensors of the call around them, so each run of that
    call must keep the same ones. What a layer returned (`is_stamped`) is not looked up: its stamp leads to its `Kept`.
    """
    if is_stamped or tensor.is_inference() or is_inside_torch_checkpoint():
        return Kept(tensor)
    key = (id(tensor), -1 if frame is None else frame.number, tensor._version)
    known, storage = _kept.get(key), storage_of(tensor)
    if known is not None and storage is not None and known.source() is tensor and known.storage() is storage:
        return known
    fresh = Kept(tensor)
    if storage is not None:
        fresh.storage = weakref.ref(storage)
    _kept[key] = fresh
    return fresh
