"""Layers with autograd of their own: custom Functions, gradients within, hooks of every kind, transforms around."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import (
    disable_saved_tensors_hooks,
    get_gradient_edge,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import checkpoint

from tests.support.flights import training_flights
from tests.support.layers import DIM, Layer, Stack, Stem, batch
from tests.support.oracle import total
from tests.support.subject import checkpointable


class Twice(torch.autograd.Function):
    """Reads its saved tensors twice, keeps plain values on ctx, has a second output that is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.scale = scale
        out = torch.tanh(x) * scale
        mask = x > 0
        ctx.save_for_backward(x, out)
        ctx.mark_non_differentiable(mask)
        ctx.set_materialize_grads(False)
        return out, mask

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        (x, _), (_, out) = ctx.saved_tensors, ctx.saved_tensors
        return None if grad is None else grad * (ctx.scale - out * out / ctx.scale) + 0 * x, None


class OnCtx(torch.autograd.Function):
    """Keeps tensors on ctx itself, where no hook sees them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x.detach()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.x.cos()


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


def _twice(layer: Does, x: torch.Tensor) -> torch.Tensor:
    out, mask = Twice.apply(layer.linear(x), 1.5)
    return out * mask + out


def _on_ctx(layer: Does, x: torch.Tensor) -> torch.Tensor:
    return OnCtx.apply(layer.linear(x)).tanh()


def _in_place(layer: Does, x: torch.Tensor) -> torch.Tensor:
    return InPlace.apply(layer.linear(x) * 0.5).tanh()


def _force(layer: Does, x: torch.Tensor) -> torch.Tensor:
    """An energy, and its gradient by position, which is differentiated again."""
    energy = torch.tanh(layer.linear(x)).pow(2).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return x - 0.1 * force


def _force_of_own_leaf(layer: Does, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(layer.linear(y)).sum(), y)
    return torch.tanh(layer.linear(x)) * slope


def _penalty(layer: Does, x: torch.Tensor) -> torch.Tensor:
    y = layer.linear(x)
    (slope,) = torch.autograd.grad(y.tanh().sum(), y, create_graph=True)
    return y.tanh() + slope.norm(dim=1, keepdim=True)


def _tensor_hook(layer: Does, x: torch.Tensor) -> torch.Tensor:
    h = layer.linear(x)
    h.register_hook(lambda grad: grad * 0.5)
    return h.tanh()


def _retained(layer: Does, x: torch.Tensor) -> torch.Tensor:
    h = layer.linear(x)
    h.retain_grad()
    return h.tanh().sin()


def _checkpoint_within(layer: Does, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: torch.tanh(layer.linear(y)).sin(), x, use_reentrant=False)


def _offloaded_within(layer: Does, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        h = torch.tanh(layer.linear(x))
    return h.sin()


def _packed_within(layer: Does, x: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(lambda t: (t.double(), t.dtype), lambda p: p[0].to(p[1])):
        h = torch.tanh(layer.linear(x))
    return h.sin() + x


def _caught(layer: Does, x: torch.Tensor) -> torch.Tensor:
    try:
        h = torch.tanh(layer.linear(x))
        return h.sin() * x
    except Exception:
        return x * 1000


def _caught_bare(layer: Does, x: torch.Tensor) -> torch.Tensor:
    try:
        h = torch.tanh(layer.linear(x)).sin()
    except:  # noqa: E722
        h = x * 1000
    return h * x


def _closed(layer: Does, x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.tanh(layer.linear(x)).sin()
    finally:
        layer.n_closed += 1


def _no_grad_part(layer: Does, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(layer.linear(x))
    return layer.linear(x).tanh() * gate


DOES = (
    _twice, _on_ctx, _in_place, _force, _force_of_own_leaf, _penalty, _tensor_hook, _retained, _checkpoint_within,
    _offloaded_within, _packed_within, _caught, _caught_bare, _closed, _no_grad_part,
)  # fmt: skip


class Does(Layer):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.linear, self.what, self.n_closed = nn.Linear(DIM, DIM), what, 0

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, x)


@pytest.mark.parametrize("what", DOES, ids=lambda f: f.__name__.strip("_"))
def test_layer_with_autograd_of_its_own(what: Any, same: Any) -> None:
    same(lambda: Stem(Stack([Does(what) for _ in range(5)])), training_flights, steps=2)


@pytest.mark.parametrize("what", [_twice, _force, _penalty, _no_grad_part], ids=lambda f: f.__name__.strip("_"))
def test_double_backward_and_partial_gradients(what: Any, same: Any) -> None:
    class Once(Does):
        pass

    def step(model: Stem, inputs: Any, context: Any) -> Any:
        x = inputs[0]
        with context():
            loss = total(model(x))
        weights = [*model.parameters()]
        first = torch.autograd.grad(loss, x, retain_graph=True)
        some = torch.autograd.grad(loss, weights[2:5], retain_graph=True, allow_unused=True)
        if what is not _twice:  # whose backward reads what is not differentiable
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            slope.square().sum().backward()
        else:
            loss.backward()
        return [t.clone() for t in (*first, *some)]

    same(lambda: Stem(Stack([Once(what) for _ in range(5)])), step)


def _tanh(layer: Does, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer.linear(x)) + x


def test_hooks_of_every_kind_fire_as_often_and_see_the_same(same: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        seen: list[Any] = []
        handles: list[Any] = []

        def note(kind: str) -> Any:
            def hook(*args: Any) -> None:
                tensors = [
                    t for a in args for t in (a if isinstance(a, tuple) else (a,)) if isinstance(t, torch.Tensor)
                ]
                seen.append((kind, [t.detach().clone() for t in tensors]))

            return hook

        for layer in model.layers:
            for module in (layer, layer.linear):
                handles.append(module.register_full_backward_hook(note("backward")))
                handles.append(module.register_full_backward_pre_hook(note("pre")))
            handles.append(layer.linear.weight.register_hook(note("tensor")))
            handles.append(layer.linear.bias.register_post_accumulate_grad_hook(note("accumulated")))
        with context():
            hidden = [inputs[0]]
            for layer in model.layers:
                hidden.append(layer(hidden[-1]))
            handles.append(hidden[2].register_hook(note("hidden")))
            handles.append(hidden[3].grad_fn.register_hook(note("node")))
            handles.append(hidden[4].grad_fn.register_prehook(note("prenode")))
            handles.append(register_multi_grad_hook(hidden[1:4], note("all")))
            hidden[2].retain_grad()
            edge = get_gradient_edge(hidden[3])
        loss = total(hidden[-1])
        by_edge = torch.autograd.grad(loss, edge, retain_graph=True)[0].clone()
        loss.backward()
        for handle in handles:
            handle.remove()
        return by_edge, hidden[2].grad.clone(), seen

    same(lambda: Stack([Does(_tanh) for _ in range(5)]), step)


def test_per_sample_gradients_by_hooks(same: Any) -> None:
    """Activations are caught by forward hooks, gradients by backward hooks, as libraries for private training do."""

    def step(model: Stack, inputs: Any, context: Any) -> Any:
        caught: dict[Any, list[torch.Tensor]] = {}
        gradients: list[torch.Tensor] = []
        handles = []

        def backward(module: Any, _: Any, grads: Any) -> None:
            gradients.append(torch.einsum("ni,nj->nij", grads[0], caught[module].pop()))

        for layer in model.layers:
            handles.append(layer.linear.register_forward_hook(
                lambda m, args, out: caught.setdefault(m, []).append(args[0].detach())
            ))  # fmt: skip
            handles.append(layer.linear.register_full_backward_hook(backward))
        with context():
            out = model(*inputs)
        total(out).backward()
        for handle in handles:
            handle.remove()
        return out, gradients, [len(stack) for stack in caught.values()]

    same(lambda: Stack([Does(_tanh) for _ in range(5)]), step)


@pytest.mark.parametrize("where", ["around", "forward only", "disabled", "torch checkpoint"])
def test_saved_tensor_hooks_around_the_model(where: str, same: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        with context():
            if where == "around":
                with save_on_cpu():
                    out = model(*inputs)
                    total(out).backward()
                return out
            around: Any = contextlib.nullcontext()
            if where == "forward only":
                around = saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
            if where == "disabled":
                around = disable_saved_tensors_hooks("not here")
            with around:
                out = checkpoint(model, *inputs, use_reentrant=False) if where == "torch checkpoint" else model(*inputs)
        total(out).backward()
        return out

    same(lambda: Stem(Stack([Does(_tanh) for _ in range(5)])), step)


def _functional(model: nn.Module) -> Any:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return parameters, lambda given, x: torch.func.functional_call(model, given, (x,)).square().sum()


def _per_sample(model: nn.Module, x: torch.Tensor) -> Any:
    parameters, loss = _functional(model)
    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)


def _hessian(model: nn.Module, x: torch.Tensor) -> Any:
    parameters, loss = _functional(model)
    return torch.func.hessian(lambda row: loss(parameters, row))(x[0])


def _jvp(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))


def _jacobian(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.jacrev(model)(x[:1]), torch.func.vjp(model, x)[1](torch.ones_like(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", [_per_sample, _hessian, _jvp, _jacobian], ids=lambda f: f.__name__.strip("_"))
def test_transforms_between_steps(transform: Any, same: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        x = inputs[0]
        with context():
            out = model(x)
            found = transform(model, x.detach())
            again = model(x)
        total([out, again]).backward()
        return out, found

    same(lambda: Stem(Stack([Does(_tanh) for _ in range(5)])), step)


@pytest.mark.filterwarnings("ignore")
def test_anomaly_mode(same: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        with torch.autograd.set_detect_anomaly(True), context():
            out = model(*inputs)
            total(out).backward()
        return out

    same(lambda: Stem(Stack([Does(_tanh) for _ in range(5)])), step, lambda: (batch(),))
