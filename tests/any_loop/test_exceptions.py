"""An exception in a layer passes through, leaves no state behind, and a retry is right."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layers import DIM, Layer, Loop, batch, stack
from tests.support.oracle import assert_same, forward_backward, total
from tests.support.subject import checkpointable


class Failure(Exception):
    """Raised by a layer on purpose."""


class Fails(Layer):
    """Draws random numbers, then raises if told so by an argument or by a global switch."""

    switch: list[str] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        h = torch.dropout(self.linear(x), 0.2, train=True)
        if fails or Fails.switch:
            raise Failure
        return torch.tanh(h)


def loop(m: Loop, x: torch.Tensor, failing: int | None) -> torch.Tensor:
    for i, layer in enumerate(m.layers):
        x = layer(x, fails=i == failing)
    return x


@pytest.mark.parametrize("failing", [0, 2, 5])
def test_exception_in_forward_then_retry(under: Any, failing: int) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with pytest.raises(Failure), context():
            model(*inputs, failing)
        with context():
            out = model(*inputs, None)
        total(out).backward()
        return out

    assert_same(lambda: Loop([Fails() for _ in range(6)], loop), program, lambda: (batch(),), under)


def test_exception_caught_inside_the_policy_and_retried_there(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            with pytest.raises(Failure):
                model(*inputs, 3)
            out = model(*inputs, None)
            total(out).backward()
        return out

    assert_same(lambda: Loop([Fails() for _ in range(6)], loop), program, lambda: (batch(),), under)


def test_loop_that_skips_the_layer_that_failed(under: Any) -> None:
    def skipping(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(m.layers):
            try:
                x = layer(x, fails=i in (1, 4))
            except Failure:
                x = x * 0.5
        return x

    assert_same(lambda: Loop([Fails() for _ in range(7)], skipping), forward_backward, lambda: (batch(),), under)


def test_exception_in_recompute_passes_through_and_the_next_step_is_right(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs, None)
        Fails.switch.append("on")
        try:
            total(out).backward()
        except Failure:
            pass
        finally:
            Fails.switch.clear()
        model.zero_grad()
        inputs[0].grad = None
        with context():
            out = model(*inputs, None)
        total(out).backward()
        return out

    assert_same(lambda: Loop([Fails() for _ in range(6)], loop), program, lambda: (batch(),), under)


def test_exception_outside_a_layer_and_backward_hook_that_raises(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with pytest.raises(Failure), context():  # noqa: PT012
            model(*inputs, None)
            raise Failure

        def fail(grad: torch.Tensor) -> None:
            raise Failure

        with context():
            out = model(*inputs, None)
            out.register_hook(fail)
        with pytest.raises(Failure):
            total(out).backward()
        model.zero_grad()
        with context():
            out = model(*inputs, None)
        total(out).backward()
        return out

    assert_same(lambda: Loop([Fails() for _ in range(6)], loop), program, lambda: (batch(),), under)


def test_nothing_is_alive_after_an_exception(under: Any) -> None:
    model, seen = Loop([Fails() for _ in range(6)], loop), []

    def run() -> None:
        x = batch(requires_grad=False) * 1
        seen.append(weakref.ref(x))
        with under():
            try:
                model(x, 4)
            except Failure:
                pass

    run()
    gc.collect()
    assert seen[0]() is None


def test_hooks_of_autograd_are_gone_after_an_exception(under: Any) -> None:
    with pytest.raises(Failure), under():
        Loop([Fails()], loop)(batch(), 0)
    x = batch()
    y = (x * x).sum()
    assert y.grad_fn.next_functions[0][0]._saved_self is x
    y.backward()
    stack(2)(batch()).sum().backward()
