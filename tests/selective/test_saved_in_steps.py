"""Training steps of every shape with `save=` are those of the plain run."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import Block
from tests.support.inside import Inner, Runs, attention, stack_of
from tests.support.layers import DIM, BatchNormLayer, Stack, Stem
from tests.support.oracle import forward_backward, total
from tests.support.subject import checkpointable, policy

Context = Any


def block(s: Runs, x: Tensor) -> Tensor:
    x = x + s.one(attention(s, x))
    return x + s.two(F.dropout(F.gelu(s.one(x)), 0.3)) * torch.rand_like(x)


def smooth(s: Runs, x: Tensor) -> Tensor:
    """What can be differentiated twice."""
    return x + s.two(F.dropout(torch.tanh(s.one(x)), 0.3)) @ s.weight


SAVES: dict[str, Any] = {
    "matmuls": "matmuls",
    "functions": [F.linear, F.gelu, F.dropout, F.scaled_dot_product_attention],
    "operators": [torch.ops.aten.mm, torch.ops.aten.addmm],
}


def retained(model: Any, inputs: Any, context: Context) -> Any:
    with context():
        out = model(*inputs)
    loss = total(out)
    loss.backward(retain_graph=True)
    loss.backward()
    return out


def two_in_flight(model: Any, inputs: Any, context: Context) -> Any:
    with context():
        one, two = model(*inputs), model(inputs[0] * 2)
    total(one).backward()
    total(two).backward()
    return one, two


def two_in_flight_reversed(model: Any, inputs: Any, context: Context) -> Any:
    with context():
        one, two = model(*inputs), model(inputs[0] * 2)
    total(two).backward()
    total(one).backward()
    return one, two


def caller_writes(model: Any, inputs: Any, context: Context) -> Any:
    with context():
        x = model.stem(*inputs)
        for layer in model.body.layers:
            x = layer(x)
            x.sigmoid_()
    total(x).backward()
    return x


def several_outputs(model: Any, inputs: Any, context: Context) -> Any:
    with context():
        outs = [model.stem(*inputs)]
        for layer in model.body.layers:
            outs.append(layer(outs[-1]))
    (outs[1].sum() + outs[2].cos().sum()).backward()
    return outs


def turned_between(model: Any, inputs: Any, context: Context) -> Any:
    with context():
        x = model.stem(*inputs)
        for layer in model.body.layers:
            x = layer(layer(x.t().contiguous().t()).view(2, 2, DIM).reshape(4, DIM))
    total(x).backward()
    return x


def saved_on_cpu(model: Any, inputs: Any, context: Context) -> Any:
    with torch.autograd.graph.save_on_cpu(), context():
        out = model(*inputs)
    total(out).backward()
    return out


def autocast_around(model: Any, inputs: Any, context: Context) -> Any:
    with torch.autocast("cpu", torch.bfloat16), context():
        out = model(*inputs)
    total(out.float()).backward()
    return out


def evaluated_before(model: Any, inputs: Any, context: Context) -> Any:
    with context(), torch.no_grad():
        model(*inputs)
    return forward_backward(model, inputs, context)


def numbers_afterwards(model: Any, inputs: Any, context: Context) -> Any:
    with context():
        out = model(*inputs)
    torch.manual_seed(77)
    between = torch.rand(3)
    total(out).backward()
    return out, between, torch.rand(2)


def on_a_thread(model: Any, inputs: Any, context: Context) -> Any:
    outs: list[Any] = []
    with context():
        here = contextvars.copy_context()
        thread = threading.Thread(target=lambda: outs.append(here.run(model, *inputs)))
        thread.start()
        thread.join()
    total(outs).backward()
    return outs


STEPS = [
    forward_backward, retained, two_in_flight, two_in_flight_reversed, caller_writes, several_outputs, turned_between,
    saved_on_cpu, autocast_around, evaluated_before, numbers_afterwards, on_a_thread,
]  # fmt: skip


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_steps(step: Any, save: Any, exact: Any) -> None:
    exact(save, lambda: stack_of(block), step)


def penalty(model: Any, inputs: Any, context: Context) -> Any:
    with context():
        out = model(*inputs)
    (grad,) = torch.autograd.grad(total(out), inputs[0], create_graph=True)
    (grad.square().sum() + total(out)).backward()
    return out, grad


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_gradient_penalty(save: Any, exact: Any) -> None:
    exact(save, lambda: stack_of(smooth), penalty)


class Attends(Runs):
    """Is given views of one tensor, which hooks of the user's may keep apart."""

    def __init__(self) -> None:
        super().__init__(attends)


def attends(s: Runs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return s.one(torch.softmax(q @ k.t(), -1) @ v)


@pytest.mark.parametrize("write", [False, True])
def test_views_of_one_tensor_as_arguments_that_are_kept_apart(write: bool, exact: Any) -> None:
    def step(model: Any, inputs: Any, context: Context) -> Any:
        with torch.autograd.graph.save_on_cpu(), context():
            x = model.stem(*inputs)
            for layer in model.body.layers:
                q, k, v = layer.wide(x).unflatten(-1, (3, DIM)).unbind(1)
                x = x + layer(q, k, v)
                if write:
                    x = x.sin_()
        total(x).backward()
        return x

    exact("matmuls", lambda: Stem(Stack([Attends() for _ in range(4)])), step)


class Convolves(torch.nn.Module):
    """Two convolutions and what is between them, with a batch norm or without."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.one, self.two = (torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.norm = torch.nn.BatchNorm2d(4) if has_norm else torch.nn.Identity()

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.two(F.relu(self.norm(self.one(x)), inplace=True)))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("save", ["matmuls", [F.conv2d, F.relu, F.batch_norm]], ids=["matmuls", "functions"])
def test_convolutions(save: Any, has_norm: bool, exact_in_all: Any) -> None:
    def make_inputs() -> Any:
        return (torch.randn(2, 4, 6, 6, requires_grad=True),)

    exact_in_all(save, lambda: Stack([Convolves(has_norm) for _ in range(4)]), make_inputs=make_inputs)


class DecoratedBlock(Block):
    forward = checkpointable(Block.forward)


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_blocks_of_a_language_model(save: Any, exact_in_all: Any) -> None:
    def make_inputs() -> Any:
        return (torch.randn(1, 6, 16, requires_grad=True),)

    exact_in_all(save, lambda: Stack([DecoratedBlock(16, 2) for _ in range(5)]), make_inputs=make_inputs)


def test_batch_norm_between(exact: Any) -> None:
    exact("matmuls", lambda: Stem(Stack([BatchNormLayer() for _ in range(4)])))


def test_random_numbers_that_are_not_to_be_kept_are_not_set_back() -> None:
    model = stack_of(lambda s, x: x + F.dropout(s.one(x), 0.5).sin())
    made = policy(save=F.dropout, preserve_rng_state=False)
    torch.manual_seed(1)
    with made:
        out = model(torch.randn(4, DIM, requires_grad=True))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn, and no state of forward's put back


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


OURS = {"aten.detach.default", "aten.clone.default"}  # of the engine, with and without `save=`
PRODUCTS = {"linear", "scaled_dot_product_attention", "gelu", "dropout", "softmax", "matmul", "mul", "add"}


@pytest.mark.parametrize("save", ["matmuls", "h*", [F.dropout]], ids=["matmuls", "glob", "dropout"])
def test_modes_around_see_in_forward_what_they_see_plainly(save: Any) -> None:
    model, x = stack_of(block), torch.randn(4, DIM, requires_grad=True)

    def seen(made: Any) -> Any:
        with made, _Operators() as operators, _Functions() as functions:
            out = model(x)
        found = [op for op in operators.seen if op not in OURS], [f for f in functions.seen if f in PRODUCTS]
        out.sum().backward()
        return found

    expected = seen(policy(None))
    assert expected[0].count("aten.addmm.default") == 1 + 3 * 4
    for _ in range(2):
        assert seen(policy(save=save)) == expected


@pytest.mark.parametrize("save", ["matmuls", Inner], ids=["matmuls", "class"])
def test_side_by_side_on_two_threads(save: Any) -> None:
    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        return stack_of(lambda s, x: x + s.two(s.inner(s.one(x).sin())), lambda s, x: F.gelu(s.linear(x)))

    def run(model: Any, made: Any) -> list[Tensor]:
        x, grads = torch.linspace(-1, 1, 4 * DIM).view(4, DIM), []
        for _ in range(6):
            model.zero_grad()
            with made:
                out = model(x)
            out.square().sum().backward()
            grads += [p.grad.clone() for p in model.parameters()]
        return grads

    expected = [run(build(seed), policy(None)) for seed in range(2)]
    models, found = [build(seed) for seed in range(2)], {}
    barrier = threading.Barrier(2)

    def work(i: int) -> None:
        barrier.wait()
        found[i] = run(models[i], policy(save=save, segment=2))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert all(map(torch.equal, found[i], expected[i]))
