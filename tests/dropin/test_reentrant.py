"""Contract 2: `use_reentrant=True` is torch's own, bound at import, with its restrictions."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.utils.checkpoint

from ckptdeco import checkpoint
from tests.dropin.comparing import leaves


def test_it_is_torchs_reentrant_function() -> None:
    (x,) = leaves((3,))
    out = checkpoint(lambda x: x.sin().exp(), x, use_reentrant=True)
    assert "CheckpointFunction" in out.grad_fn.name()
    (reference,) = leaves((3,))
    reference.sin().exp().sum().backward()
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, reference.grad)  # type: ignore[arg-type]


def test_it_is_bound_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped in for torch's function, it does not call itself."""
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    (x,) = leaves((3,))
    out = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True)
    assert "CheckpointFunction" in out.grad_fn.name()


def test_unknown_keywords_are_a_value_error() -> None:
    (x,) = leaves((3,))
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        checkpoint(lambda x, scale: x * scale, x, use_reentrant=True, scale=2)


@pytest.mark.parametrize(
    "options",
    [{"debug": True}, {"context_fn": lambda: (contextlib.nullcontext(), contextlib.nullcontext())}],
    ids=["debug", "context_fn"],
)
def test_debug_and_context_fn_are_errors(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        checkpoint(torch.sin, *leaves((3,)), use_reentrant=True, **options)  # type: ignore[arg-type]


def test_its_restriction_on_autograd_grad_stays() -> None:
    (x,) = leaves((3,))
    out = checkpoint(torch.exp, x, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint is incompatible"):
        torch.autograd.grad(out, x)


def test_preserve_rng_state_is_passed_on() -> None:
    draws: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        draws.append(torch.rand(3))
        return x * draws[-1]

    for preserve in (True, False):
        draws.clear()
        checkpoint(function, *leaves((3,)), use_reentrant=True, preserve_rng_state=preserve).sum().backward()
        assert torch.equal(*draws) is preserve
