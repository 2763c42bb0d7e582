"""Random number streams of torch: the CPU generator and the generators of the devices a layer call uses.

The state is read at entry and exit of every call, which costs about a microsecond, so the engine knows of each call
whether it drew (R19). Devices are never initialised just to read their state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["RngState", "capture", "devices_of", "is_same", "restore"]

Devices = tuple[torch.device, ...]
RngState = tuple[Tensor, ...]  # of the CPU, then of each device


def devices_of(tensors: list[Tensor]) -> Devices:
    """The accelerator devices among those of `tensors` (meta and CPU have no stream of their own)."""
    found: list[torch.device] = []
    for tensor in tensors:
        device = tensor.device
        if device.type not in ("cpu", "meta") and device not in found:
            found.append(device)
    return tuple(found)


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


def capture(devices: Devices) -> RngState:
    """The present states."""
    cpu = torch.default_generator.get_state()
    if not devices:
        return (cpu,)
    return (cpu, *[_module_of(device).get_rng_state(device) for device in devices])


def is_same(a: RngState, b: RngState) -> bool:
    """Whether nothing was drawn between two captures."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def restore(devices: Devices, state: RngState) -> None:
    """Set the states back."""
    torch.default_generator.set_state(state[0])
    for device, saved in zip(devices, state[1:], strict=True):
        _module_of(device).set_rng_state(saved, device)
