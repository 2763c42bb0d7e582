"""Forward hooks on modules inside a layer fire as often as in the plain run, and what they change is changed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tests.support.layers import DIM, Layer, Stack, batch
from tests.support.oracle import assert_same, forward_backward, total
from tests.support.subject import checkpointable


class Mlp(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(DIM, DIM), nn.Dropout(0.3), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(self.drop(torch.tanh(self.up(x)))))


Watch = Callable[[nn.Module, "Seen"], None]


def _count_pairs(layer: nn.Module, seen: Seen) -> None:
    layer.up.register_forward_pre_hook(lambda m, a: seen.update(["pre"]))
    layer.up.register_forward_hook(lambda m, a, out: seen.update(["post"]))
    layer.down.register_forward_hook(lambda m, a, out: seen.update(["down"]))


def _count_with_keywords(layer: nn.Module, seen: Seen) -> None:
    layer.up.register_forward_pre_hook(lambda m, a, k: seen.update(["pre"]), with_kwargs=True)
    layer.down.register_forward_hook(lambda m, a, k, out: seen.update(["post"]), with_kwargs=True, always_call=True)


def _count_operations_of_their_own(layer: nn.Module, seen: Seen) -> None:
    """What the hook saves for backward is not the layer's."""

    def watch(m: nn.Module, a: Any, out: torch.Tensor) -> None:
        seen.update([f"norm {bool(out.square().sum().sqrt() > 0)}"])

    layer.up.register_forward_hook(watch)


def _count_backward_hooks(layer: nn.Module, seen: Seen) -> None:
    layer.down.register_full_backward_hook(lambda m, gi, go: seen.update(["backward"]))
    layer.up.register_full_backward_pre_hook(lambda m, go: seen.update(["before"]))


def _count_gradients_of_outputs(layer: nn.Module, seen: Seen) -> None:
    def watch(m: nn.Module, a: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: seen.update(["gradient"]))

    layer.up.register_forward_hook(watch)


WATCHERS: tuple[Watch, ...] = (
    _count_pairs,
    _count_with_keywords,
    _count_operations_of_their_own,
    _count_backward_hooks,
    _count_gradients_of_outputs,
)


class Seen:
    """Counts what happens in the present step."""

    def __init__(self) -> None:
        self.counter: Counter[str] = Counter()

    def update(self, what: list[str]) -> None:
        self.counter.update(what)

    def step(self, model: nn.Module, inputs: Any, context: Any) -> Any:
        """A step whose outputs tell what was counted in it."""
        self.counter = Counter()
        out = forward_backward(model, inputs, context)
        assert self.counter
        return out, dict(self.counter)


@pytest.mark.parametrize("watch", WATCHERS)
def test_hooks_that_watch_fire_as_often_as_in_the_plain_run(watch: Watch, under: Any) -> None:
    seen = Seen()

    def build() -> Stack:
        model = Stack([Mlp() for _ in range(4)])
        for layer in model.layers:
            watch(layer, seen)
        return model

    assert_same(build, seen.step, lambda: (batch(),), under, steps=5)


def test_hooks_on_all_modules_fire_as_often_as_in_the_plain_run(under: Any) -> None:
    seen = Seen()
    handles = [
        register_module_forward_pre_hook(lambda m, a: seen.update([f"pre {type(m).__name__}"])),
        register_module_forward_hook(lambda m, a, out: seen.update([f"post {type(m).__name__}"])),
    ]
    try:
        assert_same(lambda: Stack([Mlp() for _ in range(4)]), seen.step, lambda: (batch(),), under, steps=5)
    finally:
        for handle in handles:
            handle.remove()


def _scale(layer: nn.Module) -> None:
    layer.up.register_forward_hook(lambda m, a, out: out * 0.5)


def _in_place(layer: nn.Module) -> None:
    layer.up.register_forward_hook(lambda m, a, out: out.mul_(0.5) if out.sum() > -1e9 else None)


def _in_place_returning_nothing(layer: nn.Module) -> None:
    def change(m: nn.Module, a: Any, out: torch.Tensor) -> None:
        out.mul_(0.5)

    layer.down.register_forward_hook(change)


def _noise(layer: nn.Module) -> None:
    """Draws, which moves the stream that dropout reads afterwards."""

    def draw(m: nn.Module, a: Any, out: torch.Tensor) -> None:
        torch.rand(3)

    layer.up.register_forward_hook(draw)


def _pair(layer: nn.Module) -> None:
    """One hook remembers, another uses what it remembered: neither may be left out."""
    kept: dict[str, torch.Tensor] = {}

    def remember(m: nn.Module, a: Any) -> None:
        kept["x"] = a[0]

    layer.up.register_forward_pre_hook(remember)
    layer.down.register_forward_hook(lambda m, a, out: out + torch.sin(kept["x"]))


def _weight_from_direction(layer: nn.Module) -> None:
    """Weight norm as hooks do it: the pre-hook returns nothing, and sets the weight."""
    linear = layer.up
    direction = nn.Parameter(linear.weight.detach().clone())
    del linear._parameters["weight"]
    linear.register_parameter("direction", direction)

    def make(m: Any, a: Any) -> None:
        m.weight = m.direction / m.direction.norm()

    linear.weight = direction.detach()
    linear.register_forward_pre_hook(make)


CHANGES = (_scale, _in_place, _in_place_returning_nothing, _noise, _pair, _weight_from_direction)


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_that_take_part_do_so_again(change: Any, exact: Any) -> None:
    def build() -> Stack:
        model = Stack([Mlp() for _ in range(4)])
        for layer in model.layers:
            change(layer)
        return model

    exact(build, forward_backward)


@pytest.mark.parametrize("change", [_scale, _in_place_returning_nothing, _pair])
def test_several_forwards_before_their_backwards(change: Any, under: Any) -> None:
    def build() -> Stack:
        model = Stack([Mlp() for _ in range(4)])
        for layer in model.layers:
            change(layer)
        return model

    def step(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            outputs = [model(x) for x in inputs]
        for out in outputs:
            total(out).backward()
        return outputs

    assert_same(build, step, lambda: tuple(batch() for _ in range(3)), under, steps=3)


@pytest.mark.parametrize("n_forward", [0, 1, 2])
@pytest.mark.parametrize("n_backward", [0, 1, 2])
def test_hooks_of_forward_are_those_of_the_recompute(n_forward: int, n_backward: int, under: Any) -> None:
    """In order, whichever were registered and removed in between."""

    def hook(factor: float) -> Any:
        return lambda m, a, out: torch.sin(out * factor)

    def step(model: Stack, inputs: Any, context: Any) -> Any:
        handles = [layer.up.register_forward_hook(hook(1.5 + i)) for layer in model.layers for i in range(n_forward)]
        with context():
            out = model(*inputs)
        for handle in handles:
            handle.remove()
        handles = [layer.up.register_forward_hook(hook(9.0 + i)) for layer in model.layers for i in range(n_backward)]
        total(out).backward()
        assert [len(layer.up._forward_hooks) for layer in model.layers] == [n_backward] * len(model.layers)
        for handle in handles:
            handle.remove()
        return out

    assert_same(lambda: Stack([Mlp() for _ in range(4)]), step, lambda: (batch(),), under, steps=5)


def test_hooks_are_left_as_they_were_registered(under: Any) -> None:
    model = Stack([Mlp() for _ in range(3)])
    hooks = [lambda m, a, out: None for _ in model.layers]
    for layer, hook in zip(model.layers, hooks, strict=True):
        layer.up.register_forward_hook(hook)
    for is_raising in (False, True):
        with under():
            out = model(batch())
        total(out).backward()
        if is_raising:
            with under(), pytest.raises(TypeError):
                model(None)
        assert [next(iter(layer.up._forward_hooks.values())) for layer in model.layers] == hooks


def test_hook_that_first_fires_in_a_call_that_is_not_checked_and_writes_on_its_module_takes_part(
    exact_from: Any,
) -> None:
    """As hook-style weight norm does, in a part of the layer that begins late."""

    class Late(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.map = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            self.map.register_forward_pre_hook(lambda module, args: setattr(module, "gain", module.bias.exp()))

        @checkpointable
        def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
            h = torch.tanh(self.linear(x))
            return (self.map(h) * self.map.gain).sin() if begun else h

    exact_from(lambda: Stack([Late() for _ in range(4)]))


def test_an_interrupt_that_leaves_the_lock_taken_stops_no_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptdeco import policy
    from ckptdeco.engine import hooks

    monkeypatch.setattr(hooks, "_PATIENCE_S", 0.01)
    orphaned = hooks._turn
    orphaned.acquire()
    seen = Seen()

    def build() -> Stack:
        model = Stack([Mlp() for _ in range(4)])
        for layer in model.layers:
            _count_pairs(layer, seen)
        return model

    try:
        assert_same(build, seen.step, lambda: (batch(),), lambda: policy(segment=2))
    finally:
        orphaned.release()
    assert hooks._turn is not orphaned
