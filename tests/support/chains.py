"""Chains of equal blocks large enough that bytes can be compared with formulas to 2 %."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.layers import Block, Stem, stack
from tests.support.meters import ByteMeter, saved_storages

ROWS, WIDE = 128, 64
BOUNDARY = ROWS * WIDE * 4
"""Bytes of one boundary of these chains."""


def make_chain(n_layers: int, make: Any = Block, **options: Any) -> Stem:
    """A stem in front (so that the first boundary is made in the step) and n blocks, labelled "0", "1", …"""
    torch.manual_seed(0)
    return Stem(stack(n_layers, make, WIDE, **options), WIDE)


def make_batch() -> torch.Tensor:
    """The batch of a chain; needs no gradient, so that nothing of it lives after backward."""
    return torch.randn(ROWS, WIDE)


def inner_bytes(make: Any = Block) -> int:
    """What autograd saves in one plain layer call, without the layer's input."""
    layer, x = make(WIDE), torch.randn(ROWS, WIDE, requires_grad=True)
    sizes = saved_storages(layer, lambda: layer(x))
    sizes.pop(x.untyped_storage()._cdata, None)
    return sum(sizes.values())


def live_after_forward(model: nn.Module, x: Any, policy: Any, *args: Any, **kwargs: Any) -> int:
    """Bytes alive between forward and backward, without the last output; the backward then runs."""
    model.zero_grad(set_to_none=True)
    with ByteMeter(model.parameters()) as meter:
        with policy:
            y = model(x, *args, **kwargs)
        live = meter.live_bytes - y.untyped_storage().nbytes()
        y.sum().backward()
    return live


def dot_step(model: Stem, x: torch.Tensor, policy: Any, constants: torch.Tensor) -> None:
    """A step whose loss is a product with constants, so that the head holds nothing but the model's output.

    The output lives until the last layer's backward has ended, as the simulator has it.
    """
    with policy:
        held = [model(x)]
        last = next(model.body.layers[-1].parameters())
        handle = last.register_post_accumulate_grad_hook(lambda _: held.clear())
        loss = (held[0] * constants).sum()
    loss.backward()
    handle.remove()


def step_peak(model: nn.Module, x: torch.Tensor, policy: Any, n_warm: int = 2) -> int:
    """Peak bytes of a step after some warm ones (lengths and sizes known, values verified, habits learnt).

    The warm ones run under a meter, too: it is a dispatch mode, and calls under one are a kind of their own.
    """
    constants = torch.ones_like(x)
    for _ in range(n_warm):
        with ByteMeter(model.parameters()):
            dot_step(model, x, policy, constants)
    model.zero_grad(set_to_none=True)
    with ByteMeter(model.parameters()) as meter:
        dot_step(model, x, policy, constants)
        peak = meter.peak_bytes
    model.zero_grad(set_to_none=True)
    return peak


def torch_per_layer(model: Stem) -> Stem:
    """A copy whose layers are each in torch's own checkpoint."""
    other = copy.deepcopy(model)
    for layer in other.body.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return other


nothing = contextlib.nullcontext
