"""Inputs that need no gradient, frozen layers, parts under no_grad, eval mode with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.layers import DIM, BatchNormLayer, Block, Layer, Loop, MaskedLayer, Stack, TanhLayer, batch, stack
from tests.support.oracle import assert_same, forward_backward
from tests.support.subject import checkpointable


def test_input_needs_no_gradient(under: Any) -> None:
    assert_same(stack, forward_backward, lambda: (batch(requires_grad=False),), under)


def frozen(model: Stack, which: Any) -> Stack:
    for i, layer in enumerate(model.layers):
        layer.requires_grad_(not which(i))
    return model


def test_frozen_prefix(under: Any) -> None:
    build = lambda: frozen(stack(), lambda i: i < 3)  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(requires_grad=False),), under)
    assert_same(build, forward_backward, lambda: (batch(),), under)


def test_frozen_suffix_and_every_other_layer(under: Any) -> None:
    assert_same(lambda: frozen(stack(), lambda i: i > 3), forward_backward, lambda: (batch(),), under)
    assert_same(
        lambda: frozen(stack(), lambda i: i % 2), forward_backward, lambda: (batch(requires_grad=False),), under
    )


def test_frozen_weight_beside_trained_bias(under: Any) -> None:
    def build() -> Stack:
        model = stack(6, TanhLayer)
        for layer in model.layers:
            layer.linear.weight.requires_grad_(False)
        return model

    assert_same(build, forward_backward, lambda: (batch(requires_grad=False),), under)


def test_eval_mode_with_gradients(under: Any) -> None:
    build = lambda: Stack([Block(p=0.5), BatchNormLayer(), Block(p=0.5), BatchNormLayer(), TanhLayer()]).eval()  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), under)


def test_unused_outputs_leave_their_layers_without_gradient(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers[:3]:
            x = layer(x)
        unused = x
        for layer in m.layers[3:]:
            unused = layer(unused)
        return x

    assert_same(lambda: Loop([Block() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


class StraightThrough(Layer):
    """Detached and no_grad parts inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.linear = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            c = torch.tanh(self.frozen(x))
        h = self.linear(x)
        q = h + (h.round() - h).detach()
        return q * c + x, c


def test_detach_and_no_grad_inside_a_layer(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x, c = layer(x)
            assert not c.requires_grad
        return x

    assert_same(lambda: Loop([StraightThrough() for _ in range(5)], loop), forward_backward, lambda: (batch(),), under)


def test_detach_between_layers(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> Any:
        for layer in m.layers[:3]:
            x = layer(x)
        first, x = x, x.detach()
        for layer in m.layers[3:]:
            x = layer(x)
        return first, x

    assert_same(lambda: Loop([Block() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


def test_no_grad_in_the_middle_of_the_loop(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> Any:
        for i, layer in enumerate(m.layers):
            with torch.set_grad_enabled(i not in (2, 3)):
                x = layer(x)
        return x

    assert_same(lambda: Loop([Block(p=0.2) for _ in range(7)], loop), forward_backward, lambda: (batch(),), under)


def test_leaf_made_between_layers(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> Any:
        for i, layer in enumerate(m.layers):
            if i == 3:
                x = x.detach().requires_grad_()
            x = layer(x, mask=None)
        return x

    assert_same(lambda: Loop([MaskedLayer() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


def test_requires_grad_of_outputs_and_intermediates_is_that_of_plain(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> Any:
        flags = []
        for layer in m.layers:
            x = layer(x)
            flags.append((x.requires_grad, x.is_leaf, x.grad_fn is None))
        return x, flags

    build = lambda: Loop(list(frozen(stack(6), lambda i: i < 3).layers), loop)  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(requires_grad=False),), under)


def test_stop_and_go_of_no_grad_steps(under: Any) -> None:
    """Evaluation between training steps, inside the policy."""

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            with torch.no_grad():
                before = model(*inputs)
            out = model(*inputs)
            with torch.no_grad():
                after = model(*inputs)
            out.square().sum().backward()
        return before, out, after

    assert_same(lambda: stack(6, p=0.3), program, lambda: (batch(),), under)
