"""Activations that the program changes after the call, as in `x += layer(x)` (R33).

Plain autograd records such a change, and allows it as long as the layer did not save the input. A kept input would be
lost, so the first call of a kind keeps copies of such inputs, and a witness of each tells later whether it was changed.
Only inputs that were are copied in further calls. Inputs without a graph (data, masks) are not copied: to change these
before backward is more often a mistake, and an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ckptdeco.engine.kept import Kept
from ckptdeco.engine.torch_private import unseen_by_modes

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call
    from ckptdeco.engine.layer import Protection

__all__ = ["Witness", "copy_unsaved", "learn_changes"]


class Witness:
    """Counts the versions of a tensor along with it, without holding its memory."""

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version
        # An alias shares the version counter; given other data it keeps the counter, and lets the storage go.
        with unseen_by_modes():
            self.alias = tensor.detach()
            self.alias.data = self.alias.new_empty(0)

    def is_changed(self) -> bool:
        """Whether the tensor was changed in place since."""
        return self.alias._version != self.version


def copy_unsaved(call: Call, tensors: list[Tensor], storages: set[int], is_first: bool) -> None:
    """Let the call, which is over, keep copies of inputs that the program may change without autograd's objection.

    Args:
        call: the call.
        tensors: its inputs.
        storages: addresses of the storages that autograd saved in it; what is there, plain autograd guards.
        is_first: whether it is not known yet which inputs change later: all are copied, and watched.
    """
    protection = call.protection
    if is_first:
        protection.witnesses = {}
    for i in range(len(tensors)) if is_first else protection.changed_later:
        source, tensor = call.sources[i], tensors[i]
        if type(source) is not Kept or type(tensor) is not Tensor or tensor.grad_fn is None:
            continue
        if _address(tensor) in storages:
            continue
        if is_first:
            protection.witnesses[i] = Witness(tensor)
        else:
            call.record.why = call.record.why or f"{call.input_name(i)} is changed after the call: a copy is kept"
        source.copy()


def learn_changes(protection: Protection) -> None:
    """Look at the witnesses of the last first call."""
    for i, witness in list(protection.witnesses.items()):
        if witness.is_changed():
            protection.changed_later |= {i}
            protection.witnesses.pop(i, None)


def _address(tensor: Any) -> int:
    try:
        address: int = tensor.untyped_storage().data_ptr()
        return address
    except (RuntimeError, NotImplementedError):
        return -1
