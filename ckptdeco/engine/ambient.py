"""What surrounds a layer call and changes what it computes: autocast, per kind of device.

Captured at forward and entered again around a recompute; where the state is the same already, nothing is entered.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from ckptdeco.engine.rng import Devices

__all__ = ["Ambient", "capture", "entered"]

Ambient = tuple[tuple[str, bool, torch.dtype], ...]  # per kind of device: its name, autocast enabled, autocast dtype
_NOTHING: AbstractContextManager[None] = nullcontext()


def capture(devices: Devices) -> tuple[Ambient, bool]:
    """Autocast of the CPU and of the kinds of `devices`, and whether its weight cache is on."""
    states = [("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))]
    for kind in {device.type for device in devices}:
        states.append((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
    return tuple(states), torch.is_autocast_cache_enabled()


def entered(state: tuple[Ambient, bool], devices: Devices) -> AbstractContextManager[object]:
    """A context manager that makes the present state equal to `state`."""
    if capture(devices) == state:
        return _NOTHING
    stack = ExitStack()
    kinds, cache = state
    for kind, enabled, dtype in kinds:
        stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache))
    return stack
