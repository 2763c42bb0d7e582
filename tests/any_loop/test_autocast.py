"""Autocast: bfloat16 on CPU, around the loop, inside a layer, off in some layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.layers import DIM, Layer, Loop, Stack, batch, stack
from tests.support.oracle import assert_same, total
from tests.support.subject import checkpointable


def under_autocast(**options: Any) -> Any:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context(), torch.autocast("cpu", dtype=torch.bfloat16, **options):
            out = model(*inputs)
            loss = total(out)
        loss.backward()
        return out

    return program


def test_autocast_around_the_loop(under: Any) -> None:
    assert_same(lambda: stack(6, p=0.2), under_autocast(), lambda: (batch(),), under)


def test_autocast_without_cache(under: Any) -> None:
    assert_same(lambda: stack(6), under_autocast(cache_enabled=False), lambda: (batch(),), under)


def test_autocast_policy_inside(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16), context():
            out = model(*inputs)
            loss = total(out)
            loss.backward()
        return out

    assert_same(lambda: stack(6), program, lambda: (batch(),), under)


class Mixed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.one(x))
        with torch.autocast("cpu", enabled=False):
            return x.float() + self.two(h.float())


def test_autocast_off_inside_a_layer(under: Any) -> None:
    assert_same(lambda: Stack([Mixed() for _ in range(5)]), under_autocast(), lambda: (batch(),), under)


def test_autocast_for_some_layers_of_the_loop(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(m.layers):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i % 2 == 0):
                x = layer(x.float())
        return x

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        total(out).backward()
        return out

    assert_same(lambda: Loop(list(stack(6).layers), loop), program, lambda: (batch(),), under)


def test_shared_weights_under_autocast_after_a_no_grad_pass(under: Any) -> None:
    """The autocast weight cache filled without grad must not lose the weights' gradients."""

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m.layers[0](x)
        for _ in range(4):
            x = m.layers[0](x)
        return x

    assert_same(lambda: Loop([Mixed()], loop), under_autocast(), lambda: (batch(),), under)
