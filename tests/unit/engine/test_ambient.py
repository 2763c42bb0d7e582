"""Surroundings: captured at forward, entered again where they differ, left as they were (R11)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

from ckptdeco.engine import ambient
from ckptdeco.engine.torch_private import checkpoint_switches


def capture() -> Any:
    """The surroundings of a layer on the CPU that has no attention."""
    return ambient.capture(())


def again(state: Any, read: Any) -> Any:
    """What `read` gives where a recompute runs."""
    with ExitStack() as stack:
        ambient.enter(stack, state, (), with_dispatch_modes=True)
        return read()


def test_nothing_special_is_equal_to_nothing_special() -> None:
    assert capture() == capture()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_forward_is_on_in_the_recompute(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        state = capture()
    assert state != capture()
    assert again(state, lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))) == (True, dtype)
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_around_backward_is_off_in_the_recompute() -> None:
    state = capture()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert again(state, lambda: torch.is_autocast_enabled("cpu")) is False
        assert torch.is_autocast_enabled("cpu")


def test_default_dtype_of_forward_is_that_of_the_recompute() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        state = capture()
    finally:
        torch.set_default_dtype(torch.float32)
    assert again(state, lambda: torch.ones(1).dtype) is torch.float64
    assert torch.ones(1).dtype is torch.float32


def test_default_device_of_forward_is_that_of_the_recompute() -> None:
    with torch.device("meta"):
        state = capture()
    assert again(state, lambda: torch.ones(1).device.type) == "meta"
    assert torch.ones(1).device.type == "cpu"


def test_function_mode_of_forward_is_active_in_the_recompute_once() -> None:
    calls = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    mode = Mode()
    with mode:
        state = capture()
    again(state, lambda: torch.ones(1))
    assert len(calls) == 1
    with mode:  # still there in backward: not entered twice
        calls.clear()
        again(state, lambda: torch.ones(1))
    assert calls.count(torch.ones) == 1


def test_torchs_switches_for_checkpoints_are_entered_again_and_left() -> None:
    with set_checkpoint_early_stop(False), set_checkpoint_debug_enabled(True):
        state = capture()
    assert again(state, checkpoint_switches) == (False, True)
    assert checkpoint_switches() == (None, None)
    with set_checkpoint_early_stop(True):  # forward had none
        assert again((*state[:5], (None, None), ()), checkpoint_switches) == (None, None)
        assert checkpoint_switches() == (True, None)
