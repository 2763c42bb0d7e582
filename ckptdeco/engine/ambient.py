"""What surrounds a layer call and changes what it computes.

Autocast per kind of device, the default dtype, torch-function modes (the default device is one), dispatch modes,
deterministic mode, the precision of products, the backends of scaled-dot-product attention, and torch's switches for
checkpoints inside: captured at forward and entered again around a recompute where they differ from what is there.
Context variables are captured, too, as one `contextvars.Context`; a recompute runs in a fresh copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

from ckptdeco.engine.rng import Devices
from ckptdeco.engine.torch_private import (
    NUMERICS,
    SETTINGS,
    attention_backends,
    checkpoint_switches,
    dispatch_mode_again,
    dispatch_modes,
    function_mode_again,
    function_modes,
)

__all__ = ["Ambient", "capture", "enter", "kind", "missing_dispatch_modes"]

Switch = tuple[Callable[[], Any], Callable[[Any], Any]]
_cuda: Any = torch.backends.cuda
_switch_determinism: Any = torch.use_deterministic_algorithms


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_NUMERICS: tuple[Switch, ...] = (
    (_determinism, lambda wanted: _switch_determinism(wanted[0], warn_only=wanted[1])),
    *NUMERICS,
)
_ATTENTION: tuple[Switch, ...] = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
)


class Ambient(NamedTuple):
    """What surrounds a call."""

    autocast: tuple[tuple[str, torch.dtype, bool], ...]  # per kind of device that has it on: name, dtype, weight cache
    dtype: torch.dtype  # the default
    function_modes: tuple[object, ...]
    numerics: tuple[Any, ...]  # settings that change what the CPU computes
    attention: tuple[bool, ...]  # backends that are on
    switches: tuple[bool | None, bool | None]  # what torch's say of early stop and debugging; None: nothing
    dispatch_modes: tuple[object, ...]


# The settings as they were last, and what was captured under them: no autocast and no modes, the usual case.
_last: tuple[list[Any], Ambient | None] = [], None


def capture(devices: Devices) -> Ambient:
    """The present surroundings, for the CPU and the kinds of `devices`."""
    global _last
    if devices:
        return _capture(devices)
    try:
        settings = [read() for read in SETTINGS]
    except RuntimeError:  # precision is set for each backend by itself
        return _capture(devices)
    known, last = _last
    if settings == known and last is not None:
        return last
    captured = _capture(devices)
    # What another thread changes meanwhile must not be taken for what is there now.
    if not any(settings[:3]) and settings == [read() for read in SETTINGS]:
        _last = settings, captured
    return captured


def _capture(devices: Devices) -> Ambient:
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
    if devices or torch.is_autocast_enabled("cpu"):
        autocast = tuple(
            [
                (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
                for kind in dict.fromkeys(["cpu", *[device.type for device in devices]])
                if torch.is_autocast_enabled(kind)
            ]
        )
    return Ambient(
        autocast,
        torch.get_default_dtype(),
        function_modes(),
        tuple([read() for read, _ in _NUMERICS]),
        attention_backends(),
        checkpoint_switches(),
        dispatch_modes(),
    )


def kind(state: Ambient) -> Any:
    """What of the surroundings tells kinds of calls apart: of function modes their types, since steps have new ones."""
    autocast, dtype, modes, numerics, attention, switches, _ = state
    return autocast, dtype, tuple(map(type, modes)) if modes else (), numerics, attention, switches


def missing_dispatch_modes(state: Ambient) -> tuple[type, ...]:
    """The types of the dispatch modes of `state` that are not active now."""
    return tuple([type(mode) for mode in _missing(state.dispatch_modes, dispatch_modes())])


def _missing(wanted: tuple[object, ...], present: tuple[object, ...]) -> list[object]:
    return [mode for mode in wanted if not any(mode is other for other in present)]


def enter(stack: ExitStack, state: Ambient, devices: Devices, *, with_dispatch_modes: bool) -> None:
    """Make the present surroundings equal to `state` until `stack` ends.

    Modes around backward stay; those of forward that are missing go on top of them, dispatch modes only if asked for.
    """
    autocast, dtype, modes, numerics, attention, switches, dispatch = state
    on = {kind for kind, _, _ in autocast}
    for kind in {"cpu", *[device.type for device in devices]} - on:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    for kind, autocast_dtype, cache in autocast:
        stack.enter_context(torch.autocast(kind, dtype=autocast_dtype, cache_enabled=cache))
    if torch.get_default_dtype() is not dtype:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
    for switch, wanted in zip((*_NUMERICS, *_ATTENTION), (*numerics, *attention), strict=True):
        _turn(stack, switch, wanted)
    early_stop, debug = checkpoint_switches()
    if early_stop is not switches[0]:
        stack.enter_context(set_checkpoint_early_stop(switches[0]))  # type: ignore[arg-type]
    if debug is not switches[1]:
        stack.enter_context(set_checkpoint_debug_enabled(switches[1]))
    for mode in _missing(modes, function_modes()):
        stack.enter_context(function_mode_again(mode))
    if with_dispatch_modes:
        for mode in _missing(dispatch, dispatch_modes()):
            stack.enter_context(dispatch_mode_again(mode))


def _turn(stack: ExitStack, switch: Switch, wanted: Any) -> None:
    read, turn = switch
    present = read()
    if present != wanted:
        stack.callback(turn, present)
        turn(wanted)
