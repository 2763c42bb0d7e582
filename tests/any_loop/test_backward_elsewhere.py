"""Backward after the with block, under another policy, on another thread."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from tests.support.layers import batch, stack
from tests.support.oracle import assert_same, total
from tests.support.subject import policy


def build() -> nn.Module:
    return stack(7, p=0.2)


def test_backward_after_the_block(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        model.eval()
        model.train()
        total(out).backward()
        return out

    assert_same(build, program, lambda: (batch(),), under)


def test_backward_on_another_thread(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
            loss = total(out)
        failures: list[BaseException] = []

        def backward() -> None:
            try:
                loss.backward()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert not failures, failures
        return out

    assert_same(build, program, lambda: (batch(),), under)


def test_backward_under_another_policy(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        with policy(segment=2):
            total(out).backward()
        return out

    assert_same(build, program, lambda: (batch(),), under)


def test_backward_under_no_grad_and_after_eval(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
            loss = total(out)
        model.eval()
        with torch.no_grad():
            loss.backward()
        model.train()
        return out

    assert_same(build, program, lambda: (batch(),), under)


def test_forward_on_a_thread_of_its_own_with_its_own_policy(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        results: list[torch.Tensor] = []

        def forward() -> None:
            with context():
                results.append(model(*inputs))

        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        total(results[0]).backward()
        return results[0]

    assert_same(build, program, lambda: (batch(),), under)
