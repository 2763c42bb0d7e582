"""Nested policies, policy(None) inside, a policy as decorator, generators, coroutines, threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import meters
from tests.support.layers import Block, Loop, batch, stack
from tests.support.oracle import assert_same, forward_backward, total
from tests.support.subject import ENGINE, active_policy, checkpointable, policy


def test_policy_inside_a_policy(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            x = model.layers[1](model.layers[0](*inputs))
            with policy(segment=2):
                for layer in model.layers[2:5]:
                    x = layer(x)
            for layer in model.layers[5:]:
                x = layer(x)
        total(x).backward()
        return x

    assert_same(lambda: stack(8, p=0.1), program, lambda: (batch(),), under)


def test_same_policy_entered_twice(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context(), context():
            out = model(*inputs)
        total(out).backward()
        return out

    assert_same(lambda: stack(5, p=0.1), program, lambda: (batch(),), under)
    assert active_policy() is None


def test_off_inside_a_policy(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            x = model.layers[1](model.layers[0](*inputs))
            with policy(None):
                x = model.layers[3](model.layers[2](x))
            x = model.layers[5](model.layers[4](x))
        total(x).backward()
        return x

    with meters.count_forwards() as counter:
        assert_same(lambda: stack(6, p=0.1), program, lambda: (batch(),), under)
    assert counter["2"] == counter["3"] == 6, "three steps, two runs, nothing recomputed while off"


def test_policy_as_function_decorator(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        made = None if context is contextlib.nullcontext else context()

        def run(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        out = (run if made is None else made(run))(*inputs)
        total(out).backward()
        return out

    assert_same(lambda: stack(6, p=0.1), program, lambda: (batch(),), under)


def test_decorated_generator_holds_the_policy_only_while_it_runs(under: Any) -> None:
    model = stack(6, p=0.1)

    @under()
    def generate(x: torch.Tensor) -> Iterator[torch.Tensor]:
        for layer in model.layers:
            x = layer(x)
            yield x

    def run(decorated: bool) -> list[torch.Tensor | None]:
        model.zero_grad()
        torch.manual_seed(1)
        made = generate(batch()) if decorated else generate.__wrapped__(batch())
        for x in made:  # noqa: B007
            assert active_policy() is None
        total(x).backward()
        return [p.grad for p in model.parameters()]

    for plain, other in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, other)


def test_interleaved_generators_do_not_leave_a_policy() -> None:
    def generate(length: int) -> Iterator[int]:
        with policy(segment=length):
            yield 1
            yield 2

    one, two = generate(1), generate(2)
    next(one), next(two)
    one.close()
    two.close()
    assert active_policy() is None
    one, two = generate(1), generate(2)
    next(one), next(two), next(two), next(one)
    assert next(one, None) is None
    assert next(two, None) is None
    assert active_policy() is None


def test_generator_model_under_policy(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        def hiddens(h: torch.Tensor) -> Iterator[torch.Tensor]:
            for layer in m.layers:
                h = layer(h)
                yield h

        *_, last = hiddens(x)
        return last

    assert_same(lambda: Loop([Block(p=0.1) for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


def test_coroutines_each_with_its_own_policy(under: Any) -> None:
    def program(model: Any, inputs: Any, context: Any) -> Any:
        async def run(x: torch.Tensor, made: Any) -> torch.Tensor:
            with made:
                for layer in model.layers:
                    x = layer(x)
                    await asyncio.sleep(0)
            return x

        async def both() -> list[torch.Tensor]:
            return list(await asyncio.gather(run(inputs[0], context()), run(inputs[1], context())))

        outs = asyncio.run(both())
        total(outs).backward()
        return outs

    assert_same(lambda: stack(5), program, lambda: (batch(), batch()), under)


@pytest.mark.skipif(ENGINE != "ckptdeco", reason="the stand-ins decorate no coroutine")
def test_policy_decorates_a_coroutine_function_and_an_async_generator(under: Any) -> None:
    model, x = stack(5), batch()

    @under()
    async def run() -> torch.Tensor:
        assert active_policy() is not None
        await asyncio.sleep(0)
        assert active_policy() is not None
        return model(x)

    @under()
    async def stream() -> AsyncIterator[torch.Tensor]:
        assert active_policy() is not None
        yield model(x)

    async def main() -> torch.Tensor:
        out = await run()
        assert active_policy() is None
        async for other in stream():  # noqa: B007
            assert active_policy() is None
        return out + other

    out = asyncio.run(main())
    assert torch.equal(out, 2 * model(x))
    out.sum().backward()
    grad, x.grad = x.grad, None
    (2 * model(x)).sum().backward()
    assert torch.allclose(grad, x.grad)


def test_threads_with_different_policies(under: Any) -> None:
    models = [stack(6) for _ in range(4)]
    inputs = [batch() for _ in range(4)]
    made = [under(), policy(segment=2), policy(None), policy(every=2)]
    expected = []
    for model, x in zip(models, inputs, strict=True):
        total(model(x)).backward()
        expected.append([x.grad] + [p.grad for p in model.parameters()])
        x.grad = None
        model.zero_grad()
    failures: list[BaseException] = []

    def run(i: int) -> None:
        try:
            for _ in range(3):
                models[i].zero_grad()
                inputs[i].grad = None
                with made[i]:
                    out = models[i](inputs[i])
                total(out).backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for i, (model, x) in enumerate(zip(models, inputs, strict=True)):
        for want, got in zip(expected[i], [x.grad] + [p.grad for p in model.parameters()], strict=True):
            assert torch.equal(want, got), f"thread {i}"


def test_threads_share_one_model_and_one_policy(under: Any) -> None:
    model = stack(6)
    xs = [batch() for _ in range(4)]
    expected = []
    for x in xs:
        expected.append(torch.autograd.grad(total(model(x)), x)[0])  # noqa: PERF401
    got: dict[int, torch.Tensor] = {}
    failures: list[BaseException] = []
    shared = under()

    def run(i: int) -> None:
        try:
            for _ in range(3):
                with shared:
                    loss = total(model(xs[i]))
                got[i] = torch.autograd.grad(loss, xs[i])[0]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert all(torch.equal(got[i], expected[i]) for i in range(4))


class Outer(nn.Module):
    """A decorated call around decorated calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stack(3, p=0.2)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x


def test_decorated_calls_inside_a_decorated_call(under: Any) -> None:
    assert_same(lambda: Loop([Outer() for _ in range(4)], chain), forward_backward, lambda: (batch(),), under)


def chain(m: Loop, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = layer(x)
    return x


def test_policy_switched_from_step_to_step() -> None:
    made = iter([policy(segment=3), policy(None), policy(every=2), policy(segment=3), policy(segment=1)])
    assert_same(lambda: stack(6, p=0.2), forward_backward, lambda: (batch(),), lambda: next(made), steps=5)
