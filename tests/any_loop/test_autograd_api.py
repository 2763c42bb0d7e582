"""retain_graph, double backward, autograd.grad with inputs, layer by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layers import Block, Loop, TanhLayer, batch, stack
from tests.support.oracle import assert_same, total


def build() -> nn.Module:
    return stack(7, p=0.2)


def hiddens(m: Loop, x: torch.Tensor) -> list[torch.Tensor]:
    out = [x]
    for layer in m.layers:
        out.append(layer(out[-1]))
    return out


def test_retain_graph(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        for _ in range(3):
            total(out).backward(retain_graph=True)
        total(out).backward()
        return out

    assert_same(build, program, lambda: (batch(),), under)


def test_second_backward_without_retain_graph_raises(under: Any) -> None:
    model = build()
    with under():
        loss = total(model(batch()))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_double_backward(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
            (grad,) = torch.autograd.grad(total(out), inputs, create_graph=True)
            penalty = (grad.norm(dim=-1) - 1).square().sum()
        (total(out) + penalty).backward()
        return out, grad

    for make in (lambda: stack(5, p=0.2), lambda: stack(5, TanhLayer)):
        assert_same(make, program, lambda: (batch(),), under)


def test_double_backward_after_the_block(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        (grad,) = torch.autograd.grad(total(out), inputs, create_graph=True)
        grad.square().sum().backward()
        return out, grad

    assert_same(lambda: stack(5, TanhLayer), program, lambda: (batch(),), under)


def test_gradient_of_an_input_only(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        return torch.autograd.grad(total(out), inputs)

    assert_same(build, program, lambda: (batch(),), under)


def test_gradient_of_one_layers_weights_only(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        return torch.autograd.grad(total(out), list(model.layers[3].parameters()))

    assert_same(build, program, lambda: (batch(),), under)


def test_backward_with_inputs(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        total(out).backward(inputs=[model.layers[2].up.weight, inputs[0]], retain_graph=True)
        total(out).backward(inputs=[model.layers[5].up.weight])
        return out

    assert_same(build, program, lambda: (batch(),), under)


@pytest.mark.parametrize("retain", [True, False])
def test_layer_by_layer(under: Any, retain: bool) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = hiddens(model, *inputs)
        grad, got = torch.ones_like(out[-1]), []
        for i in reversed(range(len(model.layers))):
            wanted = [out[i], *model.layers[i].parameters()]
            grad, *others = torch.autograd.grad(out[i + 1], wanted, grad, retain_graph=retain)
            got += [grad, *others]
        return got

    assert_same(lambda: Loop([Block(p=0.1) for _ in range(6)], hiddens), program, lambda: (batch(),), under)


def test_gradients_of_hidden_states(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = hiddens(model, *inputs)
        half = torch.autograd.grad(total(out[-1]), [out[4], out[2]], retain_graph=True)
        total(out[-1]).backward()
        return half

    assert_same(lambda: Loop([Block(p=0.1) for _ in range(6)], hiddens), program, lambda: (batch(),), under)


def test_retained_gradient_of_a_hidden_state(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = hiddens(model, *inputs)
            out[3].retain_grad()
        total(out[-1]).backward()
        return out[3].grad

    assert_same(lambda: Loop([Block() for _ in range(6)], hiddens), program, lambda: (batch(),), under)


def test_two_losses_from_one_graph_one_after_the_other(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = hiddens(model, *inputs)
        total(out[3]).backward(retain_graph=True)
        total(out[-1]).backward()
        return out[-1]

    assert_same(lambda: Loop([Block(p=0.1) for _ in range(6)], hiddens), program, lambda: (batch(),), under)


def test_hooks_on_hidden_states_fire_once_with_the_plain_gradient(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        got: list[torch.Tensor] = []
        with context():
            out = hiddens(model, *inputs)
            for hidden in out[1:]:
                hidden.register_hook(lambda grad: got.append(grad.clone()))
        total(out[-1]).backward()
        return got

    assert_same(lambda: Loop([Block() for _ in range(5)], hiddens), program, lambda: (batch(),), under)


def test_backward_inside_the_loop(under: Any) -> None:
    """A gradient taken in the middle of the forward pass is the input of later layers (guidance, meta learning)."""

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(m.layers):
            y = layer(x)
            if i % 2:
                (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
                y = y - 0.1 * grad
            x = y
        return x

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        total(out).backward()
        return out

    assert_same(lambda: Loop([Block() for _ in range(6)], loop), program, lambda: (batch(),), under)


def test_vector_jacobian_products_in_a_batch(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        return [torch.autograd.grad(out.sum(0)[i], inputs, retain_graph=True)[0] for i in range(out.shape[1])]

    assert_same(lambda: stack(4), program, lambda: (batch(),), under)
