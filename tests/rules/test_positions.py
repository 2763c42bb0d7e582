"""Where a call stands in its chain, and that nothing but the choice of calls depends on it (R5, R36–R38)."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import meters
from tests.support.chains import BOUNDARY, WIDE, live_after_forward, make_batch, step_peak
from tests.support.layers import DIM, Block, Layer, Loop, Stack, Stem, TanhLayer, batch, stack
from tests.support.oracle import assert_same, forward_backward, total
from tests.support.subject import ENGINE, checkpointable, policy

if ENGINE != "ckptdeco":
    pytest.skip("asks for ckptdeco's positions", allow_module_level=True)

import ckptdeco
from ckptdeco import Policy
from ckptdeco.schedule.actions import Action


def positions() -> list[int]:
    """Of the last pass, in the order of its calls."""
    return [call.position for call in ckptdeco.explain().calls]


def actions() -> str:
    """Of the last pass: S, K or D for each call."""
    return "".join({"SAVE": "S", "DROP_KEEP": "K", "DROP": "D"}[c.action.name] for c in ckptdeco.explain().calls)


# ---- R36, R5: by the graph


def _adds(m: Loop, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x) + 0.1
    return x


def _drops_scales_views(m: Loop, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = functional.dropout(layer(x), 0.1).mul(0.9).view(2, -1, DIM).view(-1, DIM)
    return x


def _shared(m: Loop, x: Tensor) -> Tensor:
    for _ in range(6):
        x = functional.dropout(m.layers[0](x), 0.1)
    return x


def _restarts(m: Loop, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        x = layer(x.detach() if i == 4 else x)
    return x


def _two_towers(m: Loop, x: Tensor) -> Tensor:
    y, z = x, x.flip(0)
    for one, two in zip(m.layers[:3], m.layers[3:], strict=True):
        y, z = one(y), two(z)
    return y + z


def _siamese(m: Loop, x: Tensor) -> Tensor:
    outs = []
    for part in (x, x * 2):
        for layer in m.layers[:3]:
            part = layer(part)
        outs.append(part)
    return outs[0] - outs[1]


def _six_inputs(m: Loop, x: Tensor) -> Tensor:
    return sum((m.layers[0](x * i) for i in range(6)), torch.zeros(()))


def _merges(m: Loop, x: Tensor) -> Tensor:
    y = m.layers[1](m.layers[0](x))
    z = m.layers[2](x)
    y = m.layers[3](y + z)
    return m.layers[5](m.layers[4](y))


LOOPS = {
    _adds: [0, 1, 2, 3, 4, 5],
    _drops_scales_views: [0, 1, 2, 3, 4, 5],
    _shared: [0, 1, 2, 3, 4, 5],
    _restarts: [0, 1, 2, 3, 0, 1],
    _two_towers: [0, 0, 1, 1, 2, 2],
    _siamese: [0, 1, 2, 0, 1, 2],
    _six_inputs: [0] * 6,
    _merges: [0, 1, 0, 2, 3, 4],
}


@pytest.mark.parametrize("has_stem", [True, False])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__.strip("_"))
def test_positions_come_from_the_graph(loop: Any, has_stem: bool) -> None:
    """R36, R5: by time, an operation between layers and a shared layer would look like something else."""
    model: nn.Module = Loop([TanhLayer() for _ in range(6)], loop)
    model = Stem(model) if has_stem else model
    with policy(segment=2):
        for _ in range(2):  # in one block
            total(model(batch())).backward()
            assert positions() == LOOPS[loop]


@pytest.mark.parametrize("loop", [_adds, _drops_scales_views, _shared])
def test_every_other_call_is_recomputed_across_operations_between_layers(loop: Any) -> None:
    """R36: else every=n recomputes all, since each call looks like the first of a chain."""
    model = Loop([TanhLayer() for _ in range(6)], loop)
    with policy(every=2):
        total(model(batch())).backward()
    assert actions() == "KSKSKS"


@pytest.mark.parametrize("how", ["accumulates", "two forwards, one backward", "evaluates between"])
def test_each_forward_pass_begins_at_position_0(how: str) -> None:
    """R5: also within one block that spans many passes."""
    model = stack(4)
    with policy(segment=3):
        for _ in range(2):
            if how == "accumulates":
                for _ in range(2):
                    total(model(batch())).backward()
                    assert positions() == [0, 1, 2, 3]
            elif how == "evaluates between":
                total(model(batch())).backward()
                with torch.no_grad():
                    model(batch())
                model(batch(requires_grad=False))  # with grad, and no backward
                total(model(batch())).backward()
                assert positions()[-4:] == [0, 1, 2, 3]
            else:
                loss = total(model(batch())) + total(model(batch()))
                loss.backward()
                assert positions() == [0, 1, 2, 3] * 2


def _long_way(n_operations: int) -> Any:
    def loop(m: Loop, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x)
            for _ in range(n_operations):
                x = x * 1.01
        return x

    return loop


def test_search_upstream_is_bounded() -> None:
    """R36: some dozens of nodes; further away, a new chain begins, and results are right all the same."""
    made = policy(segment=2)
    for n_operations, expected in ((10, [0, 1, 2]), (200, [0, 0, 0])):
        model = Loop([TanhLayer() for _ in range(3)], _long_way(n_operations))
        assert_same(lambda model=model: model, forward_backward, lambda: (batch(),), lambda: made, steps=2)
        assert positions() == expected


def test_a_kept_output_keeps_no_call_of_its_chain_alive() -> None:
    """R36, R15: the stamp is a token."""
    model, inputs, outputs = Stem(stack(5)), [], []
    gc.disable()
    try:
        with policy(segment=2):
            for _ in range(3):
                x = model.stem(batch())
                inputs.append(weakref.ref(x.untyped_storage()))
                y = model.body(x)
                total(y).backward()
                outputs.append(y)  # as a list of logits or losses does
                del x, y
        assert [storage() for storage in inputs] == [None] * 3
    finally:
        gc.enable()


# ---- R37: position decides which, never whether it is right


class AnyAnswer(Policy):
    """Answers each question at random."""

    def at_forward(self, site: Any) -> Any:
        return random.choice(list(Action))

    def at_backward(self, first: int, target: int) -> Any:
        return [random.choice(list(Action)) for _ in range(target - first)] + [Action.SAVE]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__.strip("_"))
def test_any_answer_at_any_position_is_exact(loop: Any, nested: bool) -> None:
    """R37."""
    made = AnyAnswer(nested=nested)
    state = random.Random(0).getstate()

    def program(model: Any, inputs: Any, context: Any) -> Any:
        outside = random.getstate()
        nonlocal state
        random.setstate(state)
        out = forward_backward(model, inputs, context)
        state = random.getstate()
        random.setstate(outside)
        return out

    build = lambda: Stem(Loop([Block(p=0.1) for _ in range(6)], loop))  # noqa: E731
    assert_same(build, program, lambda: (batch(),), lambda: made, steps=4)


OPTIONS = [{"segment": "sqrt"}, {"segment": "auto"}, {"levels": "log"}, {"segment": 2, "keep_last": 2}, {"every": 2}]


def _stochastic_depth(m: Loop, x: Tensor) -> Tensor:
    for layer in m.layers:
        if torch.rand(()).item() > 0.4:
            x = layer(x) * 1.1
    return x


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_stochastic_depth_is_exact(options: Any) -> None:
    """R37: the chain has another length and other layers in each step."""
    made = policy(**options)
    build = lambda: Stem(Loop([Block(p=0.1) for _ in range(8)], _stochastic_depth))  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), lambda: made, steps=6)


def _first(n: int) -> Any:
    def loop(m: Loop, x: Tensor) -> Tensor:
        for layer in m.layers[:n]:
            x = layer(x)
        return x

    return loop


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_chain_that_is_longer_than_the_last_one_costs_no_more_than_a_segment_of_one(options: Any) -> None:
    """R37: where nothing is known, each call is recomputed alone and keeps its input."""
    model, x = Stem(Loop([Block(WIDE) for _ in range(16)], _first(4)), WIDE), make_batch()
    made = policy(**options)
    for _ in range(3):
        live_after_forward(model, x, made)
    model.body.loop = _first(16)
    live = live_after_forward(model, x, made)
    stored = 2 * (live_after_forward(model, x, policy(None)) // 16) if "keep_last" in options else 0
    assert live <= 16 * BOUNDARY + stored + BOUNDARY // 8


def test_keep_last_goes_by_the_last_length_of_this_chain_and_errs_to_dropping() -> None:
    """R37."""
    model, made = Loop([TanhLayer() for _ in range(8)], _first(6)), policy(segment=2, keep_last=2)
    seen = []
    for n in (6, 6, 4, 8, 8, 5):
        model.loop = _first(n)
        with made:
            loss = total(model(batch()))
        loss.backward()
        seen.append(actions())
    assert seen == ["KDKDKD", "KDKDSS", "KDKD", "KDSSKKKK", "KDKDKDSS", "KDKDK"]


def test_another_chain_of_the_same_layers_does_not_count() -> None:
    """R37: what is learnt is keyed by the layer that the chain begins with."""
    model, made = stack(8), policy(segment=2, keep_last=2)

    def step(layers: Any) -> str:
        with made:
            x = batch()
            for layer in layers:
                x = layer(x)
        total(x).backward()
        return actions()

    assert [step(model.layers) for _ in range(2)][-1] == "KDKDKDSS"
    assert [step(model.layers[1:]) for _ in range(2)] == ["KDKDKDK", "KDKDKSS"]
    assert step(model.layers) == "KDKDKDSS"


def test_peak_where_no_chain_goes_on_is_that_of_segments_of_one() -> None:
    """R37: the byte bound is that of segments of one where no chain goes on."""
    model = Stem(Loop([Block(WIDE) for _ in range(8)], _adds), WIDE)
    bound = step_peak(model, make_batch(), policy(segment=1)) + BOUNDARY // 8
    assert step_peak(model, make_batch(), policy(segment=4)) <= bound


# ---- R38: an exception ends the pass


class Fails(Layer):
    """Fails when it is told to."""

    fail = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        meters.tick("fails")
        h = torch.tanh(self.linear(x))
        if Fails.fail:
            raise ValueError("on purpose")
        return h * x


def failing(n_before: int = 3) -> Stem:
    return Stem(Stack([*[Block() for _ in range(n_before)], Fails(), Block()]))


@pytest.fixture
def fails(monkeypatch: Any) -> Any:
    return lambda on: monkeypatch.setattr(Fails, "fail", on)


@pytest.mark.parametrize("n", [1, 4])
def test_nothing_is_alive_after_an_exception_in_forward(n: int, fails: Any) -> None:
    """R38: inside the policy, with the collector off; a traceback may keep tensors, the engine must not."""
    model, storages = failing(), []
    for layer in model.body.layers:
        layer.register_forward_pre_hook(lambda m, args: storages.append(weakref.ref(args[0].untyped_storage())))
    gc.disable()
    try:
        with policy(segment=n):
            fails(True)
            try:
                model(batch())
            except ValueError:
                pass
            assert len(storages) == 4
            assert [storage() for storage in storages] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("n", [1, 4])
def test_pass_after_an_exception_begins_anew(n: int, fails: Any) -> None:
    """R38: also while the traceback of the failed one is held, and with layers that were decorated inside."""
    made, held = policy(segment=n, nested=True), []

    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            fails(True)
            with pytest.raises(ValueError, match="on purpose") as caught:
                model(*inputs)
            held.append(caught)
            fails(False)
            out = model(*inputs)
        total(out).backward()
        return out

    assert_same(failing, program, lambda: (batch(),), lambda: made)
    assert positions()[-5:] == [0, 1, 2, 3, 4]


def test_call_that_failed_is_no_frame_for_later_ones(fails: Any) -> None:
    """R38: later calls are no nested calls of it, so they are checkpointed, and twice run in all."""
    from ckptdeco.engine.running import running

    model = failing()
    with policy(segment=2):
        fails(True)
        with pytest.raises(ValueError, match="on purpose"):
            model(batch())
        assert running.frame is None  # all that the thread knows
        fails(False)
        with meters.count_forwards() as counter:
            total(model(batch())).backward()
    assert counter["fails"] == 2
    assert not ckptdeco.is_recomputing()


def test_exception_in_a_recompute_ends_it(fails: Any) -> None:
    """R38: nothing of it is left for the next step."""
    model, made = failing(), policy(segment=4)
    with made:
        loss = total(model(batch()))
        fails(True)
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
        fails(False)
        assert not ckptdeco.is_recomputing()
    assert_same(failing, forward_backward, lambda: (batch(),), lambda: made, steps=2)
