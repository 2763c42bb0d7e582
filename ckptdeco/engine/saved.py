"""The slot that autograd holds in place of a saved tensor, and how it is asked for (R8, R9, R21, R31)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ckptdeco.errors import ModifiedTensorError

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call

__all__ = ["Saved", "is_parameter", "modified", "unpack"]

NEVER = -2  # no backward pass has this id


class Saved:
    """One saved tensor of a layer call. While the call runs, and if the call is stored, it holds the tensor; once
    dropped, it leads to the call that can bring it back."""

    __slots__ = ("__weakref__", "call", "handed", "index", "is_modified", "meta", "task", "value", "values", "version")

    value: Tensor | None
    call: Call  # this and what follows is set when the tensor is dropped
    index: int  # among the tensors that the call saved
    meta: tuple[Any, ...]  # shape, dtype, device
    is_modified: bool  # changed in place after it was saved, within the call
    values: int | None  # fingerprint, if this call is checked by value (R12)
    handed: tuple[Any, ...] | None  # what was handed out last (R31): its storage, weakly, and its place there,
    task: int  # and in which backward pass

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.version = value._version

    def drop(self, call: Call, index: int, values: int | None) -> None:
        """Let go of the tensor; it can be had back from `call`."""
        value: Any = self.value
        self.value = None
        self.call = call
        self.index = index
        self.meta = (value.shape, value.dtype, value.device)
        self.is_modified = value._version != self.version  # backward must say so, as it would without us (R21)
        self.values = values
        self.handed = None
        self.task = NEVER


    def hand_out(self, value: Tensor, task: int) -> Tensor:
        """Give a recomputed tensor to autograd, and remember it weakly: autograd wraps it in another object, so it is
        the storage that tells how long it lives."""
        self.task = task
        if type(value) is Tensor and value.layout is torch.strided:
            storage = weakref.ref(value.untyped_storage())
            self.handed = storage, value.storage_offset(), value.stride(), value.is_conj() or value.is_neg()
        return value

    def handed_out(self) -> Tensor | None:
        """What was handed out last, if it is still alive."""
        if self.handed is None:
            return None
        storage, offset, stride, is_lazy = self.handed
        alive = storage()
        if alive is None or is_lazy:
            return None
        shape, dtype, device = self.meta
        return torch.empty(0, dtype=dtype, device=device).set_(alive, offset, shape, stride)


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a view of one such as `weight.t()`: alive anyway, hence kept as it is (R8)."""
    if isinstance(tensor, nn.Parameter):
        return True
    return tensor._is_view() and isinstance(tensor._base, nn.Parameter)


def unpack(saved: Saved) -> Tensor:
    """What autograd asks for in backward (or an inner backward asks for while the call still runs)."""
    value = saved.value
    if value is None:
        if saved.is_modified:
            raise modified(saved)
        return saved.call.serve(saved)
    if value._version != saved.version:
        raise modified(saved)
    return value


def modified(saved: Saved) -> ModifiedTensorError:
    """The error for a saved tensor that was changed in place before backward used it."""
    call = getattr(saved, "call", None)
    return ModifiedTensorError(
        "a layer" if call is None else call.info.label,
        "a saved tensor" if call is None else f"saved tensor {saved.index}",
        "use the out-of-place operation, or clone the tensor before it is changed.",
    )
