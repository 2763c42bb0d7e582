"""Parameters made at a call, hooks registered in one, and backward run inside one: all happen once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layers import DIM, Layer, Stack, Stem, batch
from tests.support.oracle import assert_same, forward_backward, total
from tests.support.subject import checkpointable


class MakesWeight(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        if self.weight is None and begun:
            self.weight = nn.Parameter(torch.randn(x.shape[-1], DIM))
        return torch.tanh(x if self.weight is None else x @ self.weight)


def test_parameter_made_at_a_call_is_the_one_that_gets_the_gradient(exact_from: Any) -> None:
    def step(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        weights = [layer.weight for layer in model.body.layers]  # an optimizer made here
        total(out).backward()
        assert all(one is layer.weight for one, layer in zip(weights, model.body.layers, strict=True))
        return out, [None if w is None else w.grad for w in weights]

    exact_from(lambda: Stem(Stack([MakesWeight() for _ in range(4)])), step)


class LazyLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def test_lazy_linear_is_materialised_under_a_policy(exact: Any) -> None:
    exact(lambda: Stack([LazyLayer() for _ in range(4)]))


class HookOnWeight(Layer):
    """A hook on its weight, registered once and guarded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.hook: Any = None

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        if self.hook is None and begun:
            self.hook = self.linear.weight.register_hook(lambda grad: grad * 2)
        return torch.tanh(self.linear(x))


def test_hook_on_a_weight_registered_in_forward_is_there_once(exact_from: Any) -> None:
    exact_from(lambda: Stack([HookOnWeight() for _ in range(4)]))


class HookOnInput(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        if begun and x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return torch.tanh(self.linear(x))


def test_hook_on_the_input_scales_its_gradient_once(exact_from: Any) -> None:
    exact_from(lambda: Stack([HookOnInput() for _ in range(4)]))  # the first input is a leaf, the others are not


class HookOnHidden(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        if begun:
            h.register_hook(lambda grad: grad * 0.5)
        return self.out(h)


def test_hook_on_a_hidden_tensor_scales_its_gradient_once(exact_from: Any) -> None:
    exact_from(lambda: Stack([HookOnHidden() for _ in range(4)]))


class LearnsInForward(Layer):
    """Test-time training: a loss of its own, with its own backward, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        if not begun:
            return h
        probe = x.detach().requires_grad_()
        self.inner(probe).tanh().sum().backward()
        assert probe.grad is not None
        return h * probe.grad


def test_backward_inside_forward_adds_to_gradients_once(exact_from: Any) -> None:
    exact_from(lambda: Stack([LearnsInForward() for _ in range(4)]))


class TwoLinears(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def _batches_with_number() -> Any:
    calls = itertools.count(1)
    return lambda: (batch(), next(calls))


def _step_with_changed_modules(what: str, first_call: int) -> Any:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        x, call = inputs
        is_on = call >= first_call
        hooks = []
        if what == "hook" and is_on:
            hooks = [layer.one.register_forward_hook(lambda m, a, out: out * 2) for layer in model.layers]
        with context():
            out = model(x)
        for hook in hooks:
            hook.remove()
        if what == "swap" and is_on:
            for layer in model.layers:
                layer.one, layer.two = layer.two, layer.one
        total(out).backward()
        return out

    return step


@pytest.mark.parametrize("first", [1, 3, 6])
@pytest.mark.parametrize("what", ["hook", "swap"])
def test_forward_hooks_and_submodules_of_forward_are_those_of_the_recompute(what: str, first: int, under: Any) -> None:
    build = lambda: Stack([TwoLinears() for _ in range(4)])  # noqa: E731
    assert_same(build, _step_with_changed_modules(what, first), _batches_with_number(), under, steps=7)


def test_hook_registered_once_outside_stays_in_force(exact: Any) -> None:
    def build() -> Stack:
        model = Stack([TwoLinears() for _ in range(4)])
        for layer in model.layers:
            layer.one.register_forward_hook(lambda m, a, out: out * 2)
        return model

    exact(build, forward_backward)
