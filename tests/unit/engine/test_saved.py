"""The slot that autograd holds in place of a saved tensor (R8, R21, R31)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptdeco.engine.probe import Probe
from ckptdeco.engine.saved import NO_TASK, is_parameter, unpack
from ckptdeco.errors import ModifiedTensorError


def test_held_tensor_is_given_back() -> None:
    value = torch.randn(3)
    saved = Probe().pack(value)
    assert saved.task == NO_TASK
    assert unpack(saved) is value
    assert saved.task != NO_TASK  # read while it was held


def test_held_tensor_that_was_changed_raises() -> None:
    """R21."""
    value = torch.randn(3)
    saved = Probe().pack(value)
    value.add_(1)
    with pytest.raises(ModifiedTensorError, match="modified by an inplace operation"):
        unpack(saved)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (nn.Parameter(torch.randn(2, 2)), True),
        (nn.Parameter(torch.randn(2, 2)).t(), True),
        (nn.Parameter(torch.randn(2, 2)) * 1, False),
        (torch.randn(2, 2, requires_grad=True), False),
        (torch.randn(2, 2).t(), False),
    ],
    ids=["parameter", "view of one", "computed from one", "leaf", "view"],
)
def test_parameters_and_their_views_are_alive_anyway(tensor: torch.Tensor, expected: bool) -> None:
    """R8, R29."""
    assert is_parameter(tensor) is expected


def test_handed_out_tensor_is_found_while_it_lives() -> None:
    """R31."""
    value = torch.randn(4, 6).t()[1:, ::2]
    saved = Probe().pack(value)
    saved.meta = value.shape, value.dtype, value.device
    assert saved.handed_out() is None
    saved.remember(value)
    found = saved.handed_out()
    assert found is not None
    assert torch.equal(found, value)
    assert found.data_ptr() == value.data_ptr()
    saved.value = None
    del value, found
    assert saved.handed_out() is None
