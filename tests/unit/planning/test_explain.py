"""What `explain()` tells of threads that saw no policy (R34)."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch

import ckptdeco
from tests.support.layers import Stack, TanhLayer, batch


def _in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _train(model: Stack) -> None:
    model(batch()).sum().backward()


def test_calls_of_a_thread_that_did_not_inherit_the_policy_are_counted() -> None:
    model = Stack([TanhLayer() for _ in range(3)])
    with ckptdeco.policy(segment=1):
        _in_thread(lambda: _train(model))
        _train(model)
        told = ckptdeco.explain()
    assert told.n_without_policy == 3
    assert "3 decorated calls ran without a policy" in str(told)
    assert "copy_context" in str(told)


def test_inheriting_threads_evaluation_and_plain_steps_are_not_counted() -> None:
    model = Stack([TanhLayer() for _ in range(3)])

    def evaluate() -> None:
        with torch.no_grad():
            model(batch())

    _train(model)
    with ckptdeco.policy(segment=1) as policy:
        context = contextvars.copy_context()
        _in_thread(lambda: context.run(_train, model))
        _in_thread(lambda: policy(_train)(model))
        _in_thread(evaluate)
        _train(model)
        with ckptdeco.policy(None):
            _train(model)
    _train(model)
    told = ckptdeco.explain()
    assert told.n_without_policy == 0
    assert "without a policy" not in str(told)


def test_layers_inside_layers_are_not_counted() -> None:
    outer = ckptdeco.checkpointable(lambda x: inner(x))
    inner = ckptdeco.checkpointable(lambda x: x.tanh())
    with ckptdeco.policy(every=2):
        x = batch()
        for _ in range(4):
            x = outer(x)
        x.sum().backward()
    assert ckptdeco.explain().n_without_policy == 0


def test_counting_begins_anew_with_the_first_policy() -> None:
    model = Stack([TanhLayer() for _ in range(3)])
    for _ in range(2):
        with ckptdeco.policy(segment=1):
            _in_thread(lambda: _train(model))
        assert ckptdeco.explain().n_without_policy == 3
