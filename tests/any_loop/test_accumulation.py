"""Gradient accumulation, and two forwards before one backward."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.support.layers import batch, stack
from tests.support.oracle import assert_same, total


def build() -> nn.Module:
    return stack(7, p=0.3)


def test_accumulation_over_micro_batches(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            for x in inputs:
                total(model(x)).backward()

    assert_same(build, program, lambda: [batch() for _ in range(4)], under)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 1, 0)])
def test_all_forwards_first_then_backwards_in_any_order(under: Any, order: tuple[int, ...]) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        losses = []
        for x in inputs:
            with context():
                losses.append(total(model(x)))
        for i in order:
            losses[i].backward()

    assert_same(build, program, lambda: [batch(2 + i) for i in range(4)], under)


def test_two_forwards_before_one_backward(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            loss = total(model(inputs[0])) * total(model(inputs[1])).sqrt()
        loss.backward()

    assert_same(build, program, lambda: [batch(), batch(6)], under)


def test_a_forward_that_is_never_used_between_two_that_are(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            one = model(inputs[0])
            model(inputs[1])
            two = model(inputs[2])
            del one
            total(two).backward()

    assert_same(build, program, lambda: [batch() for _ in range(3)], under)


def test_optimizer_step_between_two_micro_batches_in_one_block(under: Any) -> None:
    from tests.support.oracle import update

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            for x in inputs:
                total(model(x)).backward()
                update(model)

    assert_same(build, program, lambda: [batch() for _ in range(3)], under)


def test_batch_size_changes_between_steps(under: Any) -> None:
    sizes = iter([4, 7, 2, 4, 9])

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            total(model(*inputs)).backward()

    assert_same(build, program, lambda: (batch(next(sizes)),), under, steps=5)
