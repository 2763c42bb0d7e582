"""Under no_grad, and in inference mode, a decorated call is plain and free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import meters
from tests.support.layers import batch, stack


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_runs_each_layer_once_and_keeps_nothing(under: Any, mode: Any) -> None:
    model, x = stack(6), batch(64, requires_grad=False)
    with meters.count_forwards() as counter, meters.ByteMeter(model.parameters()) as meter, under(), mode():
        y = model(x)
    assert set(counter.values()) == {1}
    assert meter.live_bytes == y.untyped_storage().nbytes()
    assert torch.equal(y, model(x))


def test_no_grad_result_needs_no_gradient(under: Any) -> None:
    model, x = stack(4), batch()
    with under(), torch.no_grad():
        y = model(x)
    assert not y.requires_grad
    with under():
        z = model(y)
    z.sum().backward()
    assert x.grad is None
