"""Threads that train side by side: each is bit for bit what it is alone, or, with a shared generator, right or loud."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ckptdeco
from ckptdeco import CheckpointError, checkpointable, explain, policy
from tests.support.fragile import Cache, Caches, Counts, Forces, LargeBuffer, Mutates, Norms, Plain
from tests.support.layers import DIM, Stack, Stem
from tests.support.oracle import assert_equal
from tests.support.subject import POLICIES

N_STEPS = 60 if os.environ.get("CKPTDECO_FAULTS") == "all" else 5


@pytest.fixture(params=[1e-6, 5e-3], ids=["switching_often", "switching_seldom"], autouse=True)
def _switching(request: pytest.FixtureRequest) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(before)


def in_threads(*works: Callable[[], None]) -> list[BaseException]:
    """Runs functions at the same time; returns what they raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


class OwnDraws(Plain):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def work(self, h: torch.Tensor) -> torch.Tensor:
        keep = torch.empty_like(h).bernoulli_(0.7, generator=self.generator)
        return torch.tanh(h * keep)


def train(model: nn.Module, batches: list[torch.Tensor], context: Any, others: Callable[[], list[Any]]) -> list[Any]:
    """Some steps of gradient descent; returns the losses."""
    losses = []
    for x in batches:
        with context:
            loss = model(x, *others()).square().sum()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
    return losses


KINDS: list[tuple[Any, Callable[[], list[Any]]]] = [
    (Plain, list),
    (OwnDraws, list),
    (Norms, list),
    (Counts, list),
    (Caches, lambda: [Cache()]),
    (Mutates, list),
    (LargeBuffer, list),
    (Forces, list),
]


def test_eight_models_under_eight_policies_at_once_are_those_trained_alone() -> None:
    plains = [Stem(Stack([kind() for _ in range(4)])) for kind, _ in KINDS]
    models = copy.deepcopy(plains)
    batches = [torch.randn(5, DIM) for _ in range(N_STEPS)]
    expected = [
        train(model, batches, contextlib.nullcontext(), others)
        for model, (_, others) in zip(plains, KINDS, strict=True)
    ]
    results: dict[int, list[Any]] = {}

    def work(i: int) -> None:
        results[i] = train(models[i], batches, POLICIES[i].make(), KINDS[i][1])

    assert in_threads(*[lambda i=i: work(i) for i in range(len(KINDS))]) == []  # type: ignore[misc]
    for i, (plain, model) in enumerate(zip(plains, models, strict=True)):
        name = KINDS[i][0].__name__
        assert_equal(tuple(expected[i]), tuple(results[i]), f"{name}: losses")
        assert_equal(plain.state_dict(), model.state_dict(), f"{name}: state")
        for one, other in zip(plain.modules(), model.modules(), strict=True):
            if isinstance(one, Counts):
                assert (one.n, one.seen) == (other.n, other.seen)


class Noise(nn.Module):
    """Multiplies by noise from the global generator; notes the noise of forward, or uses what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        object.__setattr__(self, "notes", _Notes())

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        notes: Any = self.notes
        h = self.linear(x)
        for part in range(3):
            if notes.given:
                noise = notes.given.pop(0)
            else:
                noise = torch.empty_like(h).bernoulli_(0.7).div_(0.7)
                if not ckptdeco.is_recomputing():
                    notes.seen.append(noise.detach().clone())
            h = torch.tanh(h * noise) + part
        return h


class _Notes:
    """Not module state: each forward is noted, and the recompute sees nothing of it."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []

    def __reduce__(self) -> Any:  # not a plain object
        return _Notes, ()


def noisy_steps(model: nn.Module, context: Any, outcomes: list[bool], n_steps: int) -> None:
    """Steps whose gradients must be those of the noise that forward used, unless backward raised an error of ours."""
    layers = [module for module in model.modules() if isinstance(module, Noise)]
    for _ in range(n_steps):
        x = torch.ones(5, DIM)
        for layer in layers:
            layer.notes.seen = []
        with context:
            loss = model(x).square().sum()
        try:
            loss.backward()
        except CheckpointError:
            outcomes.append(False)
            model.zero_grad()
            continue
        outcomes.append(True)
        grads = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        for layer in layers:
            layer.notes.given = layer.notes.seen
        model(x).square().sum().backward()
        for one, other in zip(grads, [parameter.grad for parameter in model.parameters()], strict=True):
            assert_equal(one, other, "gradient")
        model.zero_grad()


@pytest.mark.parametrize("i", range(3))
def test_gradients_are_of_the_noise_that_forward_drew_while_others_draw_too(i: int) -> None:
    """Plain torch is not deterministic here, but its gradients always fit its forward (R19)."""
    made = POLICIES[i * 3].make()
    outcomes: list[bool] = []
    models = [Stem(Stack([Noise() for _ in range(4)])) for _ in range(4)]
    errors = in_threads(*[lambda m=m: noisy_steps(m, made, outcomes, N_STEPS) for m in models])  # type: ignore[misc]
    assert errors == []
    assert all(outcomes)  # all draws are those of layer calls, which see each other


def test_thread_that_draws_outside_of_layers_makes_it_right_or_loud() -> None:
    is_over = threading.Event()
    outcomes: list[bool] = []
    errors: list[BaseException] = []

    def load() -> None:
        while not is_over.is_set():
            torch.randn(3)

    def work() -> None:
        try:
            noisy_steps(Stem(Stack([Noise() for _ in range(3)])), policy(segment=2), outcomes, N_STEPS)
        except BaseException as error:
            errors.append(error)
        finally:
            is_over.set()

    assert in_threads(load, work) == []
    assert errors == []
    assert len(outcomes) == N_STEPS


def test_thread_that_draws_does_not_disturb_layers_that_do_not() -> None:
    is_over = threading.Event()
    plain = Stem(Stack([Norms() for _ in range(4)]))
    model = copy.deepcopy(plain)
    batches = [torch.randn(5, DIM) for _ in range(N_STEPS)]
    train(plain, batches, contextlib.nullcontext(), list)

    def load() -> None:
        while not is_over.is_set():
            torch.randn(3)

    def work() -> None:
        try:
            train(model, batches, policy(segment=2), list)
        finally:
            is_over.set()

    assert in_threads(load, work) == []
    assert_equal(plain.state_dict(), model.state_dict(), "state")


def test_several_backwards_at_once_over_one_graph_give_the_plain_gradients() -> None:
    plain = Stem(Stack([Norms(), OwnDraws(), Counts(), Plain()]))
    model = copy.deepcopy(plain)
    x = torch.randn(5, DIM)
    expected = torch.autograd.grad(plain(x).square().sum(), [*plain.parameters()])
    with policy(segment=2):
        loss = model(x).square().sum()
    results: list[Any] = []

    def back() -> None:
        grads = [torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for _ in range(N_STEPS)]
        results.extend(grads)

    assert in_threads(*[back] * 4) == []
    for grads in results:
        assert_equal(tuple(expected), tuple(grads), "gradients")
    assert_equal(plain.state_dict(), model.state_dict(), "state")


def test_policy_and_report_belong_to_their_thread() -> None:
    reports: dict[int, str] = {}
    n_recomputed = [0, 0, 0]
    barrier = threading.Barrier(3)

    def work(i: int) -> None:
        def layer(x: torch.Tensor) -> torch.Tensor:
            n_recomputed[i] += ckptdeco.is_recomputing()
            return x.sin().cos()

        layer = checkpointable(name=f"layer_of_{i}")(layer)
        x = torch.randn(3, DIM, requires_grad=True)  # here: a call while another thread draws may be stored
        with policy(segment=1) if i else contextlib.nullcontext():
            barrier.wait()
            out = layer(x)
            barrier.wait()
        out.sum().backward()
        reports[i] = str(explain())

    assert in_threads(*[lambda i=i: work(i) for i in range(3)]) == []  # type: ignore[misc]
    assert n_recomputed == [0, 1, 1]
    assert "layer_of_1" in reports[1]
    assert "layer_of_1" not in reports[2]


def test_exception_in_one_thread_does_not_disturb_the_others() -> None:
    class Fails(Plain):
        def work(self, h: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(h)
            if ckptdeco.is_recomputing() or next(counter) % 7 == 3:
                raise ZeroDivisionError
            return h * h

    counter = itertools.count()
    plain = Stem(Stack([Norms() for _ in range(3)]))
    model, failing = copy.deepcopy(plain), Stem(Stack([Fails() for _ in range(3)]))
    batches = [torch.randn(5, DIM) for _ in range(N_STEPS)]
    train(plain, batches, contextlib.nullcontext(), list)
    n_failed: list[int] = []

    def fail() -> None:
        for x in batches * 3:
            try:
                with policy(segment=2):
                    failing(x).sum().backward()
            except ZeroDivisionError:
                n_failed.append(1)

    assert in_threads(lambda: train(model, batches, policy(segment=3), list), fail) == []
    assert len(n_failed) == 3 * N_STEPS
    assert_equal(plain.state_dict(), model.state_dict(), "state")
