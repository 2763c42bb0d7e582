"""What a layer does while it runs: draw, write, store on itself, stop early, change what it saved (R19–R22)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import meters
from tests.support.layers import DIM, InPlaceOnInputLayer, Layer, Loop, Stack, Stem, TanhLayer, batch, stack
from tests.support.oracle import assert_same, forward_backward, total
from tests.support.subject import ENGINE, checkpointable, policy, spec

ours = pytest.mark.skipif(ENGINE != "ckptdeco", reason="asks for what ckptdeco promises")
if ENGINE == "ckptdeco":
    from ckptdeco.errors import ModifiedTensorError, RandomnessError
else:
    ModifiedTensorError = RandomnessError = RuntimeError


class Linear(Layer):
    """Base: one linear layer and a habit that may begin at any step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor, step: int) -> Tensor:
        meters.tick(self.label)
        return self.habit(x, torch.tanh(self.linear(x)), step)

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        raise NotImplementedError


# ---- R19: every call is a probe


class DropsLater(Linear):
    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        return functional.dropout(h, 0.4) if step >= 2 else h


class SkipsByChance(Linear):
    """LayerDrop: a draw decides whether the layer does anything, and what it saves."""

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        return x + functional.dropout(h, 0.2) if step and torch.rand(()).item() > 0.5 else x * 1.5


class WarmsUp(Linear):
    """A counter on the module; noise begins when it has run out."""

    def __init__(self) -> None:
        super().__init__()
        self.n_warm = 2

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        if self.n_warm:
            self.n_warm -= 1
            return h
        return h + torch.randn_like(h)


class Observes(Linear):
    """A quantisation observer that is switched on later and writes a buffer that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.range = nn.Buffer(torch.ones(1))

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        if step >= 2:
            self.range.mul_(0.9).add_(0.1 * h.detach().abs().max())
        return h / self.range


class ObservesLarge(Observes):
    """Its buffer is too large to be cloned before the engine has seen it written."""

    def __init__(self) -> None:
        super().__init__()
        self.range = nn.Buffer(torch.ones(1 << 15))

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        if step >= 2:
            self.range.mul_(0.9).add_(0.1 * h.detach().abs().max())
        return h / self.range[:DIM]


class WritesInput(Linear):
    """Its very first call changes its input, before anybody could have cloned it."""

    @checkpointable
    def forward(self, x: Tensor, step: int) -> Tensor:
        x.mul_(0.7)
        return self.linear(x) + x


class StoresTensor(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        h = h * (1 + self.last)
        if step >= 2:
            self.last = h.detach().mean()
        return h


HABITS = [DropsLater, SkipsByChance, WarmsUp, Observes, ObservesLarge, WritesInput, StoresTensor]


@pytest.mark.parametrize("make", HABITS, ids=lambda c: c.__name__)
def test_habit_that_begins_at_a_later_call(make: Any, exact: Any) -> None:
    """R19: the call that does it first is stored if it was not protected; the next one is protected."""
    steps = iter(range(6))
    exact(
        lambda: Stem(Stack([make() for _ in range(5)])),
        forward_backward,
        lambda: (batch(), next(steps)),
        steps=6,
    )


class WritesInTraining(Layer):
    """The first call of this layer is in eval mode and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(DIM, DIM), nn.Buffer(torch.zeros(1 << 15))

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        if self.training:
            self.mean.lerp_(h.detach().mean(), 0.5)
        return functional.dropout(h - self.mean[:DIM], 0.3, self.training)


def test_first_seen_in_eval_mode(exact: Any) -> None:
    """R19: what is known of a layer is kept for each way of calling it."""

    def program(model: Any, inputs: Any, context: Any) -> Any:
        outs = []
        for is_training in (False, True, False, True):
            model.train(is_training)
            outs.append(forward_backward(model, inputs, context))
        return outs

    exact(lambda: Stack([WritesInTraining() for _ in range(5)]), program, steps=3)


_draws = {"on": False}


class DrawsByGlobal(Linear):
    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        if _draws["on"]:
            torch.rand(())
        return h


@ours
@pytest.mark.parametrize("n", [1, 4])
def test_drawing_only_in_the_recompute_is_an_error(n: int, monkeypatch: Any) -> None:
    """R19: a generator that moves in a call recorded as not drawing."""
    model = Stack([DrawsByGlobal() for _ in range(3)])
    with policy(segment=n, early_stop=False):
        loss = total(model(batch(), 0))
    monkeypatch.setitem(_draws, "on", True)
    with pytest.raises(RandomnessError):
        loss.backward()


class Force(Linear):
    """A force field: takes a gradient inside forward."""

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        (force,) = torch.autograd.grad(h.sin().sum(), x, create_graph=True)
        return x - 0.1 * force


def test_gradient_inside_forward(exact: Any) -> None:
    """R19: saved tensors are held while the call runs, so the inner backward finds them."""
    exact(lambda: Stem(Stack([Force() for _ in range(4)])), make_inputs=lambda: (batch(), 0))


@ours
@pytest.mark.parametrize("n", [1, 3])
def test_gradient_inside_forward_runs_each_layer_twice(n: int) -> None:
    """R19: no recompute in the middle of forward. 6 runs for 3 layers."""
    model = Stem(Stack([Force() for _ in range(3)]))
    for _ in range(3):
        with meters.count_forwards() as counter:
            with policy(segment=n):
                out = model(batch(), 0)
            assert counter["layer"] == 3
            out.sum().backward()
        assert counter["layer"] == 6


def test_plain_layers_with_no_habit_pay_no_storing() -> None:
    """R19: dropping is decided at the end of the call, and the first call drops already."""
    if ENGINE != "ckptdeco":
        pytest.skip("counts ckptdeco's recomputes")
    model = stack(4, TanhLayer)
    with meters.count_forwards() as counter:
        with policy(segment=1):
            loss = total(model(batch()))
        loss.backward()
    assert set(counter.values()) == {2}


# ---- R20: early stop


class Leaky(Linear):
    """rrelu saves its noise before it is filled, without a new version."""

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        return functional.rrelu(h * 1, training=True)


class SavesLate(Linear):
    """A value that a kernel fills after autograd has saved it, behind autograd's back."""

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        values = torch.zeros_like(h)
        out = h * values
        values.data.copy_(h.detach().cos())
        return out + h.mean()


@pytest.mark.parametrize("make", [Leaky, SavesLate])
def test_tensor_filled_after_it_was_saved(make: Any, exact_from_first: Any) -> None:
    """R20: stopping when it is saved would give uninitialised values."""
    exact_from_first(lambda: Stem(Stack([make() for _ in range(4)])))


@pytest.fixture(params=[spec(segment=1), spec(segment=4), spec(segment=3, levels=2)], ids=str)
def exact_from_first(request: pytest.FixtureRequest) -> Any:
    made = request.param.make()

    def check(build: Any) -> None:
        steps = iter(range(100))
        assert_same(build, forward_backward, lambda: (batch(), next(steps)), lambda: made, steps=5)

    return check


_depth = {"n": 0}


class CountsGlobal(Linear):
    """Undoes its side effect in `finally`."""

    @checkpointable
    def forward(self, x: Tensor, step: int) -> Tensor:
        _depth["n"] += 1
        try:
            return torch.tanh(self.linear(x)) * _depth["n"] + 0.1
        finally:
            _depth["n"] -= 1


class CountsOnSelf(Linear):
    """Undoes its side effect on itself at the end, without `finally`."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = 0

    @checkpointable
    def forward(self, x: Tensor, step: int) -> Tensor:
        self.flag += 1
        out = torch.tanh(self.linear(x)) * self.flag + 0.1
        self.flag -= 1
        return out


class FallsBack(Linear):
    """Catches everything, and tries another way."""

    @checkpointable
    def forward(self, x: Tensor, step: int) -> Tensor:
        h = torch.tanh(x)
        try:
            h = self.linear(h)  # saves its input, and its weight, which nobody needs again
        except:  # noqa: E722
            h = self.linear(torch.sin(h))
            meters.tick("fallback")
        return h


class SwallowsInFinally(Linear):
    @checkpointable
    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.linear(x)
        try:
            h = torch.tanh(h)
        finally:
            return h + 0.1  # noqa: B012


class TriesAgain(Linear):
    """Swallows whatever comes and goes on saving."""

    @checkpointable
    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.linear(x)
        for _ in range(2):
            with contextlib.suppress(BaseException):
                h = torch.tanh(h)
        return h


STOPPED = [CountsGlobal, CountsOnSelf, FallsBack, SwallowsInFinally, TriesAgain]


@pytest.mark.parametrize("make", STOPPED, ids=lambda c: c.__name__)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_stop_goes_through_user_code(make: Any, exact_from_first: Any) -> None:
    """R20: once raised, the stop is raised again at each further tensor, and a normal return counts as stopped."""

    def build() -> nn.Module:
        assert _depth["n"] == 0
        return Stem(Stack([make() for _ in range(4)]))

    exact_from_first(build)
    assert _depth["n"] == 0


@ours
def test_stop_that_user_code_catches_runs_no_fallback() -> None:
    """R20: what comes after is stopped at the first tensor that it saves."""
    model = Stem(Stack([FallsBack() for _ in range(4)]))
    with meters.count_forwards() as counter:
        for _ in range(2):
            with policy(segment=2):
                loss = total(model(batch(), 0))
            loss.backward()
    assert counter["fallback"] == 0


@ours
def test_flag_on_the_module_is_back_after_an_early_stop() -> None:
    """R20, R11: a layer that leaves an attribute changed when it is stopped is not stopped again."""
    model = Stack([CountsOnSelf() for _ in range(3)])
    for _ in range(3):
        with policy(segment=1):
            loss = total(model(batch(), 0))
        loss.backward()
        assert [layer.flag for layer in model.layers] == [0, 0, 0]


# ---- R21: what plain refuses is refused


class WritesSaved(Linear):
    """tanh saves its result; sin saves what mul_ made of it."""

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        h.mul_(2)
        return h.sin()


class WritesSavedOfExp(Linear):
    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        y = h.exp()
        z = y * 2
        y.add_(1)
        return z + y


@pytest.mark.parametrize("make", [WritesSaved, WritesSavedOfExp])
@pytest.mark.parametrize("step", [1, 3])
def test_saved_tensor_overwritten_inside_the_layer_raises_as_in_plain(make: Any, step: int, under: Any) -> None:
    """R21: the recompute would hand out the overwritten value: a number, no error."""
    model = Stem(Stack([make() for _ in range(3)]))
    for _ in range(step):
        with contextlib.suppress(RuntimeError):  # plain refuses
            total(model(batch(), 0)).backward()
        with under():
            loss = total(model(batch(), 0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        if ENGINE == "ckptdeco":
            assert isinstance(caught.value, ModifiedTensorError)
            assert "layers." in str(caught.value)


def test_plain_refuses_what_the_test_above_asks_for() -> None:
    for make in (WritesSaved, WritesSavedOfExp):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total(Stem(Stack([make()]))(batch(), 0)).backward()


class WritesUnsaved(Linear):
    """Legal: what is overwritten was not saved."""

    def habit(self, x: Tensor, h: Tensor, step: int) -> Tensor:
        y = h + 1
        y.mul_(2)
        return y.sin()


def test_legal_write_inside_the_layer(exact: Any) -> None:
    """R21: the check does not refuse what plain allows."""
    exact(lambda: Stem(Stack([WritesUnsaved() for _ in range(5)])), make_inputs=lambda: (batch(), 0))


# ---- R22: what was decided in forward is not decided again


def _restart(m: Loop, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        if i == 2:
            x = x.detach()
        x = layer(x)
    return x


def _both_ways(m: Loop, x: Tensor) -> tuple[Tensor, Tensor]:
    """One layer reads an output with its graph, another the same values without."""
    for layer in m.layers[:2]:
        x = layer(x)
    y, z = x, x.detach()
    for layer in m.layers[2:]:
        y, z = layer(y), layer(z)
    return y, z


def _leaf_between(m: Loop, x: Tensor) -> Tensor:
    made = []
    for i, layer in enumerate(m.layers):
        if i == 2:
            x = x.detach().requires_grad_()
            made.append(x)
        x = layer(x)
    return x


class SavesByFlag(Layer):
    """What it saves depends on whether its input needs a gradient, and whether that is a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if x.requires_grad:
            h = torch.tanh(h) * x
        return h.exp().clamp(max=3)


@pytest.mark.parametrize("make", [TanhLayer, SavesByFlag])
@pytest.mark.parametrize("loop", [_restart, _both_ways, _leaf_between])
def test_requires_grad_is_that_of_each_consumer(loop: Any, make: Any, exact: Any) -> None:
    """R22: taken from the producer, gradients differ."""
    exact(lambda: Stem(Loop([make() for _ in range(5)], loop)))


class TwoInputs(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * y) * y.exp() * x


def test_leaf_that_needs_a_gradient_beside_one_that_does_not(exact: Any) -> None:
    """R22: a test on the input that is decided again in the recompute would shift all later saved tensors."""

    def loop(m: Loop, x: Tensor, leaf: Tensor, data: Tensor) -> Tensor:
        for i, layer in enumerate(m.layers):
            x = layer(x, (leaf, data, leaf * 1, x)[i % 4])
        return x

    make_inputs = lambda: (batch(), batch(), batch(requires_grad=False))  # noqa: E731
    exact(lambda: Loop([TwoInputs() for _ in range(6)], loop), make_inputs=make_inputs)


def test_nested_decisions_are_given_again() -> None:
    """R22: decorated calls inside a decorated call save the same tensors in the recompute, whatever was learnt."""

    class Outer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack(3, TanhLayer)

        @checkpointable
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).exp().clamp(max=2)

    made = policy(segment="sqrt", nested=True, keep_last=1)

    def program(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            outs = [model(x) for x in inputs]  # the second forward knows the chain's length, the first did not
        for out in outs:
            total(out).backward()
        return outs

    assert_same(lambda: Stack([Outer() for _ in range(3)]), program, lambda: (batch(), batch()), lambda: made)


def test_input_changed_in_place_by_the_layer_is_cloned_per_call(exact: Any) -> None:
    """R22, R30: `requires_grad` of a kept object that the layer itself changes in place."""

    def loop(m: Loop, x: Tensor) -> Tensor:
        for i, layer in enumerate(m.layers):
            x = layer(x.detach() if i == 3 else x)
        return x

    exact(lambda: Stem(Loop([InPlaceOnInputLayer() for _ in range(5)], loop)))
