"""Random number streams: every draw is noticed, and streams are set back (R19)."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from ckptdeco.engine import rng

COUNTS = range(1, 1501)


@pytest.mark.parametrize("draw", [torch.rand, torch.randn, torch.randperm], ids=lambda f: f.__name__)
def test_every_number_of_draws_is_noticed(draw: Callable[[int], object]) -> None:
    """The comparison looks at the ends of the state only; 624 words make one turn of the generator."""
    torch.manual_seed(3)
    start = torch.get_rng_state()
    ends = rng._ends(start)
    missed = []
    for n in COUNTS:
        torch.set_rng_state(start)
        draw(n)
        if rng._ends(torch.get_rng_state()) == ends:
            missed.append(n)
    assert missed == ([1] if draw is torch.randperm else [])  # a permutation of one draws nothing
    torch.set_rng_state(start)
    torch.randperm(1)
    assert torch.equal(torch.get_rng_state(), start)


@pytest.mark.parametrize("n_before", [0, 1, 311, 312, 623, 624, 625])
@pytest.mark.parametrize("draw", [torch.rand, torch.randn], ids=lambda f: f.__name__)
def test_draws_are_noticed_wherever_the_generator_stands(draw: Callable[[int], object], n_before: int) -> None:
    torch.manual_seed(4)
    torch.rand(n_before)
    start = torch.get_rng_state()
    ends = rng._ends(start)
    for n in (1, 2, 15, 16, 17, 311, 312, 623, 624, 625, 1248, 1249):
        torch.set_rng_state(start)
        draw(n)
        assert rng._ends(torch.get_rng_state()) != ends, n


def test_the_number_by_number_normal_is_noticed() -> None:
    """It keeps a spare number at the tail of the state."""
    torch.manual_seed(5)
    start = torch.get_rng_state()
    for _ in range(5):
        before = torch.get_rng_state()
        torch.randn(1, dtype=torch.float64)
        assert rng._ends(torch.get_rng_state()) != rng._ends(before)
    torch.set_rng_state(start)


def test_a_new_seed_is_noticed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    torch.manual_seed(2)
    assert rng._ends(torch.get_rng_state()) != rng._ends(before)


def watch(
    generators: list[torch.Generator] | None = None, *, with_host: bool = True, is_exact: bool = True
) -> rng.Watch:
    return rng.Watch(rng.other_streams((), generators or [], with_host), is_exact)


DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "python": lambda: [random.random(), random.gauss(0, 1)],
    "numpy": lambda: numpy.random.rand(3).tolist() + numpy.random.randn(1).tolist(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_stream_that_was_drawn_from_is_set_back(name: str) -> None:
    watched = watch()
    drawn = DRAWS[name]()
    watched.end()
    DRAWS[name]()
    watched.set_back()
    assert DRAWS[name]() == drawn
    assert watched.drew_on_host() == (name != "torch")
    assert watched.drew == (name == "torch")


def test_generator_of_the_layers_own_is_set_back() -> None:
    generator = torch.Generator().manual_seed(7)
    watched = watch([generator], with_host=False)
    drawn = torch.rand(3, generator=generator)
    watched.end()
    watched.set_back()
    assert torch.equal(torch.rand(3, generator=generator), drawn)


def test_streams_not_drawn_from_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(7)
    watched = watch([generator])
    watched.end()
    after = [random.random(), numpy.random.rand(), torch.rand(1, generator=generator)]
    states = random.getstate(), generator.get_state()
    watched.set_back()
    assert random.getstate() == states[0]
    assert torch.equal(generator.get_state(), states[1])
    assert after


def test_capture_and_restore_put_every_stream_back() -> None:
    generator = torch.Generator().manual_seed(7)
    watched = watch([generator])
    for draw in DRAWS.values():
        draw()
    torch.rand(1, generator=generator)
    watched.end()
    states = rng.capture(watched.streams().values())
    expected = [draw() for draw in DRAWS.values()]
    own = torch.rand(1, generator=generator)
    rng.restore(states)
    assert [draw() for draw in DRAWS.values()] == expected
    assert torch.equal(torch.rand(1, generator=generator), own)


def test_recompute_that_draws_although_forward_did_not_is_broken() -> None:
    watched = watch()
    watched.end()
    assert not watched.is_broken()
    torch.rand(1)
    assert watched.is_broken()


def test_calls_that_are_not_checked_are_taken_to_have_drawn() -> None:
    watched = watch(with_host=False, is_exact=False)
    watched.end()
    assert watched.drew
    torch.rand(1)
    assert not watched.is_broken()


def test_calls_that_find_one_state_share_it() -> None:
    one = watch(with_host=False)
    assert watch(with_host=False).cpu is one.cpu
    torch.rand(1)
    assert watch(with_host=False).cpu is not one.cpu


def test_tensors_on_the_cpu_and_meta_have_no_device_stream() -> None:
    assert rng.devices_of([torch.empty(1), torch.empty(1, device="meta")]) == ()
