"""What surrounds a layer call and changes what it computes: autocast, per kind of device.

Captured at forward and entered again around a recompute; where the state is the same already, nothing is entered.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ckptdeco.engine.rng import Devices

__all__ = ["Ambient", "capture", "enter"]

Ambient = tuple[tuple[str, torch.dtype, bool], ...]  # per kind of device with autocast on: name, dtype, weight cache
_OFF: Ambient = ()


def capture(devices: Devices) -> Ambient:
    """Autocast of the CPU and of the kinds of `devices`."""
    if not devices and not torch.is_autocast_enabled("cpu"):
        return _OFF
    kinds = dict.fromkeys(["cpu", *[device.type for device in devices]])
    return tuple(
        [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        ]
    )


def enter(stack: ExitStack, state: Ambient, devices: Devices) -> None:
    """Make the present state equal to `state` until `stack` ends."""
    on = {kind for kind, _, _ in state}
    for kind in {"cpu", *[device.type for device in devices]} - on:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    for kind, dtype, cache in state:
        stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
