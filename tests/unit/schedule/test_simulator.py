"""The simulator against closed formulas, a naive model that recounts all storages at each step, and invariants."""

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptdeco.errors import PolicyError
from ckptdeco.schedule import (
    Action,
    Binomial,
    Dropped,
    EveryNth,
    Freed,
    Kept,
    Layer,
    Recomputed,
    Segments,
    StoreAll,
    StoreLast,
    TwoLevel,
    best_segment,
    simulate,
)
from ckptdeco.schedule.classic import n_boundaries_for

SAVE, DROP_KEEP, DROP = Action.SAVE, Action.DROP_KEEP, Action.DROP
X, A = 10, 170  # input and saved bytes of a layer; the input is one of the saved tensors


def equal(length):
    return [Layer(1.0, 2.0, input_bytes=X, saved_bytes=A)] * length


# ---- closed formulas for equal layers

LENGTHS = [1, 2, 3, 7, 12, 24]
SIZES = [1, 2, 3, 5, 24, 40]


@pytest.mark.parametrize("length", LENGTHS)
def test_plain_run_keeps_all_saved_tensors_and_runs_each_forward_once(length):
    result = simulate(equal(length), StoreAll())
    assert result.kept_bytes == length * A
    assert result.n_forwards == (1,) * length
    assert result.elapsed_s == 3.0 * length
    assert result.peak_bytes == length * A + 3 * X  # last output and the gradients of output and input


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("n", SIZES)
def test_segments_keep_one_input_a_segment_and_recompute_each_layer_once(length, n):
    result = simulate(equal(length), Segments(n))
    assert result.kept_bytes == ceil(length / n) * X
    assert result.n_forwards == (2,) * length
    assert result.elapsed_s == 4.0 * length
    # the last segment is whole: all boundaries, its saved tensors (one input is its boundary), output and gradients
    if length % n == 0:
        assert result.peak_bytes == (length // n) * X + n * A - X + 3 * X


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("n", SIZES)
def test_every_nth_keeps_one_input_every_n_and_recomputes_only_these(length, n):
    result = simulate(equal(length), EveryNth(n))
    n_dropped = ceil(length / n)
    assert result.kept_bytes == n_dropped * X + (length - n_dropped) * A
    assert sum(result.n_forwards) == length + n_dropped
    assert result.n_forwards == tuple(1 if i % n else 2 for i in range(length))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("n", SIZES)
def test_two_levels_need_n_boundaries_and_one_layer_and_one_more_forward_than_segments(length, n):
    result = simulate(equal(length), TwoLevel(n))
    assert result.kept_bytes == ceil(length / n) * X
    assert max(result.n_forwards) <= 3
    ends = {min(start + n, length) - 1 for start in range(0, length, n)}
    assert result.n_forwards == tuple(2 if i in ends else 3 for i in range(length))
    # n boundaries and one layer, of which one input is a boundary, plus output and gradients
    n_boundaries = ceil(length / n) - 1 + min(n, length)
    assert result.peak_bytes <= n_boundaries * X + A + 3 * X
    if length % n == 0 and n > 1:
        assert result.peak_bytes == (n_boundaries - 1) * X + A + 3 * X  # the last of a segment is no boundary


@pytest.mark.parametrize("length", [10, 20, 70, 100])
def test_binomial_needs_s_boundaries_and_one_layer(length):
    result = simulate(equal(length), Binomial(None, length))
    s = n_boundaries_for(length)
    assert result.kept_bytes == X
    # s boundaries, the layer's saved tensors, last output and gradients of output and input
    assert result.peak_bytes <= s * X + A + 3 * X
    assert max(result.n_forwards) <= 2 + s


def test_keep_last_saves_its_forwards_for_its_saved_tensors():
    result = simulate(equal(12), StoreLast(Segments(3), 3, 12))
    assert result.n_forwards == (2,) * 9 + (1,) * 3
    assert result.kept_bytes == 3 * X + 3 * A
    assert result.peak_bytes == simulate(equal(12), Segments(3)).peak_bytes


# ---- order and options, counted by hand


def test_timeline_of_two_layers_counted_by_hand():
    chain = [
        Layer(1.0, 2.0, 8, 100, forward_temp_bytes=3, backward_temp_bytes=5),
        Layer(4.0, 8.0, 16, 50, output_bytes=32, skipped_s=1.0, input_saved=False),
    ]
    result = simulate(chain, Segments(2), head_bytes=1000)
    assert result.timeline == (
        ("forward 0", 100 + 3 + 16),  # saved (input included), temporaries, output
        ("forward 1", 8 + 16 + 50 + 32),  # boundary 0, input, saved, output
        ("turn", 8 + 32 + 1000),
        ("recompute 0", 32 + 32 + 100 + 3 + 16),  # last output and its gradient, boundary within saved
        ("recompute 1", 32 + 32 + 100 + 16 + 50),  # stopped early: no output
        ("backward 1", 32 + 32 + 100 + 50 + 16),
        ("backward 0", 16 + 100 + 8 + 5),
    )
    assert result.peak_bytes == 1040
    assert result.elapsed_s == 1 + 4 + (1 + 3) + 8 + 2
    assert result.events == (
        Dropped(0, 92),
        Kept(0, 8),
        Dropped(1, 50),
        Recomputed(0),
        Kept(0, 92),
        Recomputed(1),
        Kept(1, 50),
        Freed(1, 50),
        Freed(0, 100),
    )


def test_early_stop_saves_time_only_for_the_last_call_of_a_recompute():
    chain = [Layer(1.0, 2.0, X, A, skipped_s=0.25)] * 6
    assert simulate(chain, Segments(3)).elapsed_s == 24 - 2 * 0.25
    assert simulate(chain, Segments(1)).elapsed_s == 24 - 6 * 0.25


def test_input_that_is_a_saved_tensor_costs_a_boundary_nothing():
    shared, apart = (
        simulate([Layer(1.0, 2.0, X, A, input_saved=is_saved)], Segments(1)).peak_bytes for is_saved in (True, False)
    )
    assert apart - shared == X


def test_call_that_saved_nothing_is_not_recomputed():
    """R28: a frozen layer has nothing to unpack."""
    result = simulate([Layer(1.0, 2.0, X, 0)] * 3, Segments(1))
    assert result.n_forwards == (1, 1, 1)
    assert sum(event.n_bytes for event in result.events if isinstance(event, Freed)) == 3 * X


class Fixed:
    """A schedule written down."""

    def __init__(self, actions, recompute=None):
        self.actions, self.recompute = actions, recompute

    def forward(self, position):
        return self.actions[position]

    def backward(self, first, target):
        return self.recompute or (SAVE,) * (target - first + 1)


def test_dropped_call_with_nothing_to_recompute_it_from_keeps_its_input():
    result = simulate(equal(4), Fixed([DROP, DROP, SAVE, DROP]))
    assert result.kept_bytes == X + A + X
    assert result.n_forwards == (2, 2, 1, 2)


@pytest.mark.parametrize("recompute", [(SAVE,), (SAVE, DROP), (SAVE, SAVE, SAVE)])
def test_recompute_that_does_not_reach_its_target_is_an_error(recompute):
    with pytest.raises(PolicyError, match=r"cannot recompute calls 0 to 1") as caught:
        simulate(equal(2), Fixed([DROP_KEEP, DROP], recompute))
    assert caught.value.argument == "schedule"


@pytest.mark.parametrize("ask", [lambda: simulate([], Segments(1)), lambda: best_segment([])])
def test_empty_chain_is_an_error(ask):
    with pytest.raises(PolicyError) as caught:
        ask()
    assert caught.value.argument == "chain"


@pytest.mark.parametrize("name", ["forward_s", "input_bytes", "saved_bytes", "output_bytes", "skipped_s"])
def test_negative_cost_is_an_error_that_names_it(name):
    costs = {"forward_s": 1.0, "backward_s": 1.0, "input_bytes": 1, "saved_bytes": 1, name: -1}
    with pytest.raises(PolicyError) as caught:
        Layer(**costs)
    assert caught.value.argument == name


# ---- random chains and schedules

layers = st.builds(
    Layer,
    forward_s=st.integers(1, 9).map(float),
    backward_s=st.integers(0, 9).map(float),
    input_bytes=st.integers(1, 50),
    saved_bytes=st.integers(0, 200),
    output_bytes=st.none() | st.integers(1, 50),
    forward_temp_bytes=st.integers(0, 20),
    backward_temp_bytes=st.integers(0, 20),
    skipped_s=st.sampled_from([0.0, 0.5]),
    input_saved=st.booleans(),
)
chains = st.lists(layers, min_size=1, max_size=9)


class Recorded:
    """Answers by a fixed table and remembers what it was asked."""

    def __init__(self, actions, table):
        self.actions, self.table, self.asked = actions, table, []

    def forward(self, position):
        return self.actions[position]

    def backward(self, first, target):
        self.asked.append((first, target))
        return (*(self.table[call][target] for call in range(first, target)), SAVE)


@st.composite
def programs(draw):
    chain = draw(chains)
    size = len(chain)
    n = draw(st.integers(1, size + 1))
    kind = draw(st.sampled_from(["segments", "every", "two", "binomial", "last", "free"]))
    if kind == "free":
        action = st.sampled_from(Action)
        rows = st.lists(action, min_size=size, max_size=size)
        return chain, Recorded(draw(rows), draw(st.lists(rows, min_size=size, max_size=size)))
    makers = {"segments": Segments, "every": EveryNth, "two": TwoLevel, "binomial": Binomial}
    schedule = makers.get(kind, Segments)(n)
    return chain, StoreLast(schedule, draw(st.integers(0, size)), size) if kind == "last" else schedule


def naive(chain, schedule, head_bytes):
    """The same model by other means: a set of live storages for each step, recounted from nothing."""
    size = len(chain)
    value = [layer.input_bytes for layer in chain]

    def out(call):
        given = chain[call].output_bytes
        return given if given is not None else value[call + 1] if call + 1 < size else value[call]

    def saved(call):
        layer = chain[call]
        if layer.input_saved and layer.saved_bytes >= layer.input_bytes:
            return {("value", call): layer.input_bytes, ("inside", call): layer.saved_bytes - layer.input_bytes}
        return {("inside", call): layer.saved_bytes}

    kept, present, timeline, asked, count = set(), set(), [], [], [1] * size

    def live(*more):
        storages = {}
        for call in kept:
            storages["value", call] = value[call]
        for call in present:
            storages |= saved(call)
        for extra in more:
            storages |= extra
        return sum(storages.values())

    was_stored = True
    for call in range(size):
        running = {("value", call): value[call], ("out", call): out(call), "temp": chain[call].forward_temp_bytes}
        timeline.append(live(running, saved(call)))
        action = schedule.forward(call)
        if action is SAVE:
            present.add(call)
        elif action is DROP_KEEP or was_stored:
            kept.add(call)
        was_stored = action is SAVE
    timeline.append(live({"last": out(size - 1), "head": head_bytes}))
    for target in reversed(range(size)):
        is_last = target == size - 1
        above = {"upper gradient": out(target) if is_last else value[target + 1]}
        if is_last:
            above["last"] = out(target)
        if target not in present and chain[target].saved_bytes:
            first = max(call for call in kept if call <= target)
            asked.append((first, target))
            for call, action in enumerate(schedule.backward(first, target), first):
                if action is SAVE:
                    present.add(call)
                elif action is DROP_KEEP:
                    kept.add(call)
                running = {("value", call): value[call], "temp": chain[call].forward_temp_bytes}
                if call < target or not chain[call].skipped_s:
                    running["out", call] = out(call)
                timeline.append(live(running, above))
                count[call] += 1
        timeline.append(live(above, {"lower gradient": value[target], "temp": chain[target].backward_temp_bytes}))
        present.discard(target)
        kept.discard(target)
    assert not live()
    return timeline, count, asked


@given(program=programs(), head_bytes=st.integers(0, 300))
def test_simulation_agrees_with_a_naive_recount(program, head_bytes):
    chain, schedule = program
    result = simulate(chain, schedule, head_bytes=head_bytes)
    timeline, count, _ = naive(chain, schedule, head_bytes)
    assert [live for _, live in result.timeline] == timeline
    assert result.peak_bytes == max(timeline)
    assert result.n_forwards == tuple(count)


@given(program=programs())
def test_all_that_is_kept_is_freed_and_nothing_twice(program):
    chain, schedule = program
    result = simulate(chain, schedule)
    balance = Counter()
    for event in result.events:
        if isinstance(event, Kept):
            assert event.n_bytes > 0
            balance[event.call] += event.n_bytes
        elif isinstance(event, Freed):
            assert balance.pop(event.call) == event.n_bytes
    assert not balance
    assert all(live >= 0 for _, live in result.timeline)
    freed = [event.call for event in result.events if isinstance(event, Freed)]
    assert freed == sorted(set(freed), reverse=True)


@given(program=programs())
def test_bytes_kept_after_forward_are_those_of_the_events_so_far(program):
    chain, schedule = program
    result = simulate(chain, schedule)
    kept = 0
    for event in result.events:
        if isinstance(event, (Recomputed, Freed)):
            break
        kept += event.n_bytes if isinstance(event, Kept) else 0
    assert kept == result.kept_bytes


@given(program=programs())
def test_a_call_is_recomputed_exactly_when_its_saved_tensors_are_needed_and_absent(program):
    """Walk the events: a recompute starts only for the next call to go backward, and ends with it present."""
    chain, schedule = program
    result = simulate(chain, schedule)
    n_recomputed = Counter(event.call for event in result.events if isinstance(event, Recomputed))
    assert result.n_forwards == tuple(1 + n_recomputed[call] for call in range(len(chain)))
    for call, layer in enumerate(chain):
        is_dropped = any(isinstance(event, Dropped) and event.call == call for event in result.events)
        assert bool(layer.saved_bytes) <= (n_recomputed[call] > 0) or not is_dropped
    times = sum(layer.forward_s * n + layer.backward_s for layer, n in zip(chain, result.n_forwards, strict=True))
    n_walks = len(naive(chain, schedule, 0)[2])
    assert times - 0.5 * n_walks <= result.elapsed_s <= times


@given(chain=chains)
def test_dropping_never_peaks_above_the_plain_run_by_more_than_its_boundaries_and_output(chain):
    plain = simulate(chain, StoreAll()).peak_bytes
    boundaries = sum(layer.input_bytes for layer in chain)
    outputs = max(layer.output_bytes or 50 for layer in chain) + max(layer.forward_temp_bytes for layer in chain)
    assert simulate(chain, Segments(1)).peak_bytes <= plain + boundaries + 3 * outputs


# ---- best_segment


@given(chain=chains, schedule=st.sampled_from([Segments, TwoLevel, Binomial]))
def test_best_segment_has_the_lowest_peak_of_all_lengths(chain, schedule):
    peaks = {n: simulate(chain, schedule(n)).peak_bytes for n in range(1, len(chain) + 1)}
    assert best_segment(chain, schedule) == min(peaks, key=lambda n: (peaks[n], n))


def test_best_segment_of_a_transformer_is_one_until_the_chain_is_long():
    """A transformer block in bf16 saves about 17 times its input: two layers a segment pay above about 34 layers."""
    assert best_segment(equal(30)) == 1
    assert best_segment(equal(36)) == 2
