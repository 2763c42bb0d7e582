"""Contract 1 and 3: what is not an option goes to the function, and everything comes back as it was."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckptdeco
from ckptdeco import checkpoint
from tests.dropin.comparing import N_CALLS, assert_same_as_plain, leaves
from tests.support.oracle import assert_equal


def test_signature_lists_the_options_of_torch() -> None:
    ours = inspect.signature(checkpoint).parameters
    options = ("use_reentrant", "preserve_rng_state", "determinism_check", "context_fn", "debug", "early_stop")
    assert set(ours) == {"function", "args", "kwargs", *options}
    theirs = set(inspect.signature(torch_checkpoint).parameters) | {"preserve_rng_state"}  # which it takes from kwargs
    assert set(ours) == theirs
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in options)
    assert ours["use_reentrant"].default is False


def test_tensors_in_keywords_and_containers_get_gradients() -> None:
    def function(x: Tensor, state: dict[str, Any], *, scale: Tensor, pair: tuple[Tensor, int]) -> Tensor:
        return (x * state["h"][0]).sin() * scale.exp() * pair[0].cos() * pair[1]

    def run(call: Any, x: Tensor, h: Tensor, scale: Tensor, p: Tensor) -> Tensor:
        out: Tensor = call(x, {"h": [h]}, scale=scale, pair=(p, 3))
        return out

    shapes = ((3, 4),) * 4
    assert_same_as_plain(
        functools.partial(run, function), functools.partial(run, functools.partial(checkpoint, function)), *shapes
    )


def test_partial_with_options_works() -> None:
    call = functools.partial(checkpoint, use_reentrant=False, early_stop=False, determinism_check="values")
    assert_same_as_plain(lambda x: x.sin().exp(), functools.partial(call, lambda x: x.sin().exp()), (4,))


def _with_names_of_options(x: Tensor, debug: float, early_stop: Tensor, context_fn: str, function: int = 1) -> Tensor:
    return (x * debug + early_stop).sin().exp() if context_fn == "sin" else x * function


def test_argument_named_like_an_option_is_reached_through_partial() -> None:
    def run(x: Tensor, y: Tensor) -> Any:
        bound = functools.partial(_with_names_of_options, debug=2.0, early_stop=y, context_fn="sin", function=3)
        return checkpoint(bound, x)

    assert_same_as_plain(lambda x, y: _with_names_of_options(x, 2.0, y, "sin", 3), run, (4,), (4,))


def test_argument_named_like_an_option_is_reached_through_the_decorator() -> None:
    decorated = ckptdeco.checkpointable(_with_names_of_options)

    def run(x: Tensor, y: Tensor) -> Any:
        with ckptdeco.policy(segment=1):
            return decorated(x, debug=2.0, early_stop=y, context_fn="sin", function=3)

    assert_same_as_plain(lambda x, y: _with_names_of_options(x, 2.0, y, "sin", 3), run, (4,), (4,))


def test_outputs_come_back_as_they_are() -> None:
    marker = object()

    def function(x: Tensor, n: int) -> Any:
        return {"h": [x.sin(), None], "n": (n, "text"), "marker": marker, "same": x, "flag": True}

    (x,) = leaves((3,))
    for _ in range(N_CALLS):
        out = checkpoint(function, x, 4)
        assert list(out) == ["h", "n", "marker", "same", "flag"]
        assert out["marker"] is marker
        assert out["same"] is x
        assert out["h"][1] is None
        assert out["n"] == (4, "text")
        assert out["flag"] is True
        (grad,) = torch.autograd.grad(out["h"][0].sum(), x)
        assert_equal(x.detach().cos(), grad, "grad")


def test_inputs_and_outputs_need_no_grad() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    for _ in range(N_CALLS):
        layer.zero_grad()
        x = torch.randn(2, 4)
        checkpoint(layer, x).sum().backward()
        mine = [p.grad for p in layer.parameters()]
        layer.zero_grad()
        layer(x).sum().backward()
        for one, other in zip([p.grad for p in layer.parameters()], mine, strict=True):
            assert_equal(one, other, "grad")
        assert not checkpoint(torch.sin, x).requires_grad
        assert checkpoint(lambda: 3) == 3
        assert checkpoint(lambda x, y: y, x, None) is None


def test_without_grad_the_function_is_just_called() -> None:
    (x,) = leaves((3,))
    with torch.no_grad():
        out = checkpoint(torch.sin, x)
    assert not out.requires_grad
    assert torch.equal(out, x.sin())


def test_no_grad_inside_the_function_is_kept() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = x.exp()
        return (x * gate).sin()

    assert_same_as_plain(function, functools.partial(checkpoint, function), (4,))


@pytest.mark.parametrize("kind", ["lambda", "method", "builtin", "callable object", "module"])
def test_any_callable(kind: str) -> None:
    class Owner:
        def method(self, x: Tensor) -> Tensor:
            return x.sin().exp()

        def __call__(self, x: Tensor) -> Tensor:
            return x.sin().exp()

    function: Any = {
        "lambda": lambda x: x.sin().exp(),
        "method": Owner().method,
        "builtin": torch.exp,
        "callable object": Owner(),
        "module": nn.Softplus(),
    }[kind]
    assert_same_as_plain(function, functools.partial(checkpoint, function), (4,))


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ckptdeco.PolicyError, match="callable"):
        checkpoint(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint(torch.sin, torch.ones(1), determinism_check="sometimes")
