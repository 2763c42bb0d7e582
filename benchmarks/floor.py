"""The least that checkpointing one layer by saved-tensor hooks costs in Python: a floor for the overhead, not for use.

It keeps the input, runs the layer once more when the first saved tensor is asked for, and stops after the last one.
Nothing is protected: no random numbers, module state, surroundings or versions, and nothing is checked.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["bare_checkpoint"]


class _Stop(BaseException):
    pass


class _Slot:
    __slots__ = ("__weakref__", "call", "index")


class _Call:
    __slots__ = ("layer", "slots", "values", "x")

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        self.layer = layer
        self.x = x.detach()
        self.slots: list[weakref.ref[_Slot]] = []
        self.values: dict[int, Tensor] | None = None


def _is_parameter(tensor: Tensor) -> bool:
    return type(tensor) is nn.Parameter or (tensor._is_view() and type(tensor._base) is nn.Parameter)


def bare_checkpoint(layer: nn.Module, x: Tensor, *, early_stop: bool = True) -> Tensor:
    """One layer under the barest checkpoint."""
    call = _Call(layer, x)
    slots = call.slots

    def pack(tensor: Tensor) -> Any:
        if _is_parameter(tensor):
            return tensor.detach()
        slot = _Slot()
        slot.call, slot.index = call, len(slots)
        slots.append(weakref.ref(slot))
        return slot

    def unpack(slot: Any) -> Tensor:
        if type(slot) is not _Slot:
            tensor: Tensor = slot
            return tensor
        values = _recompute(call, early_stop) if call.values is None else call.values
        return values.pop(slot.index)

    with saved_tensors_hooks(pack, unpack):
        result: Tensor = layer(x)
    return result


def _recompute(call: _Call, early_stop: bool) -> dict[int, Tensor]:
    values = call.values = {}
    last = len(call.slots) if early_stop else -1

    def pack(tensor: Tensor) -> None:
        if not _is_parameter(tensor):
            values[len(values)] = tensor.detach()
            if len(values) == last:
                raise _Stop

    try:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda _: torch.empty(0)):
            call.layer(call.x.detach().requires_grad_())
    except _Stop:
        pass
    return values
