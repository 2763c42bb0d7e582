"""Contract 4 to 8: every way of going backward, hooks, lifetimes, saved-tensor hooks, and when a recompute happens."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ckptdeco import checkpoint
from tests.dropin.comparing import N_CALLS, assert_same_as_plain, leaves
from tests.support.oracle import assert_equal


def chain(x: Tensor) -> Tensor:
    return (x * 2).sin().exp().tanh()


def test_grad_and_create_graph_and_second_derivative(early_stop: bool) -> None:
    def twice(call: Any, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        return grad

    call = functools.partial(checkpoint, chain, early_stop=early_stop)
    assert_same_as_plain(functools.partial(twice, chain), functools.partial(twice, call), (5,))


def test_grad_inside_and_around_to_any_depth(early_stop: bool) -> None:
    def grad_of(function: Any) -> Any:
        def wrapped(x: Tensor) -> Tensor:
            with torch.enable_grad():
                (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            return grad

        return wrapped

    def checked(function: Any) -> Any:
        return functools.partial(checkpoint, function, early_stop=early_stop)

    def shifted(function: Any) -> Any:
        return lambda x: function(x) + x.cos()

    one = grad_of(chain)
    two = grad_of(shifted(one))
    three = grad_of(shifted(two))
    for plain, other in (
        (one, checked(grad_of(checked(chain)))),
        (two, grad_of(checked(shifted(checked(grad_of(checked(chain))))))),
        (three, checked(grad_of(shifted(checked(grad_of(shifted(checked(grad_of(chain))))))))),
    ):
        assert_same_as_plain(plain, other, (4,))


def test_second_backward_under_retain_graph_recomputes_again(early_stop: bool) -> None:
    n_runs = [0]

    def function(x: Tensor) -> Tensor:
        n_runs[0] += 1
        return chain(x)

    for _ in range(N_CALLS):
        (x,) = leaves((4,))
        n_runs[0] = 0
        out = checkpoint(function, x, early_stop=early_stop).sum()
        (first,) = torch.autograd.grad(out, x, retain_graph=True)
        (second,) = torch.autograd.grad(out, x)
        assert n_runs == [3]
        assert_equal(first, second, "grad")
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, x)


def test_recompute_is_lazy_and_once_per_backward() -> None:
    n_runs = [0]

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        n_runs[0] += 1
        y = x.sin().exp()
        return y, y.cos().tanh()

    for _ in range(N_CALLS):
        (x,) = leaves((4,))
        n_runs[0] = 0
        y, z = checkpoint(function, x)
        assert n_runs == [1]
        (grad,) = torch.autograd.grad(z.sum(), y, retain_graph=True)
        assert n_runs == [2]
        torch.autograd.grad(y, x, grad)
        assert n_runs == [3]


def test_nothing_is_recomputed_if_nothing_was_saved(early_stop: bool) -> None:
    n_runs = [0]

    def function(x: Tensor) -> Tensor:
        n_runs[0] += 1
        return x.clone() + 1

    (x,) = leaves((4,))
    checkpoint(function, x, early_stop=early_stop).sum().backward()
    assert n_runs == [1]


def test_nothing_is_recomputed_for_what_backward_does_not_reach() -> None:
    n_runs = [0]

    def function(x: Tensor) -> Tensor:
        n_runs[0] += 1
        return x.sin().exp()

    (x,) = leaves((4,))
    y = x * 2
    out = (checkpoint(function, y) + y.sin()).sum()
    torch.autograd.grad(out, out)
    assert n_runs == [1]


def test_tensor_hooks_live_on_the_original_graph_and_fire_once(early_stop: bool) -> None:
    for _ in range(N_CALLS):
        fired: list[str] = []
        (x,) = leaves((4,))

        def function(x: Tensor, fired: list[str] = fired) -> Tensor:
            h = x.sin()
            h.register_hook(lambda grad: fired.append("inside"))
            return h.exp().cos()

        out = checkpoint(function, x, early_stop=early_stop)
        out.grad_fn.next_functions[0][0].register_hook(lambda *args, fired=fired: fired.append("node"))
        x.register_hook(lambda grad, fired=fired: fired.append("leaf"))
        out.sum().backward()
        assert fired == ["node", "inside", "leaf"]


def test_hook_on_a_leaf_used_inside_and_outside_fires_once() -> None:
    for _ in range(N_CALLS):
        fired: list[Tensor] = []
        (w,) = leaves((4,))
        w.register_hook(fired.append)  # type: ignore[arg-type]
        checkpoint(lambda x, w=w: (w * x).sin(), w * 2).sum().backward()
        assert len(fired) == 1


def test_backward_from_inside_a_hook(early_stop: bool) -> None:
    def function(a: Tensor) -> tuple[Tensor, Tensor]:
        x = a.sin().cos()
        return x, x.sin()

    def program(call: Any) -> list[Tensor]:
        (a,) = leaves((3,))
        x, out = call(a)
        seen = []

        def hook(*args: Any) -> None:
            seen.append(torch.autograd.grad(x, a, torch.ones_like(x), retain_graph=True)[0])

        out.grad_fn.register_hook(hook)
        out.sum().backward(retain_graph=True)
        assert a.grad is not None
        return [*seen, a.grad]

    for _ in range(N_CALLS):
        mine = program(functools.partial(checkpoint, function, early_stop=early_stop))
        assert len(mine) == 2
        assert_equal(tuple(program(function)), tuple(mine), "gradients")


class Handle:
    """Something that can be weakly referenced."""


@pytest.mark.parametrize("end", ["dropped", "backward", "retained", "failed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"debug": True},
        {"determinism_check": "values"},
        {"context_fn": functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])},
    ],
    ids=["plain", "debug", "values", "selective"],
)
def test_no_reference_cycles(end: str, options: dict[str, Any], early_stop: bool) -> None:
    for _ in range(N_CALLS):
        gc.collect()
        gc.disable()
        (x,) = leaves((3,))
        alive: list[weakref.ref[Any]] = []

        def function(x: Tensor, alive: list[weakref.ref[Any]] = alive) -> Tensor:
            y = (x * 2).sin()
            z = y.exp()
            alive += [weakref.ref(y), weakref.ref(z)]
            return z.cos()

        out = checkpoint(function, x, early_stop=early_stop, **options)
        handle = Handle()
        out.grad_fn.metadata["handle"] = handle
        alive.append(weakref.ref(handle))
        del handle
        if end == "backward":
            out.sum().backward()
        elif end == "retained":
            out.sum().backward(retain_graph=True)
        elif end == "failed":
            out.register_hook(lambda grad: {}["missing"])
            with contextlib.suppress(KeyError):
                out.sum().backward()
        del out
        assert len(alive) >= 3
        assert [ref() for ref in alive] == [None] * len(alive)
        gc.enable()


class SavesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        SavesItsInput.seen = ctx.saved_tensors[0]  # type: ignore[attr-defined]
        return grad, None


def test_saved_no_grad_input_keeps_its_identity(early_stop: bool) -> None:
    (x,) = leaves((3,))
    y = torch.randn(3)
    for _ in range(N_CALLS):
        checkpoint(SavesItsInput.apply, x, y, early_stop=early_stop).sum().backward()
        assert SavesItsInput.seen is y  # type: ignore[attr-defined]
    SavesItsInput.seen = None  # type: ignore[attr-defined]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_save_on_cpu_inside_and_outside(outside: bool, inside: bool, early_stop: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with save_on_cpu() if inside else contextlib.nullcontext():
            return (x @ w).sin().exp()

    def run(x: Tensor, w: Tensor) -> Any:
        with save_on_cpu() if outside else contextlib.nullcontext():
            return checkpoint(function, x * 2, w, early_stop=early_stop)

    assert_same_as_plain(lambda x, w: function(x * 2, w), run, (4, 4), (4, 4))


def test_hooks_outside_see_what_is_kept_and_hooks_inside_what_is_saved() -> None:
    packed: list[str] = []

    def hooks(name: str) -> Any:
        return saved_tensors_hooks(lambda t: (packed.append(name), t)[1], lambda t: t)

    def function(x: Tensor) -> Tensor:
        with hooks("inside"):
            y = x.sin()
        return y.exp()

    (x,) = leaves((3,))
    with hooks("outside"):
        out = checkpoint(function, x)
    assert packed.count("outside") == 1  # the kept input
    assert packed.count("inside") == 1
    out.sum().backward()
    assert_equal((x.detach().sin().exp() * x.detach().cos()), x.grad, "grad")


def test_saved_attributes_are_readable_outside_of_backward_and_raise_once_freed() -> None:
    n_runs = [0]

    def function(x: Tensor) -> Tensor:
        n_runs[0] += 1
        return (x * x).exp()

    for _ in range(N_CALLS):
        (x,) = leaves((4,))
        n_runs[0] = 0
        out = checkpoint(function, x)
        assert_equal(out.detach(), out.grad_fn._saved_result.detach(), "saved result")
        assert n_runs == [2]
        assert_equal(out.detach(), out.grad_fn._saved_result.detach(), "saved result")
        assert n_runs == [3]  # what was read is gone at once
        out.sum().backward()
        assert n_runs == [4]
        with pytest.raises(RuntimeError, match="already been freed"):
            out.grad_fn._saved_result
        assert n_runs == [4]


def test_values_do_not_wait_for_another_backward() -> None:
    """R26 keeps them for decorated layers; here they belong to one backward, as torch's do."""
    storages: list[weakref.ref[Any]] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        z = y.exp()
        storages.append(weakref.ref(z.untyped_storage()))
        return z.tanh(), y.cos()

    for _ in range(N_CALLS):
        (x,) = leaves((64,))
        a, b = checkpoint(function, x, early_stop=False)
        torch.autograd.grad(b.sum(), x, retain_graph=True)  # does not ask for z
        assert storages[-1]() is None
        torch.autograd.grad(a.sum(), x)


def test_parameters_used_twice_get_the_sum() -> None:
    layer = nn.Linear(4, 4)

    def run(call: Any) -> list[Any]:
        layer.zero_grad()
        (x,) = leaves((2, 4))
        y = call(layer, call(layer, x)).sin()
        y.sum().backward()
        return [x.grad, *[p.grad for p in layer.parameters()]]

    for _ in range(N_CALLS):
        plain = run(lambda layer, x: layer(x))
        assert_equal(tuple(plain), tuple(run(checkpoint)), "gradients")
