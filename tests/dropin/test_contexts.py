"""Contract 12 and 13: `context_fn`, dispatch modes in it, and torch's selective checkpointing, counted exactly."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import ckptdeco
from ckptdeco import checkpoint
from tests.dropin.comparing import N_CALLS, assert_same_as_plain, leaves, of_torch
from tests.support.oracle import assert_equal

mm, addmm, sin = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.sin.default


class Entered(contextlib.AbstractContextManager[None]):
    """Counts how often it is entered; may not be entered twice at once."""

    def __init__(self) -> None:
        self.n = 0
        self.is_open = False

    def __enter__(self) -> None:
        assert not self.is_open
        self.is_open = True
        self.n += 1

    def __exit__(self, *args: Any) -> None:
        self.is_open = False


@pytest.mark.parametrize("check", ["default", "values", "none"])
def test_each_context_is_entered_once_per_pass(check: str, early_stop: bool) -> None:
    for _ in range(N_CALLS):
        forward, recompute, made = Entered(), Entered(), []

        def context_fn(pair: Any = (forward, recompute), made: list[int] = made) -> Any:
            made.append(1)
            return pair

        (x,) = leaves((3,))
        out = checkpoint(
            lambda x: x.sin().exp().cos(), x, context_fn=context_fn, early_stop=early_stop, determinism_check=check
        )
        assert (forward.n, recompute.n) == (1, 0)
        out.sum().backward(retain_graph=True)
        assert (forward.n, recompute.n) == (1, 1)
        out.sum().backward()
        assert (forward.n, recompute.n, len(made)) == (1, 2, 1)


def test_contexts_are_not_entered_without_grad() -> None:
    forward = Entered()
    with torch.no_grad():
        checkpoint(torch.sin, torch.ones(3), context_fn=lambda: (forward, forward))
    assert forward.n == 0


def test_contexts_may_change_what_is_computed() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin() @ w

    def in_bf16(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(x, w)

    pair = lambda: (torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16))  # noqa: E731
    assert_same_as_plain(in_bf16, functools.partial(checkpoint, function, context_fn=pair), (4, 4), (4, 4))


def test_context_that_swallows_an_exception_of_forward_is_an_error() -> None:
    def function(x: Tensor) -> Tensor:
        raise KeyError(x)

    with pytest.raises(RuntimeError, match="suppressed an exception raised during the checkpointed forward"):
        checkpoint(
            function, *leaves((3,)), context_fn=lambda: (contextlib.suppress(KeyError), contextlib.nullcontext())
        )


class Operators(TorchDispatchMode):
    """Lists the operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("check", ["default", "values"])
def test_dispatch_modes_see_the_functions_operators_only(check: str, early_stop: bool) -> None:
    """What compares values is not seen by them; hooks detach what they hold, as those of torch do."""
    for _ in range(N_CALLS):
        seen = []
        for call in (functools.partial(checkpoint, determinism_check=check), of_torch):
            forward, recompute = Operators(), Operators()
            (x,) = leaves((3,))
            out = call(
                lambda x: x.sin().exp(),
                x,
                early_stop=early_stop,
                context_fn=lambda pair=(forward, recompute): pair,
            )
            out.sum().backward()
            seen.append((forward.names, [name for name in recompute.names if name != "detach.default"]))
        assert seen[0] == seen[1]
        assert seen[0][0] == ["sin.default", "exp.default"]


def test_modes_around_the_step_see_no_operator_of_ours() -> None:
    for _ in range(N_CALLS):
        counts = []
        for call in (checkpoint, of_torch):
            (x,) = leaves((3,))
            with Operators() as seen:
                call(lambda x: x.sin().exp(), x).sum().backward()
            counts.append(Counter(name for name in seen.names if "detach" not in name))
        assert counts[0] == counts[1]


def matmuls(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(torch.mm(x.cos(), w).sin(), w).sum()


def matmuls_in_backward(call: Any) -> float:
    """Flops of backward, in matmuls."""
    x, w = leaves((16, 16), (16, 16))
    out = call(x, w)
    with FlopCounterMode(display=False) as counter:
        out.backward()
    return counter.get_total_flops() / (2 * 16**3)


def selective(policy: Any, **options: Any) -> Any:
    return functools.partial(create_selective_checkpoint_contexts, policy, **options)


def saves_mm(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == mm else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("check", ["default", "values", "none"])
def test_flops_are_those_of_torch(check: str, early_stop: bool) -> None:
    options = {"early_stop": early_stop}
    ours = functools.partial(checkpoint, matmuls, determinism_check=check, **options)
    for _ in range(N_CALLS):
        # mm saves its inputs before it runs: early stop leaves out the last one
        assert matmuls_in_backward(matmuls) == 4
        assert matmuls_in_backward(ours) == (5 if early_stop else 6)
        for policy in ([mm], saves_mm, lambda ctx, op, *args, **kwargs: op == mm):
            context_fn = selective(policy)
            assert matmuls_in_backward(functools.partial(ours, context_fn=context_fn)) == 4
            assert matmuls_in_backward(functools.partial(of_torch, matmuls, context_fn=context_fn, **options)) == 4


def test_policy_runs_in_forward_only() -> None:
    seen: list[Any] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append((op, ctx.is_recompute))
        return CheckpointPolicy.PREFER_RECOMPUTE

    for _ in range(N_CALLS):
        seen.clear()
        (x,) = leaves((3,))
        checkpoint(lambda x: x.sin().cos().sin(), x, context_fn=selective(policy)).sum().backward()
        assert [op.__name__ for op, _ in seen] == ["sin.default", "cos.default", "sin.default"]
        assert not any(again for _, again in seen)


def test_saved_operators_run_once() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.sin()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    for _ in range(N_CALLS):
        (x,) = leaves((3,))
        with Operators() as seen:
            checkpoint(lambda x: Once.apply(x).exp() * 2, x, context_fn=selective([sin])).sum().backward()
        assert seen.names.count("sin.default") == 1


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_selective_is_exact(p: float, early_stop: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.dropout(torch.mm(x, w).sin(), p).exp() @ w

    call = functools.partial(checkpoint, function, context_fn=selective([mm]), early_stop=early_stop)
    assert_same_as_plain(function, call, (4, 4), (4, 4))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_noise_in_what_a_kernel_saves_is_no_error(kind: Any) -> None:
    layer = kind(4, 4, batch_first=True)

    def run(call: Any) -> list[Any]:
        layer.zero_grad()
        (x,) = leaves((2, 3, 4))
        out = call(lambda x: layer(x)[0] * 1.0, x)
        spoil = [torch.full((n,), 1e30) for n in range(1, 300)]
        del spoil
        out.square().sum().backward()
        return [x.grad, *[p.grad for p in layer.parameters()]]

    for _ in range(N_CALLS):
        mine = run(functools.partial(checkpoint, context_fn=selective([mm])))
        assert_equal(tuple(run(lambda f, x: f(x))), tuple(mine), "gradients")


def test_second_backward_raises_as_torchs_does() -> None:
    for _ in range(N_CALLS):
        (x,) = leaves((3,))
        out = checkpoint(lambda x: x.sin().cos().exp(), x, context_fn=selective([sin])).sum()
        out.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
            out.backward(retain_graph=True)


def mutates_what_is_cached(x: Tensor) -> Tensor:
    return x.sin().mul_(2).cos().exp()


def test_cached_tensor_that_is_changed_raises_as_torchs_does() -> None:
    for _ in range(N_CALLS):
        (x,) = leaves((3,))
        out = checkpoint(mutates_what_is_cached, x, context_fn=selective([sin]))
        with pytest.raises(RuntimeError, match="has been mutated"):
            out.sum().backward()


def test_cached_tensor_that_may_be_changed_is_found_by_value() -> None:
    """torch gives another gradient than the plain run here; `determinism_check="none"` does as torch does."""
    context_fn = selective([sin], allow_cache_entry_mutation=True)
    gradients = []
    for call in (lambda f, x: f(x), functools.partial(of_torch, context_fn=context_fn)):
        (x,) = leaves((3,))
        call(mutates_what_is_cached, x).sum().backward()
        gradients.append(x.grad)
    assert not torch.equal(*gradients)  # type: ignore[arg-type]
    (x,) = leaves((3,))
    checkpoint(mutates_what_is_cached, x, context_fn=context_fn, determinism_check="none").sum().backward()
    assert torch.equal(gradients[1], x.grad)  # type: ignore[arg-type]
    (x,) = leaves((3,))
    out = checkpoint(mutates_what_is_cached, x, context_fn=context_fn, determinism_check="values")
    with pytest.raises(ckptdeco.ValueMismatch):
        out.sum().backward()


def test_nested_in_and_around_plain_checkpoints() -> None:
    def inner(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x, w).sin().exp()

    def outer(call: Any, x: Tensor, w: Tensor) -> Any:
        return call(inner, x.cos(), w) * x

    chosen = {"context_fn": selective([mm])}
    for outside, inside in (({}, chosen), (chosen, {})):
        call = functools.partial(checkpoint, **inside)
        assert_same_as_plain(
            functools.partial(outer, lambda f, *args: f(*args)),
            functools.partial(checkpoint, functools.partial(outer, call), **outside),
            (4, 4),
            (4, 4),
        )
