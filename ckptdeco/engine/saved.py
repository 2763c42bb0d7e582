"""The slot that autograd holds in place of a saved tensor, and how it is asked for (R8, R9, R21, R31)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ckptdeco.errors import ModifiedTensorError

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call

__all__ = ["Saved", "is_parameter", "unpack"]


class Saved:
    """One saved tensor of a layer call. While the call runs, and if the call is stored, it holds the tensor; once
    dropped, it leads to the call that can bring it back."""

    __slots__ = ("__weakref__", "call", "handed", "index", "is_modified", "meta", "task", "value", "values", "version")

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value
        self.version = value._version
        self.is_modified = False
        self.call: Call | None = None
        self.index = -1
        self.meta: tuple[Any, ...] | None = None
        self.values: int | None = None  # fingerprint (R12)
        self.handed: weakref.ref[Tensor] | None = None  # what was handed out last, and in which backward (R31)
        self.task = -2


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a view of one such as `weight.t()`: alive anyway, hence kept as it is (R8)."""
    if isinstance(tensor, nn.Parameter):
        return True
    return tensor._is_view() and isinstance(tensor._base, nn.Parameter)


def unpack(saved: Saved) -> Tensor:
    """What autograd asks for in backward (or an inner backward asks for while the call still runs)."""
    value = saved.value
    if value is not None:
        if value._version != saved.version:
            raise _modified(saved)
        return value
    if saved.is_modified:
        raise _modified(saved)
    assert saved.call is not None
    return saved.call.serve(saved)


def _modified(saved: Saved) -> ModifiedTensorError:
    label = "a layer" if saved.call is None else saved.call.info.label
    return ModifiedTensorError(
        label,
        f"saved tensor {saved.index}" if saved.index >= 0 else "a saved tensor",
        "use the out-of-place operation, or clone the tensor before it is changed.",
    )
