"""U-Net skips, trees, trunks with several heads, hidden states that the caller keeps."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.layers import Block, Loop, Marked, TanhLayer, batch
from tests.support.oracle import assert_same, forward_backward


def test_u_net_with_added_skips(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in m.layers[:4]:
            x = layer(x)
            skips.append(x)
        for layer in m.layers[4:]:
            x = layer(x + skips.pop())
        return x

    assert_same(lambda: Loop([Block(p=0.1) for _ in range(8)], loop), forward_backward, lambda: (batch(),), under)


def test_u_net_with_skips_as_arguments(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in m.layers[:4]:
            x = layer(x)
            skips.append(x)
        for layer in m.layers[4:]:
            x = layer(x, skips.pop())
        return x

    assert_same(lambda: Loop([Marked() for _ in range(8)], loop), forward_backward, lambda: (batch(),), under)


def test_tree(under: Any) -> None:
    def loop(m: Loop, *leaves: torch.Tensor) -> torch.Tensor:
        level, layers = list(leaves), iter(m.layers)
        while len(level) > 1:
            level = [next(layers)(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
        return level[0]

    assert_same(
        lambda: Loop([Marked() for _ in range(7)], loop), forward_backward, lambda: [batch() for _ in range(8)], under
    )


def test_dense_connections(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        outputs = [x]
        for layer in m.layers:
            outputs.append(layer(*outputs))
        return outputs[-1]

    assert_same(lambda: Loop([Marked() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


def test_trunk_with_heads(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> list[torch.Tensor]:
        for layer in m.layers[:4]:
            x = layer(x)
        return [head(x) for head in m.layers[4:]]

    build = lambda: Loop([Block() for _ in range(4)] + [TanhLayer() for _ in range(4)], loop)  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), under)


def test_heads_on_every_layer(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> list[torch.Tensor]:
        outs = []
        for layer, head in zip(m.layers[:5], m.layers[5:], strict=True):
            x = layer(x)
            outs.append(head(x))
        return outs

    build = lambda: Loop([Block(p=0.2) for _ in range(5)] + [TanhLayer() for _ in range(5)], loop)  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), under)


def test_hidden_states_appended(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> list[torch.Tensor]:
        hidden_states = [x]
        for layer in m.layers:
            x = layer(x)
            hidden_states.append(x)
        return hidden_states

    assert_same(lambda: Loop([Block() for _ in range(7)], loop), forward_backward, lambda: (batch(),), under)


def test_hidden_states_kept_but_only_the_last_one_used(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        hidden_states = []
        for layer in m.layers:
            x = layer(x)
            hidden_states.append(x)
        return hidden_states[-1] + hidden_states[2].detach()

    assert_same(lambda: Loop([TanhLayer() for _ in range(7)], loop), forward_backward, lambda: (batch(),), under)


def test_every_output_used_twice(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            y = layer(x)
            x = y + y.flip(0) * x
        return x

    assert_same(lambda: Loop([TanhLayer() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


def test_layer_calls_its_own_output_path_and_an_older_one(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        older = x
        for layer in m.layers:
            x, older = layer(x, older), x
        return x

    assert_same(lambda: Loop([Marked() for _ in range(7)], loop), forward_backward, lambda: (batch(),), under)
