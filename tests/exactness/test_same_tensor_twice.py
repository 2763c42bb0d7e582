"""One tensor given as several arguments, or as views of it, stays one tensor in the recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layers import DIM, Layer, Loop, Stack, Stem
from tests.support.oracle import total
from tests.support.subject import checkpointable


class Attention(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begun: bool) -> torch.Tensor:
        if begun:
            q.mul_(0.5)
        return self.out(torch.softmax(q @ k.T, -1) @ v)


ALIASES = {
    "same": lambda h: (h, h, h),
    "view": lambda h: (h, h.view_as(h), h),
    "row views": lambda h: (h, h[:], h.detach()),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_write_to_one_argument_is_seen_through_the_others(alias: Any, exact_from: Any) -> None:
    def loop(model: Loop, x: torch.Tensor, begun: bool) -> torch.Tensor:
        for layer in model.layers:
            x = layer(*alias(x * 1), begun)
        return x

    exact_from(lambda: Stem(Loop([Attention() for _ in range(4)], loop)))


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_write_into_a_chain_that_goes_on_directly(alias: Any, exact_from: Any) -> None:
    """No operation between the layers: what is written is the previous layer's output itself."""

    def loop(model: Loop, x: torch.Tensor, begun: bool) -> torch.Tensor:
        for layer in model.layers:
            x = layer(*alias(x), begun)
        return x

    exact_from(lambda: Stem(Loop([Attention() for _ in range(4)], loop)))


class SelfAttention(nn.MultiheadAttention):
    forward = checkpointable(nn.MultiheadAttention.forward)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_multihead_attention_of_one_tensor_is_self_attention_in_the_recompute(dropout: float, exact: Any) -> None:
    """It asks `query is key is value` and takes another path if so."""

    def loop(model: Loop, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        for layer in model.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x

    build = lambda: Stem(Loop([SelfAttention(DIM, 2, dropout, batch_first=True) for _ in range(4)], loop))  # noqa: E731
    exact(build)


class AsksIdentity(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, held: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        other = held["seen"][0]
        return torch.tanh(self.one(x)) if other is x else torch.sigmoid(self.two(other)) * x


def test_identity_of_a_tensor_inside_containers_is_kept(exact: Any) -> None:
    def loop(model: Loop, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(model.layers):
            x = layer(x, {"seen": [x if i % 2 else x * 2]})
        return x

    exact(lambda: Stem(Loop([AsksIdentity() for _ in range(4)], loop)))


def test_gradients_of_one_leaf_given_three_times_add_up(exact: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        (x,) = inputs
        with context():
            out = model.layers[0](x, x, x, False)
        total(out).backward()
        return out

    exact(lambda: Stack([Attention()]), step)
