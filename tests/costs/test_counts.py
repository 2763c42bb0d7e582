"""Layer forwards and matmuls are counted: exactly as the schedule says, and bounded on any graph (R24, R25)."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.support import meters
from tests.support.layers import Block, Loop, Marked, MaskedLayer, Stack, TanhLayer, batch, stack
from tests.support.subject import ENGINE, checkpointable, policy

pytestmark = pytest.mark.skipif(ENGINE != "ckptdeco", reason="counts ckptdeco's recomputes")
LAYERS = 12


def forwards(model: nn.Module, made: Any, *inputs: torch.Tensor) -> Counter[str]:
    with meters.count_forwards() as counter:
        with made:
            out = model(*inputs)
        leaves = [out] if isinstance(out, torch.Tensor) else list(out)
        sum(leaf.square().sum() for leaf in leaves).backward()
    return counter


def cases() -> dict[str, tuple[dict[str, Any], Any, bool]]:
    """Options, schedule, and whether a pass must be seen first."""
    from ckptdeco.schedule import classic

    return {
        "segment=1": ({"segment": 1}, classic.Segments(1), False),
        "segment=5": ({"segment": 5}, classic.Segments(5), False),
        "segment=12": ({"segment": 12}, classic.Segments(12), False),
        "sqrt": ({"segment": "sqrt"}, classic.Segments(3), True),
        "every=2": ({"every": 2}, classic.EveryNth(2), False),
        "every=5": ({"every": 5}, classic.EveryNth(5), False),
        "levels=2": ({"segment": 4, "levels": 2}, classic.TwoLevel(4), False),
        "levels=2, uneven": ({"segment": 5, "levels": 2}, classic.TwoLevel(5), False),
        "levels=log": ({"segment": 6, "levels": "log"}, classic.Binomial(6), False),
        "log": ({"levels": "log"}, classic.Binomial(None, LAYERS), True),
        "keep_last": ({"segment": 3, "keep_last": 2}, classic.StoreLast(classic.Segments(3), 2, LAYERS), True),
    }


CASES = [
    "segment=1", "segment=5", "segment=12", "sqrt", "every=2", "every=5", "levels=2", "levels=2, uneven", "levels=log",
    "log", "keep_last",
]  # fmt: skip


@pytest.mark.parametrize("make", [Block, TanhLayer])
@pytest.mark.parametrize("name", CASES)
def test_forwards_of_each_layer_are_those_of_the_schedule(name: str, make: Any) -> None:
    from ckptdeco.schedule.simulator import Layer, simulate

    options, schedule, needs_a_pass = cases()[name]
    expected = simulate([Layer(1.0, 2.0, 10, 100)] * LAYERS, schedule).n_forwards
    model, made = stack(LAYERS, make), policy(**options)
    for step in range(4):
        counter = forwards(model, made, batch())
        if step or not needs_a_pass:
            assert tuple(counter[str(i)] for i in range(LAYERS)) == expected, f"step {step}"


def test_formulas_of_the_schedules() -> None:
    """The schedule itself is held against formulas, so that both cannot be wrong alike."""
    assert set(forwards(stack(LAYERS), policy(segment=3), batch()).values()) == {2}
    counter = forwards(stack(LAYERS), policy(every=3), batch())
    assert [counter[str(i)] for i in range(LAYERS)] == [2 if i % 3 == 0 else 1 for i in range(LAYERS)]
    counter = forwards(stack(LAYERS), policy(segment=4, levels=2), batch())
    assert [counter[str(i)] for i in range(LAYERS)] == [2 if i % 4 == 3 else 3 for i in range(LAYERS)]


def matmuls(model: nn.Module, made: Any, n_warm: int = 2) -> int:
    def step() -> None:
        with made:
            y = model(x)
        y.sum().backward()

    x = batch()
    for _ in range(n_warm):
        step()
    with meters.MatmulCounter() as counter:
        step()
    return counter.n_matmuls


@pytest.mark.parametrize("n_warm", [0, 2, 5])
@pytest.mark.parametrize(
    ("options", "n_more"),
    [
        ({"segment": 1}, LAYERS),
        ({"segment": 3}, 2 * LAYERS - 4),
        ({"segment": 5}, 2 * LAYERS - 3),
        ({"segment": 3, "early_stop": False}, 2 * LAYERS),
        ({"every": 2}, LAYERS // 2),
        ({"segment": 4, "levels": 2}, 3 * (3 * 4 - 2)),
    ],
    ids=str,
)
def test_early_stop_skips_the_last_matmul_of_each_recompute(options: dict[str, Any], n_more: int, n_warm: int) -> None:
    model = stack(LAYERS)
    assert matmuls(model, policy(**options), n_warm) - matmuls(model, policy(None)) == n_more


def longest_walk(log: list[str]) -> int:
    """Most forwards between two notes of backward."""
    longest = run = 0
    for entry in log:
        run = run + 1 if entry[0] == "F" else 0
        longest = max(longest, run)
    return longest


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    """For each call the indices of the values it takes: 0 is the model's input, i is the output of call i."""
    n_calls = draw(st.integers(2, 14))
    return [draw(st.lists(st.integers(max(0, i - 6), i), min_size=1, max_size=3, unique=True)) for i in range(n_calls)]


def run_graph(graph: list[list[int]], layers: list[nn.Module], made: Any, uses: int) -> tuple[list[str], list[Any]]:
    torch.manual_seed(1)
    values = [batch()]
    with made:
        for inputs, layer in zip(graph, layers, strict=True):
            values.append(layer(*(values[i] for i in inputs)))
        used = {i for inputs in graph for i in inputs}
        ends = [v for i, v in enumerate(values) if i not in used or i == uses]
        loss = sum(((k + 1) * end.square().sum() for k, end in enumerate(ends)), torch.zeros(()))
    first, parameters = values[0], [p for layer in layers for p in layer.parameters()]
    del values, ends
    with meters.log_calls() as log:
        loss.backward()
    got = [first.grad, *(p.grad for p in parameters)]
    for p in parameters:
        p.grad = None
    return log, got


def assert_graph(graph: list[list[int]], n: int, options: dict[str, Any], uses: int = -1) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Marked(label=str(i)) for i in range(len(graph))]
    _, expected = run_graph(graph, layers, policy(None), uses)
    made = policy(segment=n, **options)
    for _ in range(2):
        log, got = run_graph(graph, layers, made, uses)
        for want, have in zip(expected, got, strict=True):
            assert (want is None) == (have is None)
            assert want is None or torch.equal(want, have)
        assert longest_walk(log) <= n, f"a walk ran {longest_walk(log)} calls: {log}"
        if not options:
            most = Counter(entry for entry in log if entry[0] == "F").most_common(1)
            assert not most or most[0][1] <= n, f"{most} in {log}"


@hypothesis.given(
    graphs(), st.integers(1, 6), st.sampled_from([{}, {}, {"levels": 2}, {"levels": "log"}]), st.integers(-1, 8)
)
def test_a_walk_never_runs_more_than_n_calls(
    graph: list[list[int]], n: int, options: dict[str, Any], uses: int
) -> None:
    assert_graph(graph, n, options, uses)


@pytest.mark.parametrize("n", [2, 6])
def test_a_walk_in_a_tree_never_runs_more_than_n_calls(n: int) -> None:
    """63 calls of two inputs; by depth alone the first walk would run them all."""
    leaves = [[0] for _ in range(32)]
    inner = [[2 * i + 1, 2 * i + 2] for i in range(31)]
    assert_graph(leaves + inner, n, {})


def unet(m: Loop, x: torch.Tensor) -> torch.Tensor:
    skips = []
    for layer in m.layers[:8]:
        x = layer(x)
        skips.append(x)
    for layer in m.layers[8:]:
        x = layer(x + skips.pop())
    return x


def unet_arguments(m: Loop, x: torch.Tensor) -> torch.Tensor:
    skips = []
    for layer in m.layers[:8]:
        x = layer(x)
        skips.append(x)
    for layer in m.layers[8:]:
        x = layer(x, skips.pop())
    return x


@pytest.mark.parametrize("loop", [unet, unet_arguments])
def test_u_net_runs_at_most_two_forwards_a_call(loop: Any) -> None:
    """R25: 26 forwards for 16 calls in the example that found it."""
    model, made = Loop([Marked(label=str(i)) for i in range(16)], loop), policy(segment=4)
    for step in range(3):
        counter = forwards(model, made, batch())
        assert max(counter.values()) <= 2, f"step {step}: {dict(counter)}"


def test_trunk_with_eight_heads_runs_at_most_two_forwards_a_call() -> None:
    """R25: 40 forwards for 12 calls in the example that found it."""

    def loop(m: Loop, x: torch.Tensor) -> list[torch.Tensor]:
        for layer in m.layers[:4]:
            x = layer(x)
        return [head(x) for head in m.layers[4:]]

    model, made = Loop([Marked(label=str(i)) for i in range(12)], loop), policy(segment=4)
    for step in range(3):
        counter = forwards(model, made, batch())
        assert max(counter.values()) <= 2, f"step {step}: {dict(counter)}"


@pytest.mark.parametrize("n", [4, 8])
def test_encoder_and_decoder_run_at_most_two_forwards_a_call(n: int) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        y = x.flip(0)
        for layer in m.layers[:6]:
            x = layer(x)
        for layer in m.layers[6:]:
            y = layer(y, x)
        return y

    model, made = Loop([Marked(label=str(i)) for i in range(12)], loop), policy(segment=n)
    for step in range(3):
        counter = forwards(model, made, batch())
        assert max(counter.values()) <= 2, f"step {step}: {dict(counter)}"


def test_hidden_states_that_are_alive_shorten_the_walk() -> None:
    """R28."""
    layers, made = [Marked(label=str(i)) for i in range(8)], policy(segment=4)
    for step in range(3):
        hidden_states = [batch()]
        with made:
            for layer in layers:
                hidden_states.append(layer(hidden_states[-1]))
        with meters.log_calls() as log:
            hidden_states[-1].sum().backward()
        assert longest_walk(log) == 1, f"step {step}: {log}"
        assert log.count("F0") == 1


@pytest.mark.parametrize("n", [1, 4])
def test_an_outer_hook_packs_a_shared_mask_once(n: int) -> None:
    """R29: 12 times for 12 calls in the example that found it."""
    model, made = Stack([MaskedLayer() for _ in range(12)]), policy(segment=n)
    for step in range(3):
        mask = torch.rand(4, 8)
        packed: list[int] = []

        def pack(tensor: torch.Tensor, packed: list[int] = packed) -> torch.Tensor:
            packed.append(tensor.untyped_storage().data_ptr())
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), made:
            y = model(batch(), mask)
        y.sum().backward()
        assert packed.count(mask.untyped_storage().data_ptr()) == 1, f"step {step}"
        assert len(packed) <= 1 + ceil(12 / n), f"step {step}: the outer hook saw {len(packed)} tensors"


def test_a_custom_function_that_reads_its_saved_tensors_four_times_recomputes_once() -> None:
    """R31: 34 forwards for 4 layers in the example that found it."""

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, x.exp())
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            held = ctx.saved_tensors
            for _ in range(2):
                assert all(map(torch.equal, held, ctx.saved_tensors))
            return grad * ctx.saved_tensors[0].cos()

    @checkpointable
    def layer(x: torch.Tensor) -> torch.Tensor:
        meters.tick("reads")
        return Reads.apply(x * 1.5)

    with meters.count_forwards() as counter:
        with policy(segment=4):
            x = batch()
            y = x
            for _ in range(4):
                y = layer(y)
        y.sum().backward()
    assert counter["reads"] == 8


def test_layer_by_layer_gradients_recompute_each_segment_once() -> None:
    """R26: clearing at once would make this quadratic."""
    model, made = stack(8), policy(segment=4)
    hidden = [batch()]
    with meters.count_forwards() as counter:
        with made:
            for layer in model.layers:
                hidden.append(layer(hidden[-1]))
        grad = torch.ones_like(hidden[-1])
        for i in reversed(range(8)):
            (grad,) = torch.autograd.grad(hidden[i + 1], hidden[i], grad, retain_graph=True)
    assert max(counter.values()) <= 2


def test_no_recompute_when_nothing_needs_it() -> None:
    model = stack(4).requires_grad_(False)
    counter = forwards(
        Loop([*model.layers], lambda m, x: chain(m, x) + x), policy(segment=2), batch(requires_grad=True)
    )
    assert max(counter.values()) <= 2
    with meters.count_forwards() as counter, policy(segment=2):
        y = model(batch(requires_grad=False))
    assert not y.requires_grad
    assert set(counter.values()) == {1}


def chain(m: Loop, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = layer(x)
    return x
