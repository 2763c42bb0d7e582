"""A decorated function, lambda or partial that reaches modules by argument, closure or container, as a method does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.layers import DIM, Stack, batch
from tests.support.oracle import total
from tests.support.subject import checkpointable


@checkpointable
def normalise(linear: nn.Module, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(norm(linear(x)))


@checkpointable
def normalise_held(held: dict[str, nn.Module], x: torch.Tensor) -> torch.Tensor:
    return torch.relu(held["norm"](held["linear"](x)))


class Parts(nn.Module):
    """A linear and a norm that a function uses; `reach` says how it comes by them."""

    def __init__(self, reach: str) -> None:
        super().__init__()
        self.linear, self.norm, self.reach = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), reach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear, norm = self.linear, self.norm
        match self.reach:
            case "arguments":
                out = normalise(linear, norm, x)
            case "dict":
                out = normalise_held({"linear": linear, "norm": norm}, x)
            case "closure":
                out = checkpointable(lambda x: torch.relu(norm(linear(x))))(x)
            case "self in closure":
                out = checkpointable(lambda x: torch.relu(self.norm(self.linear(x))))(x)
            case _:
                out = checkpointable(functools.partial(_normalise, linear, norm=norm))(x)
        return out


def _normalise(linear: nn.Module, x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    return torch.relu(norm(linear(x)))


every_reach = pytest.mark.parametrize("reach", ["arguments", "dict", "closure", "self in closure", "partial"])


@every_reach
def test_statistics_of_a_module_that_a_function_reaches_are_updated_once_a_call(reach: str, exact_from: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        x, begun = inputs
        for layer in model.layers:
            layer.norm.train(begun)
        with context():
            out = model(x)
        total(out).backward()
        return out

    exact_from(lambda: Stack([Parts(reach) for _ in range(4)]), step)


@every_reach
def test_eval_before_backward_does_not_reach_the_recompute(reach: str, exact: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        model.train()
        with context():
            out = model(*inputs)
        model.eval()
        total(out).backward()
        assert not any(layer.norm.training for layer in model.layers)
        return out

    exact(lambda: Stack([Parts(reach) for _ in range(4)]), step)


@checkpointable
def normalise_with(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return torch.relu(functional.batch_norm(x @ weight, mean, var, training=True))


class PassesStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("var", torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalise_with(x, self.weight, self.mean, self.var)


def test_statistics_that_are_arguments_are_updated_once_a_call(exact: Any) -> None:
    exact(lambda: Stack([PassesStatistics() for _ in range(4)]))


def test_function_over_modules_is_the_same_for_a_batch_without_gradient(exact: Any) -> None:
    exact(lambda: Stack([Parts("arguments") for _ in range(4)]), make_inputs=lambda: (batch(requires_grad=False),))
