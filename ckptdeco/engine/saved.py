"""The slot that autograd holds in place of a saved tensor, and how it is asked for (R8, R9, R21, R31)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ckptdeco.errors import ModifiedTensorError

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call

__all__ = ["MODIFIED", "NO_TASK", "Saved", "is_parameter", "modified", "unpack"]


NO_TASK = -2  # no backward pass has this id
MODIFIED = -1
INNER = -4  # read while it was still held: by a backward within the call, as long as the call ran


class Saved:
    """One saved tensor of a layer call.

    While the call runs, and if the call is stored, it holds the tensor; once dropped, it leads to the call that can
    bring it back.
    """

    __slots__ = (
        "__weakref__", "call", "group_task", "handed", "index", "meta", "task", "value", "values", "version",
    )  # fmt: skip

    value: Tensor | None
    version: int  # when it was saved; `MODIFIED` if the call itself changed it in place after that
    task: int  # the backward pass that it was handed out in last
    call: Call  # this and the next three are set when the tensor is dropped
    index: int  # among the tensors that the call saved
    meta: tuple[Any, ...]  # shape, dtype, device
    values: int | None  # fingerprint; set if the call is checked by value (R12)
    group_task: int  # in a group of passes (`groups`), whose number `task` is: the pass
    handed: tuple[Any, ...]  # what was handed out (R31): its storage, weakly, and its place there

    def remember(self, value: Tensor) -> None:
        """Remember weakly what is handed out.

        Autograd wraps it in another object, so it is the storage that tells how long it lives.
        """
        if type(value) is Tensor and value.layout is torch.strided and not (value.is_conj() or value.is_neg()):
            self.handed = weakref.ref(value.untyped_storage()), value.storage_offset(), value.stride()

    def handed_out(self) -> Tensor | None:
        """What was handed out last, if it is remembered and still alive."""
        handed = getattr(self, "handed", None)
        storage = None if handed is None else handed[0]()
        if handed is None or storage is None:
            return None
        shape, dtype, device = self.meta
        return torch.empty(0, dtype=dtype, device=device).set_(storage, handed[1], shape, handed[2])


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a view of one such as `weight.t()`: alive anyway, hence kept as it is (R8)."""
    if type(tensor) is Tensor:  # asking isinstance(…, Parameter) is slow: it is Python of torch's
        return tensor._is_view() and isinstance(tensor._base, nn.Parameter)
    return type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter)


def unpack(saved: Saved) -> Tensor:
    """What autograd asks for in backward (or an inner backward asks for while the call still runs)."""
    value = saved.value
    if value is None:
        if saved.version == MODIFIED:
            raise modified(saved)
        return saved.call.serve(saved)
    if value._version != saved.version:
        raise modified(saved)
    saved.task = INNER
    return value


def modified(saved: Saved) -> ModifiedTensorError:
    """The error for a saved tensor that was changed in place before backward used it."""
    call = getattr(saved, "call", None)
    return ModifiedTensorError(
        "a layer" if call is None else call.info.label,
        "a saved tensor" if call is None else f"saved tensor {saved.index}",
        "use the out-of-place operation, or clone the tensor before it is changed.",
    )
