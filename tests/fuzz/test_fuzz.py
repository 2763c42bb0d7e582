"""The short profile: a fixed set of random programs, and proof that it notices an engine that is broken."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch

from ckptdeco.engine import recompute, rerun, rng
from ckptdeco.engine.state import Snapshot
from tests.fuzz.catalogue import Around, Backward, Between, Loop, Move, Part, drawable
from tests.fuzz.judge import Difference, judge
from tests.fuzz.minimise import minimise
from tests.fuzz.program import Program, read
from tests.fuzz.strategy import programs
from tests.support.subject import ENGINE

pytestmark = pytest.mark.skipif(ENGINE != "ckptdeco", reason="the stand-ins have no policies to compose")

N_PROGRAMS = 150


def drawn(n_programs: int) -> list[Program]:
    """The first programs of the short profile, the same each time."""
    made: list[Program] = []

    @hypothesis.settings(max_examples=n_programs, phases=[hypothesis.Phase.generate], derandomize=True, database=None)
    @hypothesis.given(programs(max_moves=5))
    def draw(program: Program) -> None:
        made.append(program)

    draw()
    return made


@pytest.fixture(scope="module")
def short_profile() -> list[Program]:
    return drawn(N_PROGRAMS)


def test_random_programs_are_exact_or_loud(short_profile: list[Program]) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    for program in short_profile:
        try:
            outcomes[judge(program).split(":")[0]] += 1
        except Difference:
            judge(minimise(program))  # the same in small
            raise
    assert outcomes["equal"] > 0.75 * N_PROGRAMS, outcomes
    assert outcomes["refused"] < 0.1 * N_PROGRAMS, outcomes  # 3 % of many; so few programs have near twins among them


def test_a_program_prints_as_the_code_that_makes_it_again(short_profile: list[Program]) -> None:
    for program in short_profile:
        assert read(repr(program)) == program


@pytest.mark.parametrize("kind", [Part, Move, Loop, Backward, Between, Around])
def test_every_ingredient_may_be_drawn_and_says_what_it_is(kind: Any) -> None:
    assert len(drawable(kind)) >= 10
    for cls in kind.catalogue.values():
        assert cls.__doc__ or cls.__name__


# ---- engines that are broken


def _random_numbers_not_set_back(patch: Any) -> None:
    patch.setattr(rng.Watch, "set_back", lambda self: None)


def _state_not_put_back(patch: Any) -> None:
    patch.setattr(Snapshot, "put_back", lambda self, *args, **kwargs: lambda: False)


def _streams_left_as_the_recompute_had_them(patch: Any) -> None:
    patch.setattr(rng, "restore", lambda *args: None)


def _inputs_in_another_order(patch: Any) -> None:
    inner = recompute._inputs
    patch.setattr(recompute, "_inputs", lambda *args: [*reversed(inner(*args))])


def _wrong_output_index(patch: Any) -> None:
    inner = recompute.run_again
    patch.setattr(recompute, "run_again", lambda *args, **kwargs: [*reversed(inner(*args, **kwargs))])


def _surroundings_of_backward(patch: Any) -> None:
    def only_grad(call: Any, run: Any, undo: Any) -> None:
        undo.append(functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        torch.set_grad_enabled(True)

    patch.setattr(rerun, "_enter_surroundings", only_grad)


def _every_second_saved_tensor_is_doubled(patch: Any) -> None:
    inner, calls = recompute.serve, itertools.count()
    from ckptdeco.engine.call import Call

    def serve(call: Any, saved: Any) -> Any:
        value = inner(call, saved)
        return value * 2 if next(calls) % 2 and value.is_floating_point() else value

    patch.setattr(Call, "serve", serve)


@pytest.mark.parametrize(
    "break_engine",
    [
        _random_numbers_not_set_back,
        _state_not_put_back,
        _streams_left_as_the_recompute_had_them,
        _inputs_in_another_order,
        _wrong_output_index,
        _surroundings_of_backward,
        _every_second_saved_tensor_is_doubled,
    ],
)
def test_the_short_profile_notices_a_broken_engine(
    break_engine: Callable[[Any], None], short_profile: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_engine(monkeypatch)
    with pytest.raises(Difference):
        collections.deque(map(judge, short_profile), maxlen=0)
