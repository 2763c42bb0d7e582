"""A recompute is compared with forward by value, not by what the outputs happen to show (R12)."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import ckptdeco

hidden = {"sign": 1.0}


@ckptdeco.checkpointable
def even(x: Tensor) -> Tensor:
    """Its output does not depend on the sign, its gradient does."""
    return (x * hidden["sign"]).pow(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_changed_hidden_input_is_noticed_although_the_outputs_are_the_same(dtype: torch.dtype) -> None:
    hidden["sign"] = 1.0
    x = torch.randn(4, 4, dtype=dtype, requires_grad=True)
    with ckptdeco.policy(segment=1, determinism_check="values"):
        loss = even(x).sum()
        hidden["sign"] = -1.0
        with pytest.raises(ckptdeco.CheckpointError):
            loss.backward()


class Plain(nn.Linear):
    @ckptdeco.checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp().sin()


def test_output_that_the_user_stores_on_the_layer_keeps_no_earlier_one_alive() -> None:
    """R15, R23: as in plain, one output is alive."""
    layer, outputs = Plain(3, 3), []
    layer.last = None
    with ckptdeco.policy(segment=1):
        for _ in range(5):
            y = layer(torch.randn(2, 3))
            outputs.append(weakref.ref(y))
            layer.last = y
    del y
    gc.collect()
    assert sum(output() is not None for output in outputs) == 1
