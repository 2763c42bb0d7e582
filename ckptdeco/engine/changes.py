"""Activations that the program changes after the call, as in `x += layer(x)` (R33).

Plain autograd records such a change, and allows it as long as the layer did not save the input. A kept input would be
lost, so the calls of a kind keep copies of such inputs until the first backward, and a witness of each tells then
whether it was changed. Only inputs that were are copied in further calls; calls at another place of the chain, or of
which a schedule wants something else, are watched anew. Inputs without a graph (data, masks) are not
copied: to change these before backward is more often a mistake, and an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ckptdeco.engine.kept import Kept, storage_address
from ckptdeco.engine.torch_private import unseen_by_modes

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call
    from ckptdeco.engine.layer import Protection

_MAX_WITNESSES = 16  # of calls without any backward

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


def copy_unsaved(call: Call, tensors: list[Tensor], storages: set[int], *, is_watched: bool, is_stored: bool) -> None:
    """Let the call, which is over, keep copies of inputs that the program may change without autograd's objection.

    Args:
        call: the call.
        tensors: its inputs.
        storages: addresses of the storages that autograd saved in it; what is there, plain autograd guards.
        is_watched: whether it is not known yet which inputs change later: all are copied, and watched.
        is_stored: whether nothing was dropped, so that nothing is kept either.
    """
    protection = call.protection
    del protection.witnesses[:-_MAX_WITNESSES]
    for i in range(len(tensors)) if is_watched else protection.changed_later:
        source, tensor = call.sources[i], tensors[i]
        if type(tensor) is not Tensor or tensor.grad_fn is None or storage_address(tensor) in storages:
            continue
        if is_watched:  # also what this call need not keep: the next may have to
            protection.witnesses.append((i, Witness(tensor)))
        if is_stored or type(source) is not Kept:
            continue
        if not is_watched:
            call.record.why = call.record.why or f"{call.input_name(i)} is changed after the call: a copy is kept"
        source.copy()


def learn_changes(protection: Protection, *, is_over: bool = False) -> None:
    """Look at the witnesses of the calls that were watched; for the last time when their backward has begun."""
    changed = {i for i, witness in protection.witnesses if witness.is_changed()}
    if not changed <= protection.changed_later:
        protection.changed_later |= changed
    if is_over:
        protection.witnesses = []
        protection.known_sites |= protection.watched_sites
        protection.watched_sites.clear()
