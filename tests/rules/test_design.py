"""How calls are put together, and what a recompute is given (R1–R10)."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import gc
import re
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from tests.support import meters
from tests.support.chains import BOUNDARY, ROWS, WIDE, inner_bytes, live_after_forward, make_batch, make_chain
from tests.support.layers import DIM, Block, CrossLayer, Layer, Loop, Stack, Stem, TanhLayer, batch, stack
from tests.support.meters import ByteMeter, MatmulCounter
from tests.support.oracle import forward_backward, total
from tests.support.subject import ENGINE, checkpointable, policy

ours = pytest.mark.skipif(ENGINE != "ckptdeco", reason="asks for what ckptdeco promises")
if ENGINE == "ckptdeco":
    import ckptdeco
SMALL = BOUNDARY // 8


def actions() -> str:
    """Of the last pass: S, K or D for each call."""
    return "".join({"SAVE": "S", "DROP_KEEP": "K", "DROP": "D"}[c.action.name] for c in ckptdeco.explain().calls)


# ---- R1: no segment object


@ours
@pytest.mark.parametrize("n", [1, 3, 6])
def test_memory_falls_as_backward_proceeds_without_the_collector(n: int) -> None:
    """R1: an object that lists the calls of a segment would keep every boundary to the end."""
    model, alive, x = make_chain(12), [], make_batch()

    def note(_: Tensor) -> None:
        model.zero_grad()
        alive.append(meter.live_bytes)

    gc.disable()
    try:
        with ByteMeter(model.parameters()) as meter:
            with policy(segment=n):
                y = model(x)
            for i in range(0, 12, n):  # the backward of a segment's first call has ended
                model.body.layers[i].norm.weight.register_post_accumulate_grad_hook(note)
            y.sum().backward()
    finally:
        gc.enable()
    alive.reverse()  # by segment, the first one last freed
    for i, live in enumerate(alive):
        assert live <= (i + 5) * BOUNDARY, [a / BOUNDARY for a in alive]
    assert alive[-1] - alive[0] >= (12 // n - 2) * BOUNDARY  # one boundary less for each segment


@ours
@pytest.mark.parametrize("make", [TanhLayer, Block, CrossLayer])
def test_call_goes_with_its_graph_without_the_collector(make: Any) -> None:
    """R1: strong references lead only backwards in time."""
    from ckptdeco.engine.call import Call

    model = stack(6, make)
    n_before = sum(isinstance(o, Call) for o in gc.get_objects())
    gc.disable()
    try:
        with policy(segment=3):
            x = y = batch()
            for layer in model.layers:
                y = layer(y, x) if make is CrossLayer else layer(y)
        calls = [weakref.ref(o) for o in gc.get_objects() if isinstance(o, Call)]
        assert len(calls) >= 6
        del y
        assert sum(isinstance(o, Call) for o in gc.get_objects()) == n_before
    finally:
        gc.enable()


# ---- R2: recognition


class Identity(torch.autograd.Function):
    """What sharding libraries put between layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@ours
@pytest.mark.parametrize("between", [lambda x: x, lambda x: x.view_as(x), lambda x: x[:], Identity.apply])
def test_output_is_recognised_as_itself_and_through_identities(between: Any) -> None:
    """R2."""
    model, x = stack(6), batch()
    with policy(segment=3), meters.count_forwards() as counter:
        for layer in model.layers:
            x = between(layer(x))
        assert actions() == "KDDKDD"
        assert [call.kept_bytes > 0 for call in ckptdeco.explain().calls] == [True, False, False] * 2
        total(x).backward()
    assert set(counter.values()) == {2}


@ours
@pytest.mark.parametrize(
    ("between", "name"),
    [
        (lambda x: x + 0.1, "Add"),
        (lambda x: x.clone(), "Clone"),
        (lambda x: x.flip(0), "Flip"),
        (lambda x: x.view(2, -1, DIM)[:, :2].reshape(-1, DIM), "Reshape|UnsafeView|View|Slice"),
        (lambda x: x.mul_(2), "Mul"),
    ],
)
def test_what_was_computed_between_layers_is_a_boundary_and_is_named(between: Any, name: str) -> None:
    """R2: right, merely kept; the usual reason why nothing was saved."""
    layers, x = [Block() for _ in range(4)], batch()
    with policy(segment=4):
        for layer in layers:
            x = between(layer(x))
    calls = ckptdeco.explain().calls
    assert all(call.kept_bytes for call in calls)
    assert all(re.search(name, call.why) for call in calls[1:]), [call.why for call in calls]
    total(x).backward()


# ---- R3: arguments


@dataclasses.dataclass
class State:
    h: Tensor
    cache: list[Tensor]
    n_made: int = dataclasses.field(default=0)

    def __post_init__(self) -> None:
        assert not (ENGINE == "ckptdeco" and ckptdeco.is_recomputing()), "the constructor ran in a recompute"


class TakesTree(Layer):
    """Tensors in keywords, lists, dicts and dataclasses; appends to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, state: State, pairs: list[dict[str, Tensor]], *, scale: Tensor) -> Tensor:
        meters.tick(self.label)
        state.cache.append(state.h.detach())
        h = torch.tanh(self.linear(state.h)) * scale
        return h + sum(p["a"] * p["b"].sin() for p in pairs) / len(state.cache)


def tree_program(model: Any, inputs: Any, context: Any) -> Any:
    x, a, b, scale = inputs
    cache: list[Tensor] = []
    with context():
        for layer in model.layers:
            x = layer(State(x, cache), [{"a": a, "b": b}, {"a": b, "b": x}], scale=scale)
    total(x).backward()
    return x, list(cache)


def test_tensors_in_any_argument_get_their_gradient(exact: Any) -> None:
    """R3: forward runs on the caller's own objects, a recompute on copies of the containers as they were at entry."""
    exact(lambda: Stack([TakesTree() for _ in range(5)]), tree_program, lambda: tuple(batch() for _ in range(4)))


@ours
@pytest.mark.parametrize(("index", "name"), [(1, "pairs[0]['a']"), (2, "pairs[0]['b']"), (3, "scale")])
@pytest.mark.parametrize("n", [1, 4])
def test_argument_changed_before_backward_is_named(n: int, index: int, name: str) -> None:
    """R3: the version check finds it, wherever the tensor stands."""
    model = Stack([TakesTree() for _ in range(2)])
    inputs = [batch(requires_grad=False) for _ in range(4)]
    with policy(segment=n):
        loss = total(model.layers[0](State(inputs[0], []), [{"a": inputs[1], "b": inputs[2]}] * 2, scale=inputs[3]))
    inputs[index].add_(1)
    with pytest.raises(ckptdeco.CheckpointError) as caught:
        loss.backward()
    assert f"input {name} of" in str(caught.value)


def test_outer_hooks_see_what_is_kept(exact: Any) -> None:
    """R3: offloading around the step moves every kept tensor, those in keywords, too, and brings them back."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(), context():
            return tree_program(model, inputs, contextlib.nullcontext)

    exact(lambda: Stack([TakesTree() for _ in range(5)]), program, lambda: tuple(batch() for _ in range(4)))


@ours
def test_outer_hooks_are_given_the_tensors_in_keywords() -> None:
    """R3."""
    scale, packed = torch.rand(4, DIM), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.untyped_storage().data_ptr())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), policy(segment=1):
        loss = total(TakesTree()(State(batch(), []), [{"a": batch(), "b": batch()}], scale=scale))
    assert scale.untyped_storage().data_ptr() in packed
    loss.backward()


# ---- R4: side inputs


class Biased(Layer):
    """T5: the first layer makes a position bias, which it returns, and all others are given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    @checkpointable
    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = torch.tanh(self.make(x))
        return x + functional.gelu(self.linear(x) * bias), bias


def _position_bias(m: Loop, x: Tensor) -> Tensor:
    bias = None
    for layer in m.layers:
        x, bias = layer(x, bias)
    return x


def _position_bias_by_keyword(m: Loop, x: Tensor) -> Tensor:
    x, bias = m.layers[0](x)
    for layer in m.layers[1:]:
        x, _ = layer(x, bias=bias)
    return x


def _mask(m: Loop, x: Tensor) -> Tensor:
    mask = torch.rand(ROWS, WIDE)
    for layer in m.layers:
        x, _ = layer(x, mask)
    return x


def _rotary(m: Loop, x: Tensor) -> Tensor:
    table = m.table(x).cos()
    for layer in m.layers:
        x, _ = layer(x, table)
    return x


SIDE = [_position_bias, _position_bias_by_keyword, _mask, _rotary]


@pytest.mark.parametrize("loop", SIDE, ids=lambda f: f.__name__.strip("_"))
def test_side_input_is_exact(loop: Any, exact: Any) -> None:
    """R4."""
    build = lambda: Stem(Loop([Biased() for _ in range(6)], loop, table=nn.Linear(WIDE, WIDE)), WIDE)  # noqa: E731
    exact(build, forward_backward, lambda: (torch.randn(ROWS, WIDE),), steps=2)


@ours
@pytest.mark.parametrize("loop", SIDE, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("n", [1, 3])
def test_side_input_is_kept_once(n: int, loop: Any) -> None:
    """R4: not once a layer, nor once a segment."""
    model = Stem(Loop([Biased() for _ in range(12)], loop, table=nn.Linear(WIDE, WIDE)), WIDE)
    made = policy(segment=n)
    live_after_forward(model, make_batch(), made)
    live = live_after_forward(model, make_batch(), made)
    n_of_table = {_rotary: 1}.get(loop, 0)  # what the cosine saves outside of any layer
    assert live <= (12 // n + 1 + n_of_table) * BOUNDARY + SMALL


# ---- R6: who owns what happens inside


class Outer(Layer):
    def __init__(self) -> None:
        super().__init__("outer")
        self.inner = stack(3, TanhLayer)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        meters.tick(self.label)
        return x + self.inner(x)


@pytest.mark.parametrize("nested", [False, True])
def test_decorated_calls_inside_decorated_calls_are_exact(nested: bool, exact: Any) -> None:
    """R6."""
    made = policy(segment=2, nested=nested)

    def program(model: Any, inputs: Any, context: Any) -> Any:
        return forward_backward(model, inputs, (lambda: made) if context is not contextlib.nullcontext else context)

    exact(lambda: Stem(Stack([Outer() for _ in range(4)])), program, steps=3)


@ours
def test_outermost_decorated_call_owns_what_happens_inside() -> None:
    """R6: calls inside are plain: neither reported, nor recomputed by themselves; with nested=True they are."""
    # Nested, the third call is only run for itself: the call around it stops where its input exists (R10).
    for nested, n_calls, n_inner in ((False, 4, [8, 8, 8]), (True, 16, [12, 12, 8])):
        model = Stem(Stack([Outer() for _ in range(4)]))
        with meters.count_forwards() as counter:
            with policy(segment=1, nested=nested):
                loss = total(model(batch()))
                assert len(ckptdeco.explain().calls) == n_calls
            loss.backward()
        assert counter["outer"] == 8
        assert [counter[str(i)] for i in range(3)] == n_inner


@ours
@pytest.mark.parametrize(
    ("options", "n_recomputed"),
    [({"only": Outer}, 4), ({"only": TanhLayer}, 12), ({"skip": TanhLayer}, 4), ({"skip": Outer}, 12)],
    ids=str,
)
def test_calls_inside_count_as_matched_or_seen_with_those_around(options: Any, n_recomputed: int) -> None:
    """R6: a policy that matches only inner layers, or only outer ones, has matched something."""
    model = Stem(Stack([Outer() for _ in range(4)]))
    with policy(segment=1, nested=True, **options):
        loss = total(model(batch()))
        loss.backward()
        assert sum(call.n_recomputed > 0 for call in ckptdeco.explain().calls) == n_recomputed
    none = policy(segment=1, nested=True, only="nothing")
    with pytest.raises(ckptdeco.PolicyError, match="none of the 16 decorated calls matched"), none:
        model(batch())


# ---- R7: frozen at forward

_variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class ReadsContext(Layer):
    """Reads a context variable and autocast, which belong to whoever runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(DIM, DIM), TanhLayer()

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        meters.tick("reads")
        return torch.tanh(self.inner(self.linear(x)).float() * _variable.get())


def backward_elsewhere(model: Any, inputs: Any, context: Any, where: str) -> Any:
    token = _variable.set(0.5)
    with context():
        loss = total(out := model(*inputs))
    _variable.reset(token)

    def backward() -> None:
        loss.backward()

    if where == "other thread":
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    elif where == "after the block":
        backward()
    elif where == "another policy":
        with policy(segment=1, nested=True):
            backward()
    elif where == "policy(None)":
        with policy(None):
            backward()
    elif where == "no_grad, autocast, another dtype":
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            torch.set_default_dtype(torch.float64)
            try:
                backward()
            finally:
                torch.set_default_dtype(torch.float32)
    else:
        contextvars.Context().run(backward)
    return out


PLACES = [
    "other thread", "after the block", "another policy", "policy(None)", "no_grad, autocast, another dtype",
    "empty context",
]  # fmt: skip


@pytest.mark.parametrize("where", PLACES)
def test_backward_reads_nothing_of_where_it_runs(where: str, exact: Any) -> None:
    """R7: all that a recompute needs was frozen into the call."""
    build = lambda: Stem(Stack([ReadsContext() for _ in range(4)]))  # noqa: E731
    exact(build, lambda m, i, c: backward_elsewhere(m, i, c, where), steps=3)


@ours
@pytest.mark.parametrize("where", PLACES)
def test_schedule_of_backward_is_that_of_forward(where: str) -> None:
    """R7: whatever policy is active in backward, inner layers stay plain and walks are as they were planned."""
    model = Stem(Stack([ReadsContext() for _ in range(4)]))
    with meters.count_forwards() as counter:
        backward_elsewhere(model, (batch(),), lambda: policy(segment=4, levels=2), where)
    assert counter["reads"] == 4 + 4 + 3
    assert counter["tanh"] == counter["reads"]


# ---- R8: parameters stay


class OnlyWeights(Layer):
    """All that its backward needs is its weight."""

    def __init__(self, *, freeze: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM).requires_grad_(not freeze)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        meters.tick("weights")
        return self.linear(x) + 1


@ours
@pytest.mark.parametrize("n", [1, 4])
def test_what_a_call_saves_of_its_parameters_is_not_recomputed(n: int) -> None:
    """R8: they are alive anyway; a frozen linear layer saves nothing else."""
    for freeze, n_forwards in ((True, 4), (False, 8)):
        model = Stem(Stack([OnlyWeights(freeze=freeze) for _ in range(4)]))
        with meters.count_forwards() as counter:
            with policy(segment=n):
                loss = total(model(batch()))
            loss.backward()
        assert counter["weights"] == n_forwards


@ours
@pytest.mark.parametrize("freeze", [True, False])
def test_parameter_changed_before_backward_is_an_error_as_in_plain(freeze: bool) -> None:
    """R8: their version is compared also where nothing is recomputed."""
    for made in (contextlib.nullcontext(), policy(segment=1), policy(segment=4)):
        model = Stem(Stack([OnlyWeights(freeze=freeze) for _ in range(3)]))
        with made:
            loss = total(model(batch()))
        with torch.no_grad():
            model.body.layers[1].linear.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- R9: handed out and dropped


class Attention(Layer):
    """SDPA saves its own output; a hook that hands out the recompute's tensor itself closes a cycle with it."""

    def __init__(self, dim: int = DIM, label: str = "attention") -> None:
        super().__init__(label)
        self.linear = nn.Linear(dim, 3 * dim)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        meters.tick(self.label)
        q, k, v = self.linear(x)[None, None].chunk(3, -1)
        return x + functional.scaled_dot_product_attention(q, k, v)[0, 0]


@ours
@pytest.mark.parametrize("make", [Attention, TanhLayer, Block])
@pytest.mark.parametrize("n", [1, 3])
def test_recomputed_tensors_are_gone_when_they_were_used(n: int, make: Any) -> None:
    """R9: after each backward of a retained graph, memory is where it was before, without the collector."""
    model, x = make_chain(6, make), make_batch()
    gc.disable()
    try:
        with ByteMeter(model.parameters()) as meter:
            with policy(segment=n):
                loss = model(x).sum()
            before = meter.live_bytes
            for _ in range(3):
                loss.backward(retain_graph=True)
                assert meter.live_bytes <= before + SMALL
            del loss
            model.zero_grad()
            assert meter.live_bytes <= SMALL
    finally:
        gc.enable()


@ours
@pytest.mark.parametrize("n", [1, 3])
def test_each_backward_of_a_retained_graph_recomputes_again(n: int) -> None:
    """R9: and no more than that."""
    model = Stem(stack(6, Attention))
    with policy(segment=n):
        loss = total(model(batch()))
    with meters.count_forwards() as counter:
        for k in range(1, 4):
            loss.backward(retain_graph=True)
            assert set(counter.values()) == {k}


def test_retained_graphs_are_exact(exact: Any) -> None:
    """R9."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            loss = total(out := model(*inputs))
        loss.backward(retain_graph=True)
        loss.backward()
        return out

    exact(lambda: Stem(stack(5, Attention)), program)


# ---- R10: early stop


class HasTail(Layer):
    """Three matrix products, of which the last one's result is not saved, and code behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(DIM, DIM) for _ in range(3))

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        h = self.three(torch.sin(self.two(torch.sin(self.one(x)))))
        meters.tick("tail")
        return h + x


@ours
@pytest.mark.parametrize(
    ("options", "n_matmuls", "n_tails"),
    [
        ({"segment": 1}, 4 * 2, 0),
        ({"segment": 4}, 3 * 3 + 2, 3),
        ({"segment": 1, "early_stop": False}, 4 * 3, 4),
        ({"segment": 4, "levels": 2}, 3 * 3 + 4 * 2, 3),
    ],
    ids=str,
)
def test_recompute_ends_with_the_last_tensor_that_backward_needs(options: Any, n_matmuls: int, n_tails: int) -> None:
    """R10: the calls before the last of a walk run to their end, since their outputs are needed."""
    model = Stem(Stack([HasTail() for _ in range(4)]))

    def matmuls(made: Any) -> int:
        for _ in range(3):
            with made:
                loss = total(model(batch()))
            with MatmulCounter() as counter, meters.count_forwards() as tails:
                loss.backward()
        assert tails["tail"] == (n_tails if made.is_off is False else 0)
        return counter.n_matmuls

    assert matmuls(policy(**options)) - matmuls(policy(None)) == n_matmuls


@ours
def test_unused_output_ends_the_recompute_earlier() -> None:
    """R10: it is the last tensor that is still asked for that counts."""

    class TwoOutputs(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        @checkpointable
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.sin(self.one(x))
            meters.tick("second")
            return h, torch.sin(self.two(x)).exp()

    layer = TwoOutputs()
    with policy(segment=1):
        h, unused = layer(batch())
    del unused
    with meters.count_forwards() as counter:
        total(h).backward()
    assert counter["second"] == 0


def test_bytes_of_a_block_are_what_these_tests_take_them_for() -> None:
    assert inner_bytes(Block) > 5 * BOUNDARY
