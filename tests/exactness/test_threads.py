"""Backward passes of one model in several threads at once: gradients, buffers and random numbers of the plain run."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.layers import DIM, Layer, Stack, Stem
from tests.support.oracle import assert_equal, seed_everything
from tests.support.subject import checkpointable

N_THREADS, N_STEPS = 3, 7


class Busy(Layer):
    """Draws, keeps statistics, counts its calls and writes an attribute of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.n_calls = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), 0

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        self.norm.last = self.n_calls
        return functional.dropout(torch.relu(self.norm(self.linear(x))), 0.3) / self.n_calls


def _run(model: Stem, context: Any, n_threads: int) -> list[Any]:
    """Several forwards, then their backwards, each in a thread of its own or one after the other."""
    parameters = list(model.parameters())
    seen = []
    for step in range(N_STEPS):
        seed_everything(step)
        with context:
            losses = [model(torch.randn(6, DIM)).square().sum() for _ in range(N_THREADS)]
        grads: dict[int, Any] = {}
        errors: list[BaseException] = []

        def back(k: int, losses: Any = losses, grads: Any = grads, errors: Any = errors) -> None:
            try:
                grads[k] = torch.autograd.grad(losses[k], parameters)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=back, args=(k,)) for k in range(N_THREADS)]
        for thread in threads:
            thread.start()
            if n_threads == 1:
                thread.join()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        buffers = tuple(b.clone() for b in model.buffers())
        counts = tuple((layer.n_calls, layer.norm.last) for layer in model.body.layers)
        seen.append((tuple(grads[k] for k in range(N_THREADS)), buffers, counts, torch.get_rng_state()))
    return seen


@pytest.mark.parametrize("n_threads", [1, N_THREADS], ids=["in_turn", "at_once"])
def test_backwards_in_threads_are_exact(n_threads: int, under: Any) -> None:
    plain = Stem(Stack([Busy() for _ in range(6)]))
    model = copy.deepcopy(plain)
    expected = _run(plain, contextlib.nullcontext(), 1)
    for step, (one, other) in enumerate(zip(expected, _run(model, under(), n_threads), strict=True)):
        assert_equal(one, other, f"step {step}")


def test_whole_steps_of_separate_models_in_threads_are_exact(under: Any) -> None:
    """Each thread has its own model and enters the policy itself; nothing random, since the stream is shared."""
    plains = [Stem(Stack([nn.Sequential(Quiet(), Quiet()) for _ in range(2)])) for _ in range(N_THREADS)]
    models = copy.deepcopy(plains)
    batches = [torch.randn(6, DIM) for _ in range(N_STEPS)]
    errors: list[BaseException] = []

    def work(model: nn.Module, context: Any) -> None:
        try:
            for x in batches:
                with context:
                    out = model(x)
                out.square().sum().backward()
        except BaseException as error:
            errors.append(error)

    for plain in plains:
        work(plain, contextlib.nullcontext())
    threads = [threading.Thread(target=work, args=(model, under())) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    for i, (plain, model) in enumerate(zip(plains, models, strict=True)):
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert_equal(one.grad, other.grad, f"thread {i}: {name}")
        for one, other in zip(plain.buffers(), model.buffers(), strict=True):
            assert_equal(one, other, f"thread {i}: buffer")


class Quiet(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x)))
