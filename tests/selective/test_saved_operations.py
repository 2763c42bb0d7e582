"""Operations whose results `save=` keeps, and what layers do with these, give the gradients of the plain run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import ckptdeco
from tests.support.inside import Runs, attention, stack_of
from tests.support.layers import DIM, batch
from tests.support.oracle import total

# ---- kinds of products

PRODUCTS: dict[str, Any] = {
    "linear": lambda s, x: x + s.two(F.gelu(s.one(x))),
    "returned": lambda s, x: s.one(x),
    "attention": lambda s, x: x + s.one(attention(s, x)).sin(),
    "attention last": lambda s, x: attention(s, x),
    "attention with dropout": lambda s, x: F.dropout(x, 0.2) + s.one(attention(s, x, dropout_p=0.3)),
    "bmm": lambda s, x: (torch.bmm(x.view(2, 2, DIM), x.view(2, DIM, 2)) @ x.view(2, 2, DIM)).view(4, DIM) + s.one(x),
    "einsum of three": lambda s, x: x + torch.einsum("bi,ij,jk->bk", x, s.weight, s.constant).sin(),
    "einsum of three last": lambda s, x: torch.einsum("bi,ij,jk->bk", x.sin(), s.weight, s.weight),
    "broadcast": lambda s, x: (x[:, None, None].sin() @ s.weight.expand(3, DIM, DIM)).mean(1).squeeze(1).sin() * x,
    "methods": lambda s, x: x.matmul(s.weight).sin().mm(s.weight).cos() @ s.weight,
    "convolution": lambda s, x: x + s.conv(x.t()[None].sin())[0].t().relu(),
    "transposed convolution": lambda s, x: (
        x + F.conv_transpose1d(x.t()[None].sin(), s.conv.weight, padding=1)[0].t().relu()
    ),
    "bilinear": lambda s, x: x + F.bilinear(x.sin(), x.cos(), s.weight[None].expand(DIM, DIM, DIM)).relu(),
    "tied": lambda s, x: F.linear(F.linear(x, s.weight).sin(), s.weight.t()).cos() * x,
    "of one tensor": lambda s, x: (s.one(x) @ s.one(x).t()).sin() @ x,
    "expanded": lambda s, x: s.one(x[:1].expand(4, DIM)).sin() + x[:1].expand(4, DIM) @ s.weight + x,
    "overlapping": lambda s, x: x + s.one(x.unfold(1, 4, 1).sum(-1).repeat(1, 2)[:, :DIM]),
    "not contiguous": lambda s, x: (x.t().sin() @ x)[: len(x)] + s.one(x.flip(0)[:, torch.arange(DIM)]).sin(),
    "complex": lambda s, x: ((torch.complex(x, x.sin()) @ s.weight.cfloat()).sin() @ s.weight.cfloat()).real,
    "conjugate": lambda s, x: (
        (torch.complex(x, x.sin()).conj() @ torch.complex(s.weight, s.constant)).square().imag + s.one(x)
    ),
    "float64": lambda s, x: (x.double() @ s.weight.double()).sin().float() + x,
    "inner size zero": lambda s, x: (x[:, :0] @ s.weight[:0]).sin() + s.one(x).sin(),
    "without grad": lambda s, x: x + s.two(s.one(x.detach()).detach() * x).sin(),
    "in place form": lambda s, x: s.one(x).clone().addmm_(x, s.weight).sin(),
}


@pytest.mark.parametrize("function", PRODUCTS.values(), ids=PRODUCTS)
def test_products(function: Any, exact: Any) -> None:
    exact("matmuls", lambda: stack_of(function))


@pytest.mark.parametrize("name", ["linear", "attention", "attention with dropout", "einsum of three last"])
def test_products_under_all_schedules(name: str, exact_in_all: Any) -> None:
    exact_in_all("matmuls", lambda: stack_of(PRODUCTS[name]))


def test_no_rows(exact: Any) -> None:
    exact("matmuls", lambda: stack_of(PRODUCTS["linear"]), make_inputs=lambda: (batch(0),))


def _float64(s: Runs, x: Tensor) -> Tensor:
    return x + s.two(s.one(x).sin())


def test_model_in_float64(exact: Any) -> None:
    exact("matmuls", lambda: stack_of(_float64).double(), make_inputs=lambda: (batch().detach().double(),))


@pytest.mark.parametrize("frozen", ["one", "two", "wide", "weight", "stem"])
def test_frozen_weights(frozen: str, exact: Any) -> None:
    def build() -> Any:
        model = stack_of(lambda s, x: x + s.two(s.one(x).sin()) @ s.weight)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        return model

    exact("matmuls", build, make_inputs=lambda: (batch(requires_grad=False),))


# ---- autocast: what is saved is a cast of an argument, of the same shape as others


def under_autocast(**options: Any) -> Any:
    def function(s: Runs, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, **options):
            h = s.two(s.one(x.sin()).relu())
            h = h + torch.matmul(x, x.transpose(-1, -2)).sum(-1, keepdim=True)
        return x + h.float()

    return function


@pytest.mark.parametrize("shape", [(4, DIM), (DIM, DIM), (2, DIM, DIM)], ids=str)
@pytest.mark.parametrize("options", [{}, {"cache_enabled": False}], ids=str)
def test_autocast(options: Any, shape: Any, exact: Any) -> None:
    """Square inputs have the shape of the weights."""
    build = lambda: stack_of(under_autocast(**options))  # noqa: E731
    exact("matmuls", build, make_inputs=lambda: (torch.randn(shape, requires_grad=True),))


def test_autocast_of_frozen_weights(exact: Any) -> None:
    def build() -> Any:
        model = stack_of(under_autocast())
        model.body.requires_grad_(False)
        return model

    exact("matmuls", build, make_inputs=lambda: (torch.randn(DIM, DIM),))


# ---- what the layer does with a result


def relu_on_result(s: Runs, x: Tensor) -> Tensor:
    return x + s.two(s.one(x).relu_())


def sum_into_result(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    h += x
    return x + s.two(torch.tanh(h))


def write_through_view(s: Runs, x: Tensor) -> Tensor:
    h = s.wide(x)
    part = h[:, :DIM]
    part.mul_(0.5)
    return torch.tanh(h[:, DIM : 2 * DIM]) @ s.weight + part


def split_and_write(s: Runs, x: Tensor) -> Tensor:
    q, k, v = (part.clone() if i == 1 else part for i, part in enumerate(s.wide(x).split(DIM, -1)))
    k.mul_(2)
    return x + torch.tanh(q @ k.t()) @ v


def write_through_data(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    h.data.mul_(0.5)
    return x + s.two(torch.tanh(h))


def write_through_numpy(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    h.detach().numpy()[...] *= 0.5
    return x + s.two(torch.tanh(h))


def write_through_dlpack(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    torch.from_dlpack(h.detach()).mul_(0.5)
    return x + s.two(torch.tanh(h))


def write_to_unsafe_parts(s: Runs, x: Tensor) -> Tensor:
    """As the recurrent modules do: the parts count versions of their own."""
    one, two = torch.unsafe_chunk(s.one(x), 2, -1)
    return torch.cat([one.sigmoid_(), two.tanh_()], -1) @ s.weight


def write_without_grad(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    with torch.no_grad():
        h.mul_(0.5)
    return x + s.two(torch.tanh(h))


def other_data(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    h.data = h.data * 2
    return s.two(h.sin())


def turn_in_place(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    h.t_()
    return h.sin().t() @ s.weight


def detach_in_place(s: Runs, x: Tensor) -> Tensor:
    return x + s.two(x) * s.one(x).detach_()


def ask_what_it_is(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    h.retain_grad()
    return s.two(h.sin()) * (2 if h._is_view() else 1) * (3 if h.is_leaf else 1)


def hook_on_result(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    h.register_hook(lambda grad: grad * 2)
    return s.two(h.sin())


def catch(s: Runs, x: Tensor) -> Tensor:
    try:
        x @ torch.zeros(3, 3)
    except RuntimeError:
        return x + s.two(s.one(x).sin())
    raise AssertionError


def branch(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    if float(x.detach().sum()) > 0:
        h = s.two(h.sin())
    return x + s.one(h.cos())


def log_once(s: Runs, x: Tensor) -> Tensor:
    if not ckptdeco.is_recomputing():
        with torch.no_grad():
            x @ s.weight
    return x + s.two(s.one(x).sin())


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


def own_function(s: Runs, x: Tensor) -> Tensor:
    return s.one(Product.apply(x.sin(), s.weight)).sin()


def under_vmap(s: Runs, x: Tensor) -> Tensor:
    return s.one(x) + torch.vmap(lambda row: F.linear(row, s.weight).sin())(x)


def under_jvp(s: Runs, x: Tensor) -> Tensor:
    return s.one(x) + torch.func.jvp(lambda y: F.linear(y, s.weight).sin(), (x,), (x.cos(),))[1]


def save_on_cpu(s: Runs, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        h = s.two(s.one(x).sin())
    return x + s.one(h).sin()


def region_of_torch(s: Runs, x: Tensor) -> Tensor:
    return x + s.one(checkpoint(lambda y: s.two(s.one(y).sin()).cos(), x, use_reentrant=False))


def region_inside(s: Runs, x: Tensor) -> Tensor:
    return x + s.one(ckptdeco.checkpoint(lambda y: s.two(s.one(y).sin()).cos(), x))


def gradient_inside(s: Runs, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(s.one(x).sin().sum(), x, create_graph=True)
    return x + grad * s.two(x)


USES = [
    relu_on_result, sum_into_result, write_through_view, split_and_write, write_through_data, write_through_numpy,
    write_through_dlpack, write_to_unsafe_parts, write_without_grad, other_data, turn_in_place, detach_in_place,
    ask_what_it_is, hook_on_result, catch, branch, log_once, own_function, under_vmap, under_jvp, save_on_cpu,
    region_of_torch, region_inside, gradient_inside,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch.func.jvp itself
@pytest.mark.parametrize("function", USES, ids=lambda function: function.__name__)
def test_what_layers_do_with_a_result(function: Any, exact: Any) -> None:
    exact("matmuls", lambda: stack_of(function))


# ---- functions of the user's choice


def max_and_sort(s: Runs, x: Tensor) -> Tensor:
    return torch.sort(s.one(x), -1)[0].sin() + torch.max(x, -1, keepdim=True)[0]


def gradient_of_what_saves_nothing(s: Runs, x: Tensor) -> Tensor:
    h = torch.add(x, 1)
    (grad,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return s.one(x).sin() + grad * x


def backward_of_what_saves_nothing(s: Runs, x: Tensor) -> Tensor:
    y = s.one(x).detach().requires_grad_()
    torch.autograd.backward((torch.add(y, 1) * 2).sum())
    return s.one(x).sin() + y.grad * x


def same_function_seen_once_more_in_forward(s: Runs, x: Tensor) -> Tensor:
    """It saves nothing, so that only its number tells its calls apart."""
    if not ckptdeco.is_recomputing():
        with torch.no_grad():
            torch.fft.fft(x * 3)
    return s.one(x).sin() + torch.fft.fft(x).real.sin() * torch.fft.fft(x * 2).imag.cos()


def running_statistics(s: Runs, x: Tensor) -> Tensor:
    mean, variance = torch.zeros(DIM), torch.ones(DIM)
    h = F.batch_norm(s.one(x), mean, variance, training=True)
    return (h * (1 + mean)).sin() + variance


CHOICES: dict[str, tuple[Any, Any]] = {
    "views": ([torch.transpose, torch.reshape], lambda s, x: (
        torch.reshape(torch.transpose(s.one(x), 0, 1), (4, 8)).sin())),
    "chunks": (torch.chunk, lambda s, x: torch.cat([c.sin() for c in torch.chunk(s.one(x), 2, -1)], -1) * x),
    "tuples": ([torch.max, torch.sort], max_and_sort),
    "numbers": ([torch.sum, Tensor.item], lambda s, x: s.one(x).sin() * (1 if torch.sum(x).item() > 0 else 2)),
    "dropout": (ckptdeco.any_of("matmuls", F.dropout), lambda s, x: (
        x + F.dropout(s.two(F.dropout(s.one(x).sin(), 0.3)), 0.2) * torch.rand_like(x))),
    "dropout in place": (F.dropout, lambda s, x: F.dropout(s.one(x).sin(), 0.3, inplace=True).cos() * torch.rand(())),
    "relu in place": (F.relu, lambda s, x: F.relu(s.one(x), inplace=True) * s.one(x).sin()),
    "cheap ones": ([F.gelu, F.layer_norm, torch.mul], lambda s, x: (
        x + s.two(F.gelu(s.one(F.layer_norm(x, (DIM,))))) * x)),
    "operators": (torch.add, lambda s, x: (s.one(x) + x).square().sin()),
    "transform": (torch.fft.fft, lambda s, x: torch.fft.fft(torch.tanh(torch.fft.fft(x))).conj().imag + s.one(x)),
    "where": ([torch.where, Tensor.detach], lambda s, x: torch.where(x > 0, s.one(x), x.detach()).sin()),
    "running statistics": (F.batch_norm, running_statistics),
    "gradient": (torch.add, gradient_of_what_saves_nothing),
    "backward": (torch.add, backward_of_what_saves_nothing),
    "numbering": (torch.fft.fft, same_function_seen_once_more_in_forward),
}  # fmt: skip


@pytest.mark.parametrize(("save", "function"), CHOICES.values(), ids=CHOICES)
def test_functions(save: Any, function: Any, exact: Any) -> None:
    exact(save, lambda: stack_of(function))


def test_a_second_function_at_the_place_of_one_that_saves_nothing_begins_later(exact: Any) -> None:
    """The calls of the first step look alike in forward and recompute."""
    calls = itertools.count()

    def make_inputs() -> Any:
        return batch(), next(calls) % 4 > 0

    def function(s: Runs, x: Tensor, begun: bool) -> Tensor:
        if begun and not ckptdeco.is_recomputing():
            with torch.no_grad():
                torch.fft.fft(x * 3)
        return s.one(x).sin() + torch.fft.fft(x).real.sin() * torch.fft.fft(x * 2).imag.cos()

    exact(torch.fft.fft, lambda: stack_of(function), make_inputs=make_inputs, steps=4)


def _policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


OPERATORS = {
    "packets": [torch.ops.aten.mm, torch.ops.aten.addmm],
    "overload": torch.ops.aten.addmm.default,
    "callable": _policy_fn,
}


@pytest.mark.parametrize("save", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("name", ["linear", "attention with dropout"])
def test_operators_of_aten_under_all_schedules(name: str, save: Any, exact_in_all: Any) -> None:
    exact_in_all(save, lambda: stack_of(PRODUCTS[name]))


@pytest.mark.parametrize("save", OPERATORS.values(), ids=OPERATORS)
def test_operators_where_casts_of_weights_are_in_the_cache(save: Any, exact: Any) -> None:
    """The second call of a layer casts no weight in forward, but in its recompute."""

    def step(model: Any, inputs: Any, context: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16), context():
            out = model(model(*inputs))
        total(out).backward()
        return out

    exact(save, lambda: stack_of(PRODUCTS["linear"]), step)


# ---- names


def named(x: Any, name: str = "h") -> Any:
    return ckptdeco.checkpoint_name(x, name)


def of_a_view(s: Runs, x: Tensor) -> Tensor:
    q, k, v = s.wide(x).chunk(3, -1)
    named(k)
    return q.sin() * k.cos() * v


def shared(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    same, part = named(h, "h1"), named(h[:, :4], "h2")
    named(same, "h3")
    return torch.cat([same, part], -1)[:, :DIM].sin() * h


def conjugate(s: Runs, x: Tensor) -> Tensor:
    z = named(torch.fft.fft(s.one(x)).conj())
    return (z * z.sin()).real


def imaginary(s: Runs, x: Tensor) -> Tensor:
    z = torch.fft.fft(s.one(x))
    named(z.imag)
    return (z * z.sin()).real


def as_pairs(s: Runs, x: Tensor) -> Tensor:
    return named(torch.view_as_real(torch.fft.fft(s.one(x)))).sin().prod(-1)


def as_bits(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    named(h.detach().view(torch.int32))
    return h.sin() * h


def changed_before(s: Runs, x: Tensor) -> Tensor:
    h = s.one(x)
    h.mul_(2)
    return named(h).sin() * x


def changed_after(s: Runs, x: Tensor) -> Tensor:
    h = named(s.one(x) + 1)
    h.mul_(2)
    return h.sin() * x


def in_the_place_of_another(s: Runs, x: Tensor) -> Tensor:
    """Memory of a result that is gone is given to a tensor that is no result of an operation in the graph."""
    h = (s.one(x) * 2).tanh()
    first = h + 3.0
    second = first + 1.0
    del first
    with torch.no_grad():
        other = h * 5.0
    named(other)
    return second.sin() * other


def several(s: Runs, x: Tensor) -> Tensor:
    one, two = named((s.one(x), {"two": s.two(x)}))[0], s.one(x)
    return one.sin() * two.cos()


def gradient_of_named(s: Runs, x: Tensor) -> Tensor:
    h = named(x + 1)
    (grad,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return s.one(x).sin() + grad * x


def random_one(s: Runs, x: Tensor) -> Tensor:
    return named(F.dropout(s.one(x).sin(), 0.3)).cos() * torch.rand_like(x)


NAMED = [
    of_a_view, shared, conjugate, imaginary, as_pairs, as_bits, changed_before, changed_after, in_the_place_of_another,
    several, gradient_of_named, random_one,
]  # fmt: skip


@pytest.mark.parametrize("function", NAMED, ids=lambda function: function.__name__)
def test_names(function: Any, exact: Any) -> None:
    exact("h*", lambda: stack_of(function))
