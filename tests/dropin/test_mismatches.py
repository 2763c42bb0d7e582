"""Contract 10: exceptions of the function, and recomputes that differ from forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import ckptdeco
from ckptdeco import checkpoint
from tests.dropin.comparing import N_CALLS, leaves
from tests.support.oracle import assert_equal

now: dict[str, Callable[[Tensor], Tensor]] = {}


def two(x: Tensor) -> Tensor:
    return x.sin().exp()


def three(x: Tensor) -> Tensor:
    return x.sin().exp().sin()


def two_of_other_shape(x: Tensor) -> Tensor:
    return x.sin() * torch.tensor([1.0, 2.0])


def two_of_other_dtype(x: Tensor) -> Tensor:
    return x.double().sin().exp().float()


@pytest.fixture(autouse=True)
def _no_function() -> Iterator[None]:
    yield
    now.clear()


def step(forward: Callable[[Tensor], Tensor], recompute: Callable[[Tensor], Tensor], **options: Any) -> Tensor:
    """The gradient, where the function is another one in the recompute."""
    (x,) = leaves((1,))
    now["function"] = forward
    out = checkpoint(lambda x: now["function"](x), x, **options)
    now["function"] = recompute
    out.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("check", ["default", "values", "none"])
@pytest.mark.parametrize(
    ("forward", "recompute", "words"),
    [
        (three, two, "A different number of tensors was saved"),
        (two, two_of_other_shape, "tensors have different metadata"),
        (two, two_of_other_dtype, "tensors have different metadata"),
    ],
)
def test_fewer_and_other_tensors_raise(forward: Any, recompute: Any, words: str, check: str, early_stop: bool) -> None:
    """R12: also with "none", before anything is handed out."""
    for _ in range(N_CALLS):
        with pytest.raises(torch.utils.checkpoint.CheckpointError, match=words) as caught:
            step(forward, recompute, determinism_check=check, early_stop=early_stop)
        assert isinstance(caught.value, ckptdeco.SavedTensorMismatch)


def test_more_tensors_raise_only_without_early_stop() -> None:
    for _ in range(N_CALLS):
        with pytest.raises(ckptdeco.SavedTensorMismatch, match="trying to save more tensors during recomputation"):
            step(two, three, early_stop=False)
        assert_equal(step(two, two), step(two, three), "grad")


def test_none_does_not_compare_values() -> None:
    other = lambda x: (x * 2).sin().exp()  # noqa: E731
    same_count = lambda x: (x + 0).sin().exp()  # noqa: E731
    with pytest.raises(ckptdeco.ValueMismatch):
        step(lambda x: (x * 3).sin().exp(), other, determinism_check="values")
    step(lambda x: (x * 3).sin().exp(), other, determinism_check="none")
    assert_equal(step(two, two), step(two, same_count), "grad")


@pytest.mark.parametrize("n_flips", [1, 2, 3])
def test_hidden_counter_is_noticed_by_value(n_flips: int) -> None:
    """Whatever it counts to: the runs that tell noise from wrong values move it on, too."""
    counter = [0]

    def function(x: Tensor) -> Tensor:
        counter[0] += 1
        return (x * (1 + counter[0] % (n_flips + 1))).tanh().exp()

    (x,) = leaves((4,))
    out = checkpoint(function, x, determinism_check="values")
    with pytest.raises(ckptdeco.ValueMismatch):
        out.sum().backward()


class Stop(Exception):
    """The function's own exception."""


def test_exceptions_of_the_function_pass_and_a_retry_starts_clean(early_stop: bool) -> None:
    fails = [True]

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        if fails[0]:
            raise Stop
        return y.exp().cos()

    (reference,) = leaves((4,))
    reference.sin().exp().cos().sum().backward()
    for _ in range(N_CALLS):
        (x,) = leaves((4,))
        fails[0] = True
        with pytest.raises(Stop):
            checkpoint(function, x, early_stop=early_stop)
        fails[0] = False
        out = checkpoint(function, x, early_stop=early_stop)
        fails[0] = True
        state = torch.get_rng_state()
        for _ in range(2):
            with pytest.raises(Stop):
                out.sum().backward()
            assert not ckptdeco.is_recomputing()
            assert x.grad is None
        assert torch.equal(state, torch.get_rng_state())
        fails[0] = False
        out.sum().backward()
        assert_equal(reference.grad, x.grad, "grad")


def test_graph_that_goes_backward_inside_a_failing_function_is_kept() -> None:
    """What the function saved before it raised serves whoever caught the exception."""
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x.sin().exp())
        raise Stop

    (x,) = leaves((4,))
    with pytest.raises(Stop):
        checkpoint(function, x)
    kept[0].sum().backward()
    (reference,) = leaves((4,))
    reference.sin().exp().sum().backward()
    assert_equal(reference.grad, x.grad, "grad")


def test_every_error_class_is_public() -> None:
    from ckptdeco import errors

    for name in errors.__all__:
        kind = getattr(errors, name)
        if issubclass(kind, Exception):
            assert getattr(ckptdeco, name) is kind
            assert name in ckptdeco.__all__
            assert issubclass(kind, torch.utils.checkpoint.CheckpointError)
