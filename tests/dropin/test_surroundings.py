"""Contract 15: random numbers and autocast of forward in the recompute; and what those suites do not look at: bytes."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from ckptdeco import checkpoint
from tests.dropin.comparing import N_CALLS, assert_same_as_plain, leaves, of_torch
from tests.support.meters import ByteMeter
from tests.support.oracle import assert_equal


def draws(x: Tensor) -> Tensor:
    y = nn.functional.dropout(x.sin(), 0.5) * torch.rand_like(x) + torch.normal(x.detach(), 1.0)
    return (y * x).exp()


def test_random_numbers_are_those_of_forward_and_the_stream_goes_on(early_stop: bool) -> None:
    assert_same_as_plain(draws, functools.partial(checkpoint, draws, early_stop=early_stop), (8,))


def test_python_and_numpy_draw_the_same() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * random.random() + numpy.random.rand()).sin().exp()

    def run(call: Any) -> Any:
        random.seed(1)
        numpy.random.seed(1)
        (x,) = leaves((3,))
        call(function, x).sum().backward()
        return x.grad, random.random(), float(numpy.random.rand())

    expected = run(lambda f, x: f(x))
    for _ in range(N_CALLS):
        assert_equal(expected, run(checkpoint), "gradient and streams")


def test_without_preserve_rng_state_the_streams_are_not_touched() -> None:
    drawn: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        drawn.append(torch.rand(3))
        return (x * x.detach().exp()).sin()

    for _ in range(N_CALLS):
        drawn.clear()
        torch.manual_seed(0)
        checkpoint(function, *leaves((3,)), preserve_rng_state=False).sum().backward()
        torch.manual_seed(0)
        assert torch.equal(drawn[0], torch.rand(3))
        assert torch.equal(drawn[1], torch.rand(3))  # the stream went on


@pytest.mark.parametrize("is_enabled", [True, False])
def test_autocast_is_that_of_forward(is_enabled: bool) -> None:
    seen: list[torch.dtype] = []

    def function(x: Tensor, w: Tensor) -> Tensor:
        out = torch.mm(torch.mm(x, w), w)
        seen.append(out.dtype)
        return out.float().sin()

    def run(call: Any, x: Tensor, w: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            out = call(function, x, w)
        with torch.autocast("cpu", torch.float16):  # what backward is in does not matter
            torch.autograd.grad(out.sum(), x, retain_graph=True)
        return out

    assert_same_as_plain(
        functools.partial(run, lambda f, *args: f(*args)), functools.partial(run, checkpoint), (4, 4), (4, 4)
    )
    assert set(seen) == {torch.bfloat16 if is_enabled else torch.float32}


def test_default_device_is_that_of_forward() -> None:
    devices: list[str] = []

    def function(x: Tensor) -> Tensor:
        made = torch.ones(3)
        devices.append(made.device.type)
        return (x * made).sin().exp()

    x = torch.randn(3, device="meta", requires_grad=True)
    with torch.device("meta"):
        out = checkpoint(function, x)
    out.sum().backward()
    assert devices == ["meta", "meta"]


ROWS, WIDE, N_LAYERS = 64, 32, 6


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def peak_and_held(call: Any) -> tuple[int, int]:
    """Peak bytes of a step, and what is held between forward and backward."""
    torch.manual_seed(0)
    layers = nn.ModuleList([Wide() for _ in range(N_LAYERS)])
    for _ in range(3):  # the first calls are special
        with ByteMeter(layers.parameters()) as meter:
            x = torch.randn(ROWS, WIDE)
            for layer in layers:
                x = call(layer, x)
            held = meter.live_bytes
            x.sum().backward()
            peak = meter.peak_bytes
    return peak, held


def test_bytes_are_no_more_than_torchs() -> None:
    ours, theirs = peak_and_held(checkpoint), peak_and_held(of_torch)
    plain = peak_and_held(lambda layer, x: layer(x))
    assert ours[1] == theirs[1] == (N_LAYERS + 1) * ROWS * WIDE * 4  # one input a layer, and the output
    assert ours[0] <= theirs[0] < plain[0] / 2
