"""What each classic schedule answers, against the papers' formulas and a golden execution order."""

import functools
import pickle
from math import ceil, comb, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptdeco.errors import PolicyError
from ckptdeco.schedule import (
    Action,
    Binomial,
    EveryNth,
    Layer,
    Segments,
    StoreAll,
    StoreLast,
    TwoLevel,
    simulate,
    sqrt_segment,
)
from ckptdeco.schedule.classic import n_boundaries_for, split

SAVE, DROP_KEEP, DROP = Action.SAVE, Action.DROP_KEEP, Action.DROP
EQUAL = Layer(1.0, 2.0, input_bytes=10, saved_bytes=170)


def forwards(schedule, length):
    return [schedule.forward(position) for position in range(length)]


def walks(schedule, length):
    """Every recompute of a full backward pass, as (first, target, new boundaries)."""
    kept = {i for i in range(length) if schedule.forward(i) is DROP_KEEP}
    saved, found = {i for i in range(length) if schedule.forward(i) is SAVE}, []
    for target in range(length - 1, -1, -1):
        if target not in saved:
            first = max(i for i in kept if i <= target)
            actions = schedule.backward(first, target)
            assert len(actions) == target - first + 1
            assert actions[-1] is SAVE
            new = [i for i, action in enumerate(actions, first) if action is DROP_KEEP and i not in kept]
            kept.update(new)
            saved.update(i for i, action in enumerate(actions, first) if action is SAVE)
            found.append((first, target, new))
        kept.discard(target)
    return found


def test_segments_keep_every_nth_input_and_recompute_all_with_saved_tensors():
    assert forwards(Segments(3), 7) == [DROP_KEEP, DROP, DROP, DROP_KEEP, DROP, DROP, DROP_KEEP]
    assert tuple(Segments(3).backward(3, 5)) == (SAVE, SAVE, SAVE)
    assert walks(Segments(3), 7) == [(6, 6, []), (3, 5, []), (0, 2, [])]


def test_every_nth_recomputes_each_nth_call_alone():
    assert forwards(EveryNth(3), 7) == [DROP_KEEP, SAVE, SAVE, DROP_KEEP, SAVE, SAVE, DROP_KEEP]
    assert walks(EveryNth(3), 7) == [(6, 6, []), (3, 3, []), (0, 0, [])]


def test_two_levels_keep_the_boundaries_on_the_way_and_recompute_each_layer_alone():
    assert forwards(TwoLevel(3), 6) == forwards(Segments(3), 6)
    assert tuple(TwoLevel(3).backward(0, 2)) == (DROP_KEEP, DROP_KEEP, SAVE)
    assert walks(TwoLevel(4), 4) == [(0, 3, [1, 2]), (2, 2, []), (1, 1, []), (0, 0, [])]


def test_binomial_golden_order_for_ten_calls_and_three_boundaries():
    """Griewank & Walther 2000: 10 = C(3 + 2, 3) calls, 3 boundaries, 15 forwards without saved tensors."""
    golden = [
        (0, 9, [4, 7]),
        (7, 8, []),
        (7, 7, []),
        (4, 6, [5]),
        (5, 5, []),
        (4, 4, []),
        (0, 3, [1, 2]),
        (2, 2, []),
        (1, 1, []),
        (0, 0, []),
    ]
    assert walks(Binomial(10), 10) == golden
    assert sum(target - first for first, target, _ in golden) == 15


def test_binomial_without_n_takes_the_whole_chain_as_one_segment():
    assert forwards(Binomial(None, 10), 12) == [DROP_KEEP] + [DROP] * 9 + [DROP_KEEP] * 2
    assert walks(Binomial(None, 10), 12)[2:] == walks(Binomial(10), 10)


@functools.cache
def fewest_forwards(n, s):
    """The dynamic programme that the closed formulas solve: forwards without saved tensors to reverse n calls."""
    if n == 1:
        return 0
    if s == 1:
        return n * (n - 1) // 2
    return min(k + fewest_forwards(n - k, s - 1) + fewest_forwards(k, s) for k in range(1, n))


@pytest.mark.parametrize("n", range(1, 61))
def test_binomial_takes_the_fewest_forwards_that_its_boundaries_allow(n):
    assert sum(target - first for first, target, _ in walks(Binomial(n), n)) == fewest_forwards(n, n_boundaries_for(n))


@pytest.mark.parametrize("n", range(2, 61))
def test_split_is_an_optimal_first_step_for_any_number_of_boundaries(n):
    for s in range(2, 7):
        k = split(n, s)
        assert k + fewest_forwards(n - k, s - 1) + fewest_forwards(k, s) == fewest_forwards(n, s)


@pytest.mark.parametrize("n", [*range(1, 72), 100, 252, 253])
def test_binomial_holds_at_most_s_boundaries_and_runs_no_call_more_than_s_times(n):
    s = n_boundaries_for(n)
    assert comb(2 * s, s) >= n
    assert s == 1 or comb(2 * s - 2, s - 1) < n
    schedule, kept, runs = Binomial(n), {0}, [0] * n
    for first, target, new in walks(schedule, n):
        kept.update(new)
        assert len(kept) <= s
        kept.discard(target)
        for call in range(first, target):
            runs[call] += 1
    assert max(runs) <= s


@given(n=st.integers(1, 40), data=st.data())
def test_binomial_answers_any_question_an_engine_may_ask(n, data):
    """The engine may have promoted any call to a boundary, and may need any target (R25, partial backward)."""
    target = data.draw(st.integers(0, 3 * n))
    first = data.draw(st.integers(0, target))
    actions = Binomial(n).backward(first, target)
    assert len(actions) == target - first + 1
    assert actions[-1] is SAVE
    assert SAVE not in actions[:-1]


def test_store_last_stores_the_last_calls_and_makes_later_ones_segments_of_their_own():
    schedule = StoreLast(Segments(3), k=2, length=6)
    assert forwards(schedule, 8) == [DROP_KEEP, DROP, DROP, DROP_KEEP, SAVE, SAVE, DROP_KEEP, DROP_KEEP]
    assert walks(schedule, 6) == [(3, 3, []), (0, 2, [])]


def test_store_last_of_none_guards_against_longer_chains():
    """R37: a longer chain gets the careful answer."""
    assert forwards(StoreLast(Segments(3), k=0, length=3), 5) == [DROP_KEEP, DROP, DROP, DROP_KEEP, DROP_KEEP]


def test_store_all_recomputes_nothing():
    assert walks(StoreAll(), 5) == []
    assert tuple(StoreAll().backward(1, 2)) == (SAVE, SAVE)


@pytest.mark.parametrize("length", range(1, 400))
def test_sqrt_segment_has_the_fewest_boundaries_plus_layers(length):
    def held(n):
        return ceil(length / n) + n

    n = sqrt_segment(length)
    assert held(n) == min(held(k) for k in range(1, length + 1)) == ceil(2 * sqrt(length))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Segments(0), "n"),
        (lambda: Segments(True), "n"),
        (lambda: EveryNth(2.0), "n"),
        (lambda: TwoLevel("2"), "n"),
        (lambda: Binomial(0), "n"),
        (lambda: Binomial(None), "n"),
        (lambda: Binomial(3, 4), "n"),
        (lambda: Binomial(None, 0), "length"),
        (lambda: StoreLast(Segments(1), -1, 4), "k"),
        (lambda: StoreLast(Segments(1), 1, 0), "length"),
        (lambda: sqrt_segment(0), "length"),
    ],
)
def test_a_size_that_cannot_be_is_an_error_that_names_it(make, argument):
    with pytest.raises(PolicyError) as caught:
        make()
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    "schedule",
    [Segments(3), EveryNth(2), TwoLevel(3), Binomial(5), Binomial(None, 9), StoreLast(Segments(2), 1, 9), StoreAll()],
)
def test_schedules_are_values(schedule):
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert hash(copy) == hash(schedule)
    assert simulate([EQUAL] * 9, copy) == simulate([EQUAL] * 9, schedule)
