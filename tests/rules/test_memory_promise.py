"""What is alive, and how often layers run, is what the policy says (R23–R29): counted in bytes and forwards."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional

from tests.support import meters
from tests.support.chains import (
    BOUNDARY,
    ROWS,
    WIDE,
    inner_bytes,
    live_after_forward,
    make_batch,
    make_chain,
    step_peak,
)
from tests.support.layers import Block, InPlaceOnInputLayer, Layer, Loop, Marked, Stem, TanhLayer, stack
from tests.support.meters import ByteMeter
from tests.support.subject import ENGINE, checkpointable, policy

pytestmark = pytest.mark.skipif(ENGINE != "ckptdeco", reason="measures ckptdeco")
SMALL = BOUNDARY // 8
"""What may be alive besides: losses, gradients of a bias, the numbers of a reduction."""


def longest_walk(log: list[str]) -> int:
    """Most forwards in a row without a backward between."""
    longest = run = 0
    for entry in log:
        run = run + 1 if entry[0] == "F" else 0
        longest = max(longest, run)
    return longest


# ---- R23: a recompute holds nothing


class StoresHidden(Block):
    """Stores a tensor with its graph on itself, as for attention maps or an auxiliary loss."""

    last: Any = None

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        meters.tick(self.label)
        h = functional.gelu(self.up(self.norm(x)))
        self.last = h.mean(0)
        return x + self.down(h)


def test_tensor_stored_on_the_module_adds_only_itself() -> None:
    """R23: else the graph of each recompute lives as long as the attribute: no backward ever frees it."""
    without = step_peak(make_chain(12), make_batch(), policy(segment=4))
    stored = 12 * 2 * WIDE * 4
    assert step_peak(make_chain(12, StoresHidden), make_batch(), policy(segment=4)) <= without + 2 * stored + SMALL


_seen: list[Tensor] = []


class StoresOutside(Block):
    """Appends a tensor with its graph to a list that nobody puts back, in the recompute, too."""

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.up(self.norm(x)))
        (g,) = torch.autograd.grad(h.square().sum(), x, retain_graph=True)
        _seen.append(h.mean(0))
        return x + self.down(h) - 0.1 * g


def test_graph_of_a_recompute_that_somebody_holds_holds_no_values(monkeypatch: Any) -> None:
    """R23: its saved tensors are gone when the recompute ends."""
    monkeypatch.setitem(globals(), "_seen", [])
    model, x = make_chain(6, StoresOutside), make_batch()
    with ByteMeter(model.parameters()) as meter:
        with policy(segment=3):
            loss = model(x).sum()
        loss.backward()
        del loss
        stored = 12 * 2 * WIDE * 4
        assert len(_seen) == 12
        assert meter.live_bytes <= stored + 6 * BOUNDARY + SMALL  # a graph holds its leaf: the input of the recompute


class InnerGradient(Block):
    """Its recompute needs its own saved tensors for a while."""

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.up(self.norm(x)))
        (g,) = torch.autograd.grad(h.square().sum(), x, retain_graph=True)
        return x + self.down(h) - 0.1 * g


def test_recompute_with_a_gradient_inside_holds_nothing_at_its_end() -> None:
    """R23: the cells of the recompute's own graph are emptied."""
    model, x = make_chain(6, InnerGradient), make_batch()
    for _ in range(2):
        gc.disable()
        try:
            with ByteMeter(model.parameters()) as meter:
                with policy(segment=3):
                    loss = model(x).sum()
                loss.backward()
                del loss
                assert meter.live_bytes <= SMALL
        finally:
            gc.enable()
        model.zero_grad()


# ---- R24: size, not depth


def grid(m: Loop, x: Tensor) -> Tensor:
    """Every call takes the two before it: the walk grows with each call, its depth by one."""
    layers = iter(m.layers)
    a = next(layers)(x)
    b = next(layers)(a, x)
    for layer in layers:
        a, b = b, layer(b, a)
    return b


def tree(m: Loop, x: Tensor) -> Tensor:
    layers = iter(m.layers)
    row = [next(layers)(x) for _ in range(16)]
    while len(row) > 1:
        row = [next(layers)(row[i], row[i + 1]) for i in range(0, len(row), 2)]
    return row[0]


def two_towers(m: Loop, x: Tensor) -> Tensor:
    layers = iter(m.layers)
    y, z = x, x.flip(0)
    for _ in range(10):
        y, z = next(layers)(y), next(layers)(z)
    for layer in layers:
        y, z = layer(y, z), y
    return y


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("loop", [grid, tree, two_towers])
def test_walk_of_any_graph_runs_at_most_n_calls(loop: Any, n: int) -> None:
    """R24."""
    model = Loop([Marked(label=str(i)) for i in range(31)], loop)
    for _ in range(2):
        with policy(segment=n):
            loss = model(torch.randn(4, 8)).sum()
        with meters.log_calls() as log:
            loss.backward()
        assert longest_walk(log) <= n


def test_peak_of_a_tree_is_that_of_one_segment() -> None:
    """R24: by depth, the first recompute would run and store all 31 calls."""
    torch.manual_seed(0)
    model = Stem(Loop([Marked(WIDE, label=str(i)) for i in range(31)], tree), WIDE)
    x, n = make_batch(), 3

    def growth(made: Any) -> int:
        with ByteMeter(model.parameters()) as meter:
            with made:
                loss = model(x).sum()
            n_before = meter.live_bytes
            loss.backward()
            model.zero_grad()
            return meter.peak_bytes - n_before

    n_waiting = 16  # gradients of one row of the tree, each waiting for the call below it
    bound = n_waiting * BOUNDARY + n * (inner_bytes(Marked) + 2 * BOUNDARY) + 2 * BOUNDARY + SMALL
    assert growth(policy(segment=n)) <= bound < growth(policy(segment=31))


# ---- R25: several consumers


def heads(m: Loop, x: Tensor) -> list[Tensor]:
    for layer in m.layers[:4]:
        x = layer(x)
    return [head(x) for head in m.layers[4:]]


def u_net(m: Loop, x: Tensor) -> list[Tensor]:
    skips = []
    for layer in m.layers[:8]:
        x = layer(x)
        skips.append(x)
    for layer in m.layers[8:]:
        x = layer(x, skips.pop())
    return [x]


def encoder_decoder(m: Loop, x: Tensor) -> list[Tensor]:
    y = x.flip(0)
    for layer in m.layers[:8]:
        x = layer(x)
    for layer in m.layers[8:]:
        y = layer(y, x)
    return [y]


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("loop", [heads, u_net, encoder_decoder])
def test_output_with_several_consumers_is_kept_once_and_never_run_twice(loop: Any, n: int) -> None:
    """R25: 40 forwards for 12 calls, 26 for 16, 24 for 12 in the examples that found it."""
    model = Stem(Loop([Marked(WIDE, label=str(i)) for i in range(16)], loop), WIDE)
    x = make_batch()
    for _ in range(2):
        with meters.count_forwards() as counter, policy(segment=n):
            loss = torch.stack([out.sum() for out in model(x)]).sum()
        with meters.count_forwards() as again:
            loss.backward()
        assert set(counter.values()) == {1}
        assert max(again.values()) == 1, dict(again)


def test_output_with_eight_consumers_is_kept_once() -> None:
    """R25: in bytes, between forward and backward."""
    model = Stem(Loop([TanhLayer(WIDE, label=str(i)) for i in range(12)], heads), WIDE)
    x = make_batch()
    with ByteMeter(model.parameters()) as meter:
        with policy(segment=4):
            outs = model(x)
        live = meter.live_bytes - len(outs) * BOUNDARY
        torch.stack([out.sum() for out in outs]).sum().backward()
    assert live <= 2 * BOUNDARY + SMALL  # the trunk's input and its output


# ---- R26: values that nobody asks for


class PartialGradient:
    """A chain of 16 calls in one segment, and a gradient that goes only through the last of them."""

    def __init__(self, made: Any) -> None:
        model, inner = make_chain(16), inner_bytes(Block)
        self.x = make_batch()
        with ByteMeter(model.parameters()) as self.meter, made:
            self.last = model(self.x)
            self.before = self.meter.live_bytes
            torch.autograd.grad(self.last.sum(), model.body.layers[12].down.weight, retain_graph=True)
            assert self.meter.live_bytes > self.before + 10 * inner  # for the sake of the next gradient
            self.then()
            assert self.meter.live_bytes <= self.before + SMALL
            self.last.sum().backward()

    def then(self) -> None:
        raise NotImplementedError


def test_waiting_values_go_when_the_next_forward_begins() -> None:
    """R26: 95 saved tensors stayed as long as the graph."""

    class NextForward(PartialGradient):
        def then(self) -> None:
            stack(1, TanhLayer, WIDE)(self.x)

    NextForward(policy(segment=16))


def test_waiting_values_go_when_another_recompute_starts() -> None:
    """R26."""
    with policy(segment=1):
        other = stack(1, TanhLayer)(torch.randn(4, 8)).sum()

    class AnotherRecompute(PartialGradient):
        def then(self) -> None:
            other.backward()

    AnotherRecompute(policy(segment=16))


def test_waiting_values_go_when_the_policy_is_left() -> None:
    """R26."""
    made = policy(segment=16)

    class Leaves(PartialGradient):
        def then(self) -> None:
            with made:
                pass

    Leaves(made)


def test_layer_by_layer_gradients_run_each_call_twice() -> None:
    """R26: clearing at once would make this quadratic. Only the edges of the graph are held, no hidden state."""
    model, x = make_chain(16), make_batch()
    x = model.stem(x)
    edges = [get_gradient_edge(x)]
    with meters.count_forwards() as counter, policy(segment=8):
        for layer in model.body.layers:
            x = layer(x)
            edges.append(get_gradient_edge(x))
        grad = torch.ones_like(x)
        del x
        for i in reversed(range(16)):
            (grad,) = torch.autograd.grad(edges[i + 1], edges[i], grad, retain_graph=True)
    assert set(counter.values()) == {2}


# ---- R27: lifetimes


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("make", [InPlaceOnInputLayer, TanhLayer, Block])
@pytest.mark.parametrize("ends", ["with backward", "without"])
def test_calls_are_freed_with_their_graph_and_without_the_collector(ends: str, make: Any, n: int) -> None:
    """R27, R1: a kept object with its graph would close a cycle through C++ that no collector sees."""
    model, inputs = Stem(stack(5, make)), []
    gc.disable()
    try:
        with policy(segment=n):
            for _ in range(3):
                x = model.stem(torch.randn(4, 8))
                inputs.append(weakref.ref(x.untyped_storage()))
                y = model.body(x)
                if ends == "with backward":
                    y.sum().backward()
                del x, y
            assert [storage() for storage in inputs] == [None] * 3  # still inside the policy
    finally:
        gc.enable()


# ---- R28: what is alive anyway


def test_hidden_states_that_somebody_holds_serve_as_boundaries() -> None:
    """R28: 6.98 instead of 6.10 MiB in the example that found it."""

    def peak_above_held(n: int) -> int:
        model, x = make_chain(12), make_batch()
        with ByteMeter(model.parameters()) as meter:
            held = [model.stem(x)]
            with policy(segment=n):
                for layer in model.body.layers:
                    held.append(layer(held[-1]))
            before = meter.live_bytes
            held[-1].sum().backward()
            assert before <= 13 * BOUNDARY + SMALL
            return meter.peak_bytes

    assert peak_above_held(4) <= peak_above_held(1) + SMALL


@pytest.mark.parametrize("n", [1, 4])
def test_frozen_layers_are_not_recomputed(n: int) -> None:
    """R28: a call that saved nothing has nothing to bring back, and its output is a boundary."""
    model = Stem(stack(8, Marked, WIDE), WIDE)
    model.stem.requires_grad_(False)
    for layer in model.body.layers[:4]:
        layer.requires_grad_(False)
    for _ in range(2):
        with policy(segment=n):
            loss = model(make_batch()).sum()
        with meters.count_forwards() as counter:
            loss.backward()
        assert dict(counter) == {str(i): 1 for i in range(4, 8)}


class AddsOne(Layer):
    """Saves nothing at all."""

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        meters.tick(self.label)
        return x + 1


def test_call_that_saved_nothing_is_run_again_for_nobody() -> None:
    """R28: neither for itself, nor, its output being a boundary, for the layer behind it."""
    layers = [AddsOne(label="adds") if i % 2 else TanhLayer(WIDE, label="tanh") for i in range(8)]
    model = Stem(Loop(layers, lambda m, x: [x := layer(x) for layer in m.layers][-1]), WIDE)
    with policy(segment=8):
        loss = model(make_batch()).sum()
    with meters.count_forwards() as counter:
        loss.backward()
    assert counter["tanh"] == 4
    assert counter["adds"] == 0


# ---- R29: the bill


class Masked(Block):
    @checkpointable
    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        meters.tick(self.label)
        return x + self.down(functional.gelu(self.up(self.norm(x)))) * mask.sigmoid()


class MadeInside(Block):
    """Leaves that it makes itself: a dequantised weight, a dropout mask, a restart."""

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.up(self.norm(x)))
        with torch.no_grad():
            weight = (self.down.weight * 16).round() / 16
            keep = (torch.rand_like(h) > 0.1).float()
        start = (h * keep).detach()
        return x + functional.linear(h * keep, weight) + functional.linear(start.sin() * h, weight)


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_made_inside_a_call_is_dropped(n: int) -> None:
    """R29, R8: only parameters and what existed at entry are alive anyway."""
    live = live_after_forward(make_chain(12, MadeInside), make_batch(), policy(segment=n))
    assert live <= 12 // n * BOUNDARY + SMALL


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_shared_mask_is_kept_once_and_one_made_for_each_layer_is_kept_for_each(n: int, needs_grad: bool) -> None:
    """R29, R4: per-layer keywords are not in the formula of a segment."""
    x = make_batch()

    def shared(m: Loop, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask * 2
        for layer in m.layers:
            x = layer(x, mask=mask)
        return x

    def own(m: Loop, x: Tensor, mask: Tensor) -> Tensor:
        for i, layer in enumerate(m.layers):
            x = layer(x, mask=mask * i)
        return x

    mask = torch.rand(ROWS, WIDE, requires_grad=needs_grad)
    for loop, n_masks in ((shared, 1), (own, 12)):
        model, made = Stem(Loop([Masked(WIDE) for _ in range(12)], loop), WIDE), policy(segment=n)
        expected = (12 // n + n_masks) * BOUNDARY
        first = live_after_forward(model, x, made, mask)
        assert first <= expected + BOUNDARY + SMALL  # a copy of the mask, until it is known that nobody changes it
        live = live_after_forward(model, x, made, mask)
        assert abs(live - expected) <= SMALL, (loop.__name__, live / BOUNDARY)


@pytest.mark.parametrize("kind", ["data", "computed", "returned by a layer"])
@pytest.mark.parametrize("n", [1, 4])
def test_outer_hooks_pack_a_side_input_once(n: int, kind: str) -> None:
    """R29, R3: an offload hook around the step packed it 12 times for 12 calls; keyword arguments are seen, too."""
    model, made = Stem(stack(12, Masked, WIDE), WIDE), policy(segment=n)
    first = TanhLayer(WIDE)
    for _ in range(2):
        mask, packed = torch.rand(ROWS, WIDE), []
        if kind != "data":
            mask = mask.requires_grad_() * 2

        def pack(tensor: Tensor, packed: list[int] = packed) -> Tensor:
            packed.append(tensor.untyped_storage().data_ptr())
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), made:
            if kind == "returned by a layer":
                mask = first(mask)
            y = model(make_batch(), mask=mask)
        y.sum().backward()
        assert packed.count(mask.untyped_storage().data_ptr()) == 1
        assert len(packed) <= 1 + 12 // n + 3  # the mask, the boundaries, what the stem saves, the layer's input


nothing = contextlib.nullcontext


def test_the_bounds_of_this_file_are_not_met_by_the_plain_run() -> None:
    """What is asserted above of a policy is false without one."""
    assert live_after_forward(make_chain(12, MadeInside), make_batch(), nothing()) > 24 * BOUNDARY
    assert step_peak(make_chain(12), make_batch(), nothing()) > step_peak(
        make_chain(12), make_batch(), policy(segment=4)
    )
