"""The planner against an exhaustive search, the simulator and the classic schedules."""

import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptdeco.errors import BudgetError, PolicyError
from ckptdeco.extras import MissingExtraError
from ckptdeco.schedule import (
    Action,
    Binomial,
    EveryNth,
    Layer,
    Option,
    Planned,
    Planner,
    Segments,
    StoreAll,
    StoreLast,
    TwoLevel,
    simulate,
)
from ckptdeco.schedule.rivals import Rivals
from ckptdeco.schedule.table import Table
from tests.support.exhaustive import fastest_by_memory

SAVE, DROP_KEEP, DROP = Action.SAVE, Action.DROP_KEEP, Action.DROP
EQUAL = Layer(1.0, 2.0, input_bytes=10, saved_bytes=170, skipped_s=0.25)


@st.composite
def options(draw):
    kept = draw(st.integers(0, 12))
    forward_s = draw(st.integers(0, 3))
    skipped_s = draw(st.sampled_from([0.0, 0.5])) if forward_s else 0.0
    return Option("some", kept, float(forward_s), skipped_s, draw(st.integers(0, min(kept, 3))))


def layers(scale=1, menus=True):
    def sizes(most):
        return st.integers(0, most).map(scale.__mul__)

    return st.builds(
        Layer,
        forward_s=st.integers(1, 9).map(float),
        backward_s=st.integers(0, 3).map(float),
        input_bytes=sizes(6),
        saved_bytes=st.just(0) | sizes(30),
        output_bytes=st.none() | sizes(6),
        forward_temp_bytes=sizes(6) | sizes(40),
        backward_temp_bytes=sizes(6),
        skipped_s=st.sampled_from([0.0, 0.5]),
        input_saved=st.booleans(),
        menu=st.lists(options(), max_size=2).map(tuple) if menus else st.just(()),
    )


def chains(most, scale=1, menus=True):
    return st.lists(layers(scale, menus), min_size=1, max_size=most)


def plain_of(chain, head_bytes=0):
    return simulate(chain, StoreAll(), head_bytes=head_bytes)


def classics(n):
    for size in range(1, n + 1):
        yield from (Segments(size), EveryNth(size), TwoLevel(size), Binomial(size))
        yield from (StoreLast(make(size), k, n) for make in (Segments, EveryNth, TwoLevel) for k in range(1, n + 1))


# ---- the optimum


def assert_optimal(chain, head_bytes):
    """For each memory that the table has an entry for, which is each if sizes have no common divisor."""
    top = plain_of(chain, head_bytes).peak_bytes
    table = Table(chain, top, top + 1, head_bytes=head_bytes)
    assert table.is_exact
    best = fastest_by_memory(chain, head_bytes, top)
    assert table.extra_s.tolist() == best[table.grid.base :: table.grid.slot]


@settings(max_examples=60, deadline=None)
@given(chain=chains(5, menus=False), head_bytes=st.integers(0, 30))
def test_table_has_the_least_time_of_all_schedules_for_every_memory(chain, head_bytes):
    assert_optimal(chain, head_bytes)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("saved_bytes", [0, 1])
def test_temporaries_of_what_only_runs_on_the_way_meet_the_gradient_that_waits(place, saved_bytes):
    chain = [Layer(1.0, 1.0, 1, 10), Layer(1.0, 1.0, 5, 10), Layer(1.0, 1.0, 30, 30, output_bytes=0)]
    chain.insert(place, Layer(1.0, 1.0, 1, saved_bytes, forward_temp_bytes=100))
    assert_optimal(chain, 0)


@settings(max_examples=40, deadline=None)
@given(chain=chains(3), head_bytes=st.integers(0, 30))
def test_table_has_it_with_menus_too_if_a_segment_takes_one_entry(chain, head_bytes):
    assert_optimal(chain, head_bytes)


@settings(max_examples=100, deadline=None)
@given(chain=chains(7), head_bytes=st.integers(0, 30))
def test_simulator_predicts_the_peak_and_time_that_the_table_claims(chain, head_bytes):
    plain = plain_of(chain, head_bytes)
    table = Table(chain, plain.peak_bytes, plain.peak_bytes + 1, head_bytes=head_bytes)
    assert table.is_exact
    for entry in table.steps():
        result = simulate(chain, table.schedule(entry), head_bytes=head_bytes)
        assert result.elapsed_s - plain.elapsed_s == table.extra_s[entry]
        if table.grid.slot == 1:  # with one byte less it would be slower
            assert result.peak_bytes == table.grid.n_bytes(entry)
        assert result.peak_bytes <= table.grid.n_bytes(entry)


@settings(max_examples=40, deadline=None)
@given(kinds=chains(3), pattern=st.lists(st.integers(0, 2), min_size=2, max_size=9), n_slots=st.integers(5, 60))
def test_equal_layers_are_solved_once_with_the_same_result(kinds, pattern, n_slots):
    chain = [kinds[kind % len(kinds)] for kind in pattern]
    top = plain_of(chain).peak_bytes
    once, each = (Table(chain, top, n_slots, by_kind=by_kind) for by_kind in (True, False))
    assert once.extra_s.tolist() == each.extra_s.tolist()
    assert len(once.ways[0].walks) <= len(each.ways[0].walks)


def test_like_layers_cost_rows_in_proportion_to_the_chain():
    assert len(Table([EQUAL] * 60, 5000, 50).ways[0].walks) < 2 * 60
    assert len(Table([EQUAL] * 60, 5000, 50, by_kind=False).ways[0].walks) == 60 * 61 // 2


# ---- budgets


@settings(max_examples=60, deadline=None)
@given(chain=chains(7, scale=1009), n_slots=st.integers(8, 80), head_bytes=st.integers(0, 30000), data=st.data())
def test_peak_is_within_the_budget_and_no_classic_schedule_is_faster(chain, n_slots, head_bytes, data):
    planner = Planner(chain, head_bytes=head_bytes, base_bytes=5000, n_slots=n_slots)
    budget = data.draw(st.integers(0, planner.plain.peak_bytes), label="budget")
    least = planner.least()
    if budget < least.peak_bytes:
        with pytest.raises(BudgetError) as caught:
            planner.fastest(budget)
        assert (caught.value.budget_bytes, caught.value.least_bytes) == (budget, least.peak_bytes)
        assert sum(n_bytes for _, n_bytes in caught.value.parts) == least.peak_bytes
        budget = least.peak_bytes
    plan = planner.fastest(budget)
    assert plan.peak_bytes <= budget
    assert plan.prediction == simulate(chain, plan.schedule, head_bytes=head_bytes)
    for schedule in classics(len(chain)):
        result = simulate(chain, schedule, head_bytes=head_bytes)
        assert result.peak_bytes + 5000 > budget or result.elapsed_s >= plan.elapsed_s


@settings(max_examples=40, deadline=None)
@given(chain=chains(6))
def test_more_memory_is_never_slower_and_one_byte_less_than_the_least_cannot_be_met(chain):
    planner = Planner(chain)
    least = planner.least().peak_bytes
    with pytest.raises(BudgetError) as caught:
        planner.fastest(least - 1)
    assert caught.value.least_bytes == least
    times = [planner.fastest(budget).elapsed_s for budget in range(least, planner.plain.peak_bytes + 1)]
    assert times == sorted(times, reverse=True)


@settings(max_examples=20, deadline=None)
@given(chain=chains(6, scale=1009, menus=False), n_slots=st.integers(10, 60), data=st.data())
def test_answer_does_not_depend_on_what_was_asked_before(chain, n_slots, data):
    """So that the ranks of a process group agree."""
    planner, other = (Planner(chain, n_slots=n_slots) for _ in range(2))
    least, top = planner.least().peak_bytes, planner.plain.peak_bytes
    budgets = data.draw(st.lists(st.integers(least, top), min_size=1, max_size=6))
    for budget in budgets:
        planner.fastest(budget)
    assert planner.fastest(budgets[0]) == other.fastest(budgets[0])


def test_budget_that_needs_nothing_is_plain_and_asks_for_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    planner = Planner([EQUAL] * 12, base_bytes=7)
    assert planner.fastest(2077) is planner.plain
    assert planner.plain.schedule == StoreAll()
    with pytest.raises(MissingExtraError, match=r"ckptdeco\[budget\]"):
        planner.fastest(2076)


def test_base_and_head_are_on_the_bill():
    small = Planner([EQUAL] * 12)
    for budget in (300, 700, 1500):
        assert Planner([EQUAL] * 12, base_bytes=1000).fastest(budget + 1000).schedule == small.fastest(budget).schedule
    assert Planner([EQUAL] * 12, head_bytes=600).least().peak_bytes >= 600 + 10
    assert Planner([EQUAL] * 12, base_bytes=1000).least().parts[0][1] == 1000


@pytest.mark.parametrize("budget", [1.5, True, "1GiB"])
def test_budget_that_is_no_number_of_bytes_is_an_error(budget):
    with pytest.raises(PolicyError) as caught:
        Planner([EQUAL]).fastest(budget)
    assert caught.value.argument == "budget"


def test_frontier_goes_from_the_least_memory_to_plain_and_gets_faster():
    planner = Planner([EQUAL] * 24, n_slots=100)
    front = planner.frontier()
    assert front[0].peak_bytes == planner.least().peak_bytes
    assert front[-1] == planner.plain
    times, peaks = [plan.elapsed_s for plan in front], [plan.peak_bytes for plan in front]
    assert times == sorted(times, reverse=True)
    assert peaks == sorted(peaks)
    assert 10 < len(front) <= 42


@settings(max_examples=60, deadline=None)
@given(chain=chains(8, menus=False), head_bytes=st.integers(0, 30))
def test_what_rules_a_rival_out_is_never_more_than_what_it_costs(chain, head_bytes):
    rivals = Rivals(chain, head_bytes, np)
    plain_s = plain_of(chain).elapsed_s
    for make, size, seconds, peaks in rivals.bounds:
        for k in range(len(seconds)):
            result = simulate(chain, rivals.schedule(make, size, k), head_bytes=head_bytes)
            assert seconds[k] <= result.elapsed_s - plain_s
            assert peaks[k] <= result.peak_bytes


def test_what_rounding_loses_a_classic_schedule_makes_good():
    chain = [Layer(1.0, 2.0, 1000 + 7 * i % 5, 9000 + i * i) for i in range(8)]
    planner = Planner(chain, n_slots=8)
    schedule = StoreLast(EveryNth(1), 4, 8)
    result = simulate(chain, schedule)
    plan = planner.fastest(result.peak_bytes)
    assert plan.elapsed_s <= result.elapsed_s
    assert not isinstance(plan.schedule, Planned)


def test_a_rival_that_fits_and_is_faster_is_found():
    rivals = Rivals([EQUAL] * 12, 0, np)
    found = rivals.best(simulate([EQUAL] * 12, Segments(1)).peak_bytes, 12.0)
    assert found is not None
    assert found[1].elapsed_s == simulate([EQUAL] * 12, found[0]).elapsed_s < 48.0
    assert rivals.best(30, 12.0) is None
    assert rivals.best(2000, 0.0) is None


# ---- menus


def test_option_keeps_its_results_and_recomputes_for_less_counted_by_hand():
    option = Option("matmuls", kept_bytes=40, forward_s=0.25, skipped_s=0.125, shared_bytes=30)
    layer = Layer(1.0, 2.0, input_bytes=10, saved_bytes=100, skipped_s=0.5, menu=(option,))
    schedule = Planned((DROP_KEEP, DROP_KEEP), (None, None), (option, None))
    result = simulate([layer, layer], schedule)
    assert result.kept_bytes == 10 + 40 + 10
    assert result.elapsed_s == 6.0 + 0.125 + 0.5
    assert result.timeline == (
        ("forward 0", 10 + 90 + 10 + 10),  # input, the other saved tensors, results that are none of them, output
        ("forward 1", 50 + 100 + 10),
        ("turn", 60 + 10),
        ("recompute 1", 50 + 100 + 20),
        ("backward 1", 50 + 100 + 30),
        ("recompute 0", 110 + 10),
        ("backward 0", 110 + 20),
    )
    assert (result.peak_step, result.peak_held_bytes) == ("backward 1", 150)


def test_menu_is_used_where_it_pays():
    option = Option("matmuls", kept_bytes=60, forward_s=0.25)
    layer = Layer(1.0, 2.0, input_bytes=10, saved_bytes=170, menu=(option,))
    bare, rich = Planner([Layer(1.0, 2.0, 10, 170)] * 12), Planner([layer] * 12)
    assert rich.fastest(1000).elapsed_s < bare.fastest(1000).elapsed_s
    assert option in rich.fastest(1000).schedule.options
    assert rich.least().peak_bytes == bare.least().peak_bytes


@pytest.mark.parametrize(
    "make", [lambda **costs: Layer(1.0, 1.0, 1, 1, **costs), lambda **costs: Option("a", 1, 1.0, **costs)]
)
def test_more_skipped_than_there_is_is_an_error(make):
    with pytest.raises(PolicyError) as caught:
        make(skipped_s=1.5)
    assert caught.value.argument == "skipped_s"


# ---- the schedule


def test_planned_schedule_is_a_value():
    schedule = Planner([EQUAL] * 9).fastest(600).schedule
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert hash(copy) == hash(schedule)


def test_golden_plan_of_eight_calls_with_little_memory():
    plan = Planner([EQUAL] * 8).fastest(220)
    kept = [i for i in range(8) if plan.schedule.forward(i) is DROP_KEEP]
    walks = {target: (walk.first, walk.actions) for target, walk in enumerate(plan.schedule.walks) if walk is not None}
    assert kept == [0, 4]
    assert plan.schedule.forward(7) is SAVE
    assert walks == {
        6: (4, (DROP_KEEP, DROP_KEEP, SAVE)),
        5: (5, (SAVE,)),
        4: (4, (SAVE,)),
        3: (0, (DROP_KEEP, DROP_KEEP, DROP_KEEP, SAVE)),
        2: (2, (SAVE,)),
        1: (1, (SAVE,)),
        0: (0, (SAVE,)),
    }
    assert plan.schedule.longest == 4
    assert plan.elapsed_s == 24.0 + (3 - 0.25) + 2 * 0.75 + (4 - 0.25) + 3 * 0.75


@given(n=st.integers(1, 14), budget=st.integers(200, 2500), data=st.data())
@settings(max_examples=60, deadline=None)
def test_planned_schedule_answers_any_question_an_engine_may_ask(n, budget, data):
    """The engine may have promoted any call to a boundary, and may need any target (R25, partial backward)."""
    planner = Planner([EQUAL] * n)
    schedule = planner.fastest(max(budget, planner.least().peak_bytes)).schedule
    target = data.draw(st.integers(0, n + 3))
    first = data.draw(st.integers(0, target))
    actions = schedule.backward(first, target)
    assert len(actions) == target - first + 1
    assert actions[-1] is SAVE


def test_call_past_the_chain_is_a_segment_of_its_own():
    """R37."""
    schedule = Planner([EQUAL] * 4).fastest(300).schedule
    assert schedule.forward(4) is DROP_KEEP
    assert schedule.option(4) is None
    assert tuple(schedule.backward(4, 5)) == (SAVE, SAVE)
