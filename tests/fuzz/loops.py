"""How a step is laid out: accumulation, several passes in flight, evaluation in between, GANs, threads."""

from __future__ import annotations

import contextvars
from typing import Any

import torch

from tests.fuzz.catalogue import Loop
from tests.support.threads import on_thread


class Single(Loop):
    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        return run.backward(run.forward(batches[0]))


class Accumulate(Loop):
    n_batches = 2

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        return [run.backward(run.forward(batch)) for batch in batches]


class TwoForwardsOneBackward(Loop):
    n_batches = 2

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        one, two = (run.forward(batch) for batch in batches)
        return run.backward(one, two)


class SameBatchTwice(Loop):
    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        one, two = run.forward(batches[0]), run.forward(batches[0])
        return run.backward(two), run.backward(one)


class InReverse(Loop):
    n_batches = 2

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        one, two = (run.forward(batch) for batch in batches)
        return run.backward(two), run.backward(one)


class InFlight(Loop):
    """A pipeline: one forward, one backward."""

    n_batches = 3

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        one, two = run.forward(batches[0]), run.forward(batches[1])
        first = run.backward(one)
        three = run.forward(batches[2])
        return first, run.backward(two), run.backward(three)


class Evaluates(Loop):
    """A pass without grad before backward, another after; in eval mode."""

    n_batches = 2

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        passed = run.forward(batches[0])
        run.model.eval()
        with torch.no_grad():
            seen = run.forward(batches[1])
        run.model.train()
        got = run.backward(passed)
        with torch.no_grad():
            return run.report(seen), got, run.report(run.forward(batches[1]))


class Drops(Loop):
    """A pass whose graph is dropped."""

    n_batches = 2

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        run.forward(batches[1])
        return run.backward(run.forward(batches[0]))


class Closure(Loop):
    """An optimizer that evaluates the step twice."""

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        got = run.backward(run.forward(batches[0]))
        run.model.zero_grad()
        return got, run.backward(run.forward(batches[0]))


class ThroughTime(Loop):
    """The output of one pass is the input of the next; one backward through both, or cut."""

    n_batches = 2

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        one = run.forward(batches[0])
        batches[1].x = one.chains[0]
        return run.backward(one, run.forward(batches[1]))


class TruncatedThroughTime(Loop):
    n_batches = 2

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        one = run.forward(batches[0])
        batches[1].x = one.chains[0].detach().requires_grad_()
        two = run.forward(batches[1])
        return run.backward(one), run.backward(two)


class Gan(Loop):
    """Even layers make, odd layers judge: a step of the judge on a cut output, then one through both."""

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        batch = batches[0]
        made = run.forward(batch, group=0)
        fake, real = made.chains[0], batch.x
        batch.x = fake.detach()
        judged = run.backward(run.forward(batch, group=1))
        if len(run.model.layers) > 1:
            run.optimize(run.model.layers[1::2])
        batch.x = fake
        got = run.backward(made, run.forward(batch, group=1))
        batch.x = real
        return judged, got


class OnThread(Loop):
    """The whole step on another thread, which inherits the context."""

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        context = contextvars.copy_context()
        return on_thread(lambda: context.run(Single.step, run, batches))


class FromGenerator(Loop):
    """Passes come out of a generator, two at a time."""

    n_batches = 3

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        passes = (run.forward(batch) for batch in batches)
        waiting, got = next(passes), []
        for passed in passes:
            got.append(run.backward(waiting))
            waiting = passed
        return [*got, run.backward(waiting)]
