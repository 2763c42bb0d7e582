"""Everything is gone at the end, with the garbage collector off; a thousand steps do not grow."""

from __future__ import annotations

import collections
import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layers import Block, InPlaceOnInputLayer, Layer, Loop, Stem, TanhLayer, batch, stack
from tests.support.meters import ByteMeter
from tests.support.oracle import total
from tests.support.subject import ENGINE, POLICIES, PolicySpec, checkpointable, policy

pytestmark = pytest.mark.skipif(ENGINE == "torch", reason="measures ckptdeco")
every_policy = pytest.mark.parametrize("spec", POLICIES, ids=str)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def build(kind: str) -> nn.Module:
    makes: dict[str, Any] = {"block": Block, "tanh": TanhLayer, "in place on input": InPlaceOnInputLayer}
    return Stem(stack(6, makes[kind]))


KINDS = ["block", "tanh", "in place on input"]


@every_policy
@pytest.mark.parametrize("kind", KINDS)
def test_all_is_freed_after_backward(spec: PolicySpec, kind: str) -> None:
    model, made, x = build(kind), spec.make(), batch(requires_grad=False)
    for step in range(3):
        model.zero_grad()
        with collector_off(), ByteMeter(model.parameters()) as meter, made:
            y = model(x)
            y.sum().backward()
            assert meter.live_bytes == y.untyped_storage().nbytes(), f"step {step}, inside the policy"
            del y
            assert meter.live_bytes == 0, f"step {step}: {meter.live_bytes} bytes alive"


@every_policy
@pytest.mark.parametrize("kind", KINDS)
def test_all_is_freed_without_backward(spec: PolicySpec, kind: str) -> None:
    """R27: also when a layer works in place on its own input."""
    model, made, x = build(kind), spec.make(), batch(requires_grad=False)
    for step in range(3):
        with collector_off(), ByteMeter(model.parameters()) as meter, made:
            y = model(x)
            del y
            assert meter.live_bytes == 0, f"step {step}, inside the policy: {meter.live_bytes} bytes alive"


@every_policy
def test_all_is_freed_after_a_partial_backward_and_retain_graph(spec: PolicySpec) -> None:
    model, made, x = build("block"), spec.make(), batch(requires_grad=False)
    for _ in range(2):
        model.zero_grad()
        with collector_off(), ByteMeter(model.parameters()) as meter, made:
            y = model(x)
            torch.autograd.grad(total(y), model.body.layers[3].up.weight, retain_graph=True)
            total(y).backward(retain_graph=True)
            del y
            assert meter.live_bytes == 0, f"{meter.live_bytes} bytes alive"


@every_policy
def test_all_is_freed_after_an_exception_in_backward(spec: PolicySpec) -> None:
    model, made, x = build("block"), spec.make(), batch(requires_grad=False)

    def fail(grad: torch.Tensor) -> None:
        raise KeyError

    for _ in range(2):
        model.zero_grad()
        with collector_off(), ByteMeter(model.parameters()) as meter:
            with made:
                h = model.stem(x)
                h.register_hook(fail)
                y = model.body(h)
            try:
                y.sum().backward()
            except KeyError:
                pass
            del y, h
            assert meter.live_bytes == 0, f"{meter.live_bytes} bytes alive"


@every_policy
def test_all_is_freed_after_an_exception_in_forward(spec: PolicySpec) -> None:
    class Fails(Layer):
        @checkpointable
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            h = h.tanh() * h
            raise KeyError

    model, made, x = Stem(Loop([*stack(3).layers, Fails()], chain)), spec.make(), batch(requires_grad=False)
    for _ in range(2):
        with collector_off(), ByteMeter(model.parameters()) as meter, made:
            try:
                model(x)
            except KeyError:
                pass
            assert meter.live_bytes == 0, f"{meter.live_bytes} bytes alive"


def chain(m: Loop, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = layer(x)
    return x


def test_all_is_freed_when_outputs_refer_to_the_input_and_to_each_other() -> None:
    class Passes(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        @checkpointable
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = torch.tanh(self.linear(x)) * table
            return h, h.view(-1), table, x

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        table = x.sigmoid()
        for layer in m.layers:
            x, _, table, _ = layer(x, table)
        return x

    model, made, x = Stem(Loop([Passes() for _ in range(5)], loop)), policy(segment=3), batch(requires_grad=False)
    for _ in range(3):
        model.zero_grad()
        with collector_off(), ByteMeter(model.parameters()) as meter, made:
            model(x).sum().backward()
            assert meter.live_bytes == 0


def census() -> collections.Counter[str]:
    gc.collect()
    return collections.Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


def assert_not_grown(before: collections.Counter[str], allowed: int = 100) -> None:
    """A leak of one object a step would be 800; caches may still fill by a few."""
    grown = {name: n - before[name] for name, n in census().items() if n - before[name] > allowed}
    assert not grown, grown


def live_tensors() -> int:
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [True, False], ids=["one policy", "a policy each step"])
def test_a_thousand_steps_do_not_grow(reuse: bool) -> None:
    model, one = stack(4, p=0.1), policy(segment=2)

    def run(n_steps: int) -> None:
        for _ in range(n_steps):
            with one if reuse else policy(segment=2):
                model(batch(2, requires_grad=False)).sum().backward()

    run(200)
    before, n_tensors = census(), live_tensors()
    run(800)
    assert live_tensors() <= n_tensors
    assert_not_grown(before)


@pytest.mark.slow
def test_a_thousand_steps_inside_one_block_do_not_grow() -> None:
    model = stack(4, p=0.1)

    def run(n_steps: int) -> None:
        for _ in range(n_steps):
            model(batch(2, requires_grad=False)).sum().backward()

    with policy(segment=2):
        run(200)
        before, n_tensors = census(), live_tensors()
        run(800)
        assert live_tensors() <= n_tensors
        assert_not_grown(before)


@pytest.mark.slow
def test_a_thousand_forwards_inside_one_block_without_backward_do_not_grow() -> None:
    model = stack(4)
    with policy(segment=2):
        for _ in range(200):
            model(batch(2))
        before, n_tensors = census(), live_tensors()
        for _ in range(800):
            model(batch(2))
        assert live_tensors() <= n_tensors
        assert_not_grown(before)


def test_many_models_made_and_dropped_do_not_stay() -> None:
    import weakref

    refs = []
    for _ in range(5):
        model = stack(3)
        refs.append(weakref.ref(model.layers[0]))
        with policy(segment=2):
            model(batch()).sum().backward()
        del model
    gc.collect()
    assert all(ref() is None for ref in refs)
