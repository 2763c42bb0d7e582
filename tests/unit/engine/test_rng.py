"""Random number streams: every draw is noticed, and only streams that were drawn from are set (R19)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from ckptdeco.engine import host_rng, rng
from ckptdeco.engine.host_rng import global_streams, look
from ckptdeco.engine.streams import OfGenerator, streams_in

CPU, PYTHON, NUMPY = global_streams()
DRAWS: dict[str, tuple[Any, Callable[[], object]]] = {
    "torch.rand": (CPU, lambda: torch.rand(3).tolist()),
    "torch.randn": (CPU, lambda: torch.randn(1, dtype=torch.float64).tolist()),
    "random.random": (PYTHON, random.random),
    "random.gauss": (PYTHON, lambda: random.gauss(0, 1)),
    "random.getrandbits": (PYTHON, lambda: random.getrandbits(1)),
    "random.shuffle": (PYTHON, lambda: random.sample(range(5), 3)),
    "numpy.rand": (NUMPY, lambda: numpy.random.rand(3).tolist()),
    "numpy.randn": (NUMPY, lambda: numpy.random.randn(1).tolist()),
    "numpy.randint": (NUMPY, lambda: numpy.random.randint(0, 5)),
    "numpy.bytes": (NUMPY, lambda: numpy.random.bytes(1)),
}
BITS = [numpy.random.PCG64, numpy.random.PCG64DXSM, numpy.random.Philox, numpy.random.SFC64, numpy.random.MT19937]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("n", [1, 2, 311, 312, 623, 624, 625, 1248])
def test_any_number_of_draws_is_noticed(n: int, name: str) -> None:
    """624 words are one turn of a Mersenne Twister; a spare normal number is given without turning it."""
    stream, draw = DRAWS[name]
    draw()
    for _ in range(3):
        before = stream.mark()
        for _ in range(n):
            draw()
        assert stream.mark() != before


@pytest.mark.parametrize("name", DRAWS)
def test_every_single_draw_is_noticed_in_two_turns(name: str) -> None:
    stream, draw = DRAWS[name]
    marks = [(draw(), stream.mark())[1] for _ in range(1300)]
    assert all(a != b for a, b in itertools.pairwise(marks))


@pytest.mark.parametrize("name", DRAWS)
def test_looking_and_drawing_elsewhere_moves_nothing(name: str) -> None:
    stream, _ = DRAWS[name]
    before = stream.mark()
    for other, draw in DRAWS.values():
        if other is not stream:
            draw()
    look()
    assert stream.mark() == before


@pytest.mark.parametrize(
    ("stream", "seed"),
    [(CPU, torch.manual_seed), (PYTHON, random.seed), (NUMPY, numpy.random.seed)],
    ids=["torch", "python", "numpy"],
)
def test_a_new_seed_is_noticed_and_an_equal_one_is_not_a_move(stream: Any, seed: Callable[[int], object]) -> None:
    seed(1)
    before = stream.mark()
    seed(2)
    assert stream.mark() != before
    seed(1)
    assert stream.mark() == before


def test_state_of_numpy_is_followed_to_another_bit_generator() -> None:
    before = numpy.random.get_bit_generator()
    try:
        for bits in BITS:
            numpy.random.set_bit_generator(bits(3))
            watched = rng.Watch()
            drawn = numpy.random.rand(), numpy.random.randn(), numpy.random.randn()
            watched.end()
            assert [stream for stream, _ in watched.moved] == [NUMPY]
            watched.set_back()
            assert (numpy.random.rand(), numpy.random.randn(), numpy.random.randn()) == drawn
    finally:
        numpy.random.set_bit_generator(before)


def test_states_are_peeked_at_here_and_read_in_full_where_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PYTHON.mark is not random.getstate
    monkeypatch.setattr(host_rng, "_HEAD", host_rng._HEAD + 4)
    assert host_rng._python_mark() is random.getstate
    monkeypatch.undo()
    assert host_rng._places_in_generator() is not None
    monkeypatch.setattr(host_rng, "_places_in_generator", lambda: None)
    generator = torch.Generator()
    mark = host_rng._cpu_mark(generator)
    before = mark()
    assert mark() == before
    torch.rand(1, generator=generator)
    assert mark() != before
    monkeypatch.setattr(host_rng, "_place_of_spare", lambda module: None)
    mark = host_rng._numpy_mark(numpy.random)
    before = mark()
    assert mark() == before
    numpy.random.randn(1)
    middle = mark()
    numpy.random.randn(1)
    assert before != middle != mark()


@pytest.mark.parametrize("name", DRAWS)
def test_stream_that_was_drawn_from_is_set_back(name: str) -> None:
    stream, draw = DRAWS[name]
    watched = rng.Watch()
    drawn = draw()
    assert watched.end() == ""
    draw()
    watched.set_back()
    assert draw() == drawn
    assert [moved for moved, _ in watched.moved] == [stream]
    assert set(watched.quiet) == {CPU, PYTHON, NUMPY} - {stream}


def test_streams_not_drawn_from_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(7)
    watched = rng.Watch((), (OfGenerator(generator),))
    watched.end()
    random.random(), numpy.random.rand(), torch.rand(1), torch.rand(1, generator=generator)
    marks = [stream.mark() for stream in watched.quiet]
    assert watched.set_back() == marks
    assert len(marks) == 4
    assert [stream.mark() for stream in watched.quiet] == marks


def test_capture_and_restore_put_every_stream_back() -> None:
    generator = torch.Generator().manual_seed(7)
    watched = rng.Watch((), (OfGenerator(generator),))
    draws = [*[draw for _, draw in DRAWS.values()], lambda: torch.rand(1, generator=generator).item()]
    for draw in draws:
        draw()
    watched.end()
    states = rng.capture([stream for stream, _ in watched.moved])
    assert len(states) == 4
    expected = [draw() for draw in draws]
    rng.restore(states)
    assert [draw() for draw in draws] == expected


@pytest.mark.parametrize("name", DRAWS)
def test_draw_in_a_recompute_alone_is_noticed(name: str) -> None:
    watched = rng.Watch()
    watched.end()
    marks = watched.set_back()
    assert not watched.has_moved(marks)
    DRAWS[name][1]()
    assert watched.has_moved(marks)


def test_calls_that_find_one_state_share_it() -> None:
    one = look()
    assert look() is one
    torch.rand(1)
    other = look()
    assert other is not one
    assert other.states[0] is not one.states[0]
    assert other.states[1:] == one.states[1:]


def test_numpy_imported_by_the_call_is_a_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state at entry is not known."""
    monkeypatch.setattr(host_rng, "_streams", (CPU, PYTHON))
    monkeypatch.setattr(host_rng, "sys", type("NoNumPy", (), {"modules": {}}))
    watched = rng.Watch()
    monkeypatch.undo()
    monkeypatch.setattr(host_rng, "_streams", (CPU, PYTHON))
    assert watched.end() == "it imported numpy.random"


def test_tensors_on_the_cpu_and_meta_have_no_device_stream() -> None:
    assert rng.devices_of([torch.empty(1), torch.empty(1, device="meta")]) == ()


# ---- generators that a layer holds


NUMPY_GENERATOR = numpy.random.default_rng(1)


def _default(x: Any = NUMPY_GENERATOR) -> Any:
    return x


MODULE_GENERATOR = torch.Generator()


def _uses_global() -> Any:
    return torch.rand(1, generator=MODULE_GENERATOR)


def _uses_it_through_a_function() -> Any:
    return _uses_global()


class _Holder:
    shared = random.Random(1)

    def __init__(self) -> None:
        self.numbers = {"a": [torch.Generator(), numpy.random.RandomState(1)]}

    @property
    def number(self) -> Any:
        return _uses_global()


PLACES: dict[str, tuple[Any, int]] = {
    "generator": (torch.Generator(), 1),
    "containers": ([(torch.Generator(),), {"a": random.Random(1)}], 2),
    "object": (_Holder(), 2),
    "class": ([*vars(_Holder).values()], 2),
    "default": (_default, 1),
    "global": (_uses_global, 1),
    "function behind a function": (_uses_it_through_a_function, 1),
    "closure": ((lambda held: lambda: held)(random.Random(3)), 1),
    "bound method": (random.Random(5).gauss, 1),
    "built-in method": (random.Random(5).random, 1),
    "draws on the system": (random.SystemRandom(), 0),
    "the global ones": ([torch.default_generator, random.random, random.gauss, numpy.random.rand], 0),
    "others": ([torch.nn.functional.dropout, None, 3, "a", torch.ones(1)], 0),
}


@pytest.mark.parametrize(("place", "n"), PLACES.values(), ids=PLACES)
def test_streams_are_found_where_a_layer_may_hold_them(place: Any, n: int) -> None:
    assert len(streams_in([place])) == n


HELD = [
    *[(f"Generator({kind.__name__})", numpy.random.Generator(kind(1)), "random") for kind in BITS],
    ("BitGenerator", numpy.random.PCG64(2), "random_raw"),
    ("RandomState", numpy.random.RandomState(1), "randn"),
    ("Random", random.Random(1), "random"),
]


@pytest.mark.parametrize(("held", "draw"), [case[1:] for case in HELD], ids=[case[0] for case in HELD])
def test_held_generator_is_set_back_only_if_it_was_drawn_from(held: Any, draw: str) -> None:
    (stream,) = streams_in([held])
    watched = rng.Watch((), (stream,))
    drawn = [getattr(held, draw)() for _ in range(3)]
    watched.end()
    watched.set_back()
    assert [getattr(held, draw)() for _ in range(3)] == drawn
    watched = rng.Watch((), (stream,))
    watched.end()
    assert watched.moved == ()
    assert stream in watched.quiet


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mark_of_the_cpu_changes_with_every_draw_and_comes_back_with_its_state(draw: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    for n in (1, 1, 2, 16, 311, 312, 624, 1248, 1249) * 3:
        before, state = CPU.mark(), torch.get_rng_state()
        draw(n, dtype=dtype)
        seen = CPU.mark()
        assert seen != before
        torch.set_rng_state(state)
        assert CPU.mark() == before
        draw(n, dtype=dtype)
        assert CPU.mark() == seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_in_store_is_part_of_the_mark_only_while_it_is_there(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    mark = host_rng._cpu_mark(generator)
    empty = mark(), generator.get_state()
    torch.randn(1, dtype=dtype, generator=generator)
    stored = mark(), generator.get_state()
    torch.randn(1, dtype=dtype, generator=generator)
    used = mark()
    assert len({empty[0], stored[0], used}) == 3
    for before, state in (stored, empty, stored):
        generator.set_state(state)
        assert mark() == before
