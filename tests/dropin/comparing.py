"""Runs a function plain and through `ckptdeco.checkpoint`, several times, and compares bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.support.oracle import assert_equal

N_CALLS = 5
"""The engine compares values at the 1st, 2nd and 4th call; the 3rd and 5th are not looked at."""


def of_torch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch's own checkpoint, non-reentrant."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def leaves(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Fresh leaves that require grad."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def observed(run: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], seed: int) -> tuple[Any, ...]:
    """Output, gradients and the random state after one forward and backward of `run`, which returns one tensor."""
    inputs = leaves(*shapes, seed=seed)
    torch.manual_seed(seed)
    out = run(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
    return out.detach(), grads, torch.get_rng_state()


def assert_same_as_plain(plain: Callable[..., Any], run: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    """Asserts that `run` leaves the same bits as `plain` in each of several calls."""
    for seed in range(N_CALLS):
        assert_equal(observed(plain, shapes, seed), observed(run, shapes, seed), f"call {seed + 1}")
