"""Side inputs: one mask for all layers, an encoder's output, a position bias made by the first layer and passed on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.layers import DIM, Block, CrossLayer, Layer, Loop, MaskedLayer, batch
from tests.support.oracle import assert_same, forward_backward
from tests.support.subject import checkpointable


def test_one_mask_for_all_layers(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.tanh()
        for layer in m.layers:
            x = layer(x, mask)
        return x

    for needs_grad in (True, False):
        inputs = lambda g=needs_grad: (batch(), batch(requires_grad=g))  # noqa: E731
        assert_same(lambda: Loop([MaskedLayer() for _ in range(6)], loop), forward_backward, inputs, under)


def test_encoder_output_for_all_decoder_layers(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in m.layers[:5]:
            y = layer(y)
        for layer in m.layers[5:]:
            x = layer(x, context=y)
        return x

    build = lambda: Loop([Block(p=0.1) for _ in range(5)] + [CrossLayer() for _ in range(5)], loop)  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(), batch(6)), under)


def test_each_decoder_layer_gets_another_encoder_output(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs = []
        for layer in m.layers[:4]:
            y = layer(y)
            outputs.append(y)
        for layer, context in zip(m.layers[4:], outputs, strict=True):
            x = layer(x, context)
        return x

    build = lambda: Loop([Block() for _ in range(4)] + [CrossLayer() for _ in range(4)], loop)  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(), batch()), under)


class BiasLayer(Layer):
    """The first makes the position bias from its table; each returns it for the next."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.table = nn.Embedding(5, 1) if is_first else None

    @checkpointable
    def forward(self, x: torch.Tensor, position_bias: torch.Tensor | None = None, past: None = None) -> tuple[Any, ...]:
        if position_bias is None:
            n = x.shape[0]
            index = (torch.arange(n)[:, None] - torch.arange(n)[None]).clamp(-2, 2) + 2
            assert self.table is not None
            position_bias = self.table(index).squeeze(-1)
        weights = torch.softmax(self.query(x) @ x.t() + position_bias, -1)
        return x + weights @ self.value(x), past, position_bias, weights


def test_position_bias_made_by_the_first_layer(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> Any:
        bias, weights = None, None
        for layer in m.layers:
            x, past, bias, weights = layer(x, position_bias=bias)
            assert past is None
        return x, weights

    _, model = assert_same(
        lambda: Loop([BiasLayer(is_first=i == 0) for i in range(6)], loop),
        forward_backward,
        lambda: (batch(),),
        under,
        between=lambda m: None,
    )
    assert model.layers[0].table.weight.grad.abs().sum() > 0


def test_rotary_table_computed_before_the_loop(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[0] * DIM).view(-1, DIM).float()
        table = (angles.cos(), angles.sin())
        for layer in m.layers:
            x = layer(x, table)
        return x

    assert_same(lambda: Loop([RotaryLayer() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


class RotaryLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = table
        h = self.linear(x)
        return x + h * cos + h.flip(-1) * sin
