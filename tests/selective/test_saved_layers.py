"""Decorated layers inside a decorated layer that `save=` selects: stored, not run again, unless that would be seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptdeco
from tests.support.inside import Around, Inner, stack_of
from tests.support.layers import DIM, batch
from tests.support.oracle import assert_same, forward_backward
from tests.support.subject import policy


class Note:
    """An object that layers inside hand something on with."""

    n = 1
    value: Any = None


def use(s: Around, x: Tensor) -> Tensor:
    return x + s.two(s.inner(s.one(x).sin()))


def use_and_draw(s: Around, x: Tensor) -> Tensor:
    return use(s, x) * torch.rand(())


def plain(s: Inner, x: Tensor) -> Tensor:
    return F.gelu(s.linear(x))


def dropout(s: Inner, x: Tensor) -> Tensor:
    return F.dropout(F.gelu(s.linear(x)), 0.4)


def pair(s: Inner, x: Tensor) -> tuple[Tensor, Tensor]:
    return F.gelu(s.linear(x)), s.linear(x)


def use_pair(s: Around, x: Tensor) -> Tensor:
    one, two = s.inner(s.one(x).sin())
    return x + s.two(one) * two


def auxiliary(s: Inner, x: Tensor) -> Tensor:
    h = s.linear(x)
    s.seen = h.square().mean()
    return F.gelu(h)


def use_auxiliary(s: Around, x: Tensor) -> Tensor:
    return x + s.two(s.inner(s.one(x).sin())) * s.inner.seen


def counter(s: Inner, x: Tensor) -> Tensor:
    s.n_calls += 1
    return F.gelu(s.linear(x))


def use_counter(s: Around, x: Tensor) -> Tensor:
    return x + s.two(s.inner(s.inner(x).sin())) * (s.inner.n_calls % 3)


def write_buffer(s: Inner, x: Tensor) -> Tensor:
    s.memory.add_(0.1)
    return F.gelu(s.linear(x))


def write_buffer_unseen(s: Inner, x: Tensor) -> Tensor:
    return F.batch_norm(s.linear(x), s.memory, torch.ones(DIM), training=True)


def replace_buffer(s: Inner, x: Tensor) -> Tensor:
    s.memory = s.memory + 0.1
    return F.gelu(s.linear(x))


def use_buffer(s: Around, x: Tensor) -> Tensor:
    return x + s.two(s.inner(s.one(x).sin())) * s.inner.memory


def write_argument(s: Inner, x: Tensor) -> Tensor:
    x.mul_(0.5)
    return F.gelu(s.linear(x))


def use_argument(s: Around, x: Tensor) -> Tensor:
    mine = x * 1
    return x + s.two(s.inner(mine)) * mine


def append(s: Inner, x: Tensor, losses: list[Tensor]) -> Tensor:
    losses.append(s.linear(x).mean())
    return F.gelu(s.linear(x))


def use_list(s: Around, x: Tensor) -> Tensor:
    losses: list[Tensor] = []
    return x + s.two(s.inner(x, losses)) * sum(losses)


def fill(s: Inner, x: Tensor, *, cache: Any) -> Tensor:
    cache["k"] = s.linear(x)
    return F.gelu(cache["k"])


def use_dict(s: Around, x: Tensor) -> Tensor:
    cache: dict[str, Tensor] = {}
    return x + s.two(s.inner(x, cache=cache)) * cache["k"]


def note_tensor(s: Inner, x: Tensor, note: Note) -> Tensor:
    note.value = s.linear(x)
    return F.gelu(note.value)


def use_note(s: Around, x: Tensor) -> Tensor:
    note = Note()
    return x + s.two(s.inner(x, note)) * note.value


def note_number(s: Inner, x: Tensor, note: Note) -> Tensor:
    note.n = 2
    return F.gelu(s.linear(x))


def use_number(s: Around, x: Tensor) -> Tensor:
    note = Note()
    return x + s.two(s.inner(x, note)).sin() * note.n


def draw_from_own(s: Inner, x: Tensor) -> Tensor:
    return F.gelu(s.linear(x)) * torch.rand(x.shape, generator=s.generator)


def use_generator(s: Around, x: Tensor) -> Tensor:
    return x + s.two(s.inner(x).sin()) * torch.rand((), generator=s.inner.generator)


def use_under_autocast(s: Around, x: Tensor) -> Tensor:
    """What the inner layer saves has the shape of its argument, but another dtype."""
    with torch.autocast("cpu", torch.bfloat16):
        h = s.inner(s.one(x.sin()).float())
    return x + h.float().sin()


HABITS: dict[str, tuple[Any, Any]] = {
    "nothing odd": (use, plain),
    "dropout": (use_and_draw, dropout),
    "tuple": (use_pair, pair),
    "value on itself": (use_auxiliary, auxiliary),
    "counter": (use_counter, counter),
    "buffer": (use_buffer, write_buffer),
    "buffer that a kernel writes": (use_buffer, write_buffer_unseen),
    "other buffer": (use_buffer, replace_buffer),
    "argument in place": (use_argument, write_argument),
    "list": (use_list, append),
    "dict": (use_dict, fill),
    "object": (use_note, note_tensor),
    "number on an object": (use_number, note_number),
    "autocast": (use_under_autocast, plain),
}


@pytest.mark.parametrize(("outer", "inner"), HABITS.values(), ids=HABITS)
def test_selected_by_class(outer: Any, inner: Any, exact: Any) -> None:
    exact(Inner, lambda: stack_of(outer, inner))


def test_generator_of_its_own(exact: Any) -> None:
    exact(Inner, lambda: stack_of(use_generator, draw_from_own), is_copied=False)


SAVES = {
    "glob": "*.inner",
    "matmuls too": ckptdeco.any_of("matmuls", Inner),
    "matmuls only": "matmuls",
    "none": "*.other",
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_selected_in_other_ways(save: Any, exact_in_all: Any) -> None:
    exact_in_all(save, lambda: stack_of(use_and_draw, dropout))


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("segment", [1, 3])
def test_nested(segment: int, save: Any) -> None:
    made = policy(segment=segment, save=save, nested=True)
    assert_same(lambda: stack_of(use_and_draw, dropout), forward_backward, lambda: (batch(),), lambda: made)


def _watch(got: list[Tensor]) -> Any:
    return lambda module, args, out: got.append((out @ out.t()).square().mean())


def _take_part(module: Any, args: Any, out: Tensor) -> Tensor:
    return out + torch.tanh(out @ module.weight)


def _watch_without_grad(module: Any, args: Any, out: Tensor) -> None:
    with torch.no_grad():
        out @ out.t()


HOOKS = {"watch": _watch, "take part": lambda got: _take_part, "without grad": lambda got: _watch_without_grad}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("save", ["matmuls", "*.inner"])
def test_hooks_on_modules_inside(save: Any, hook: Any, exact: Any) -> None:
    """What hooks run is not counted among the layer's operations, and what they save is not the layer's."""

    def step(model: Any, inputs: Any, context: Any) -> Any:
        got: list[Tensor] = []
        hooked = [m for m in model.body.modules() if isinstance(m, nn.Linear)]
        handles = [module.register_forward_hook(hook(got)) for module in hooked]
        with context():
            out = model(*inputs)
        (out.square().sum() + sum(got)).backward()
        for handle in handles:
            handle.remove()
        return out, got

    exact(save, lambda: stack_of(use_and_draw, dropout), step)


def test_decorated_from_outside_and_inside(exact: Any) -> None:
    def build() -> Any:
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        ckptdeco.decorate(model)
        ckptdeco.decorate(model, layers="*.linear1")
        return model

    exact("*.linear1", build, make_inputs=lambda: (torch.randn(2, 5, DIM, requires_grad=True),), is_copied=False)
