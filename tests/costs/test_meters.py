"""The meters against figures worked out by hand: a meter that cannot be wrong proves nothing."""

from __future__ import annotations

import torch
from torch import nn

from tests.costs.test_counts import longest_walk
from tests.support import meters
from tests.support.layers import batch, stack

KIB = 256  # float32 values


def test_live_and_peak_bytes_of_a_known_sequence() -> None:
    before = torch.ones(KIB)
    with meters.ByteMeter() as meter:
        a = before * 2
        b = a + 1
        del a
        c = b.view(2, -1)  # a view is no new storage
        assert (meter.live_bytes, meter.peak_bytes) == (1024, 2048)
        del b
        assert meter.live_bytes == 1024
        del c
        assert meter.live_bytes == 0
    assert meter.timeline() == [1024, 2048, 1024, 0]


def test_views_and_in_place_results_of_older_tensors_are_not_counted() -> None:
    before = torch.ones(KIB)
    with meters.ByteMeter() as meter:
        views = [before[1:], before.view(16, -1), before.detach(), before.add_(1)]
        assert meter.live_bytes == 0
        assert len(views) == 4


def test_gradients_of_parameters_are_left_out_and_those_of_inputs_are_not() -> None:
    layer, x = nn.Linear(16, 16), torch.ones(16, 16, requires_grad=True)
    with meters.ByteMeter(layer.parameters()) as meter:
        layer(x).sum().backward()
        assert layer.weight.grad is not None
        assert meter.live_bytes == 16 * 16 * 4, "the input's gradient only"


def test_matmuls_of_a_linear_layer() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with meters.MatmulCounter() as counter:
        layer(x).sum().backward()
    assert counter.n_matmuls == 3


def test_forwards_and_saved_bytes() -> None:
    model = stack(2)
    with meters.count_forwards() as counter:
        model(batch())
        model(batch())
    assert counter == {"0": 2, "1": 2}
    x = torch.ones(KIB, requires_grad=True)
    assert sorted(meters.saved_storages(nn.Identity(), lambda: (x * 2).tanh().exp()).values()) == [1024, 1024]


def test_longest_walk_reads_the_log() -> None:
    assert longest_walk(["B2", "F0", "F1", "F2", "B1", "B0"]) == 3
    assert longest_walk(["B1", "F1", "B0", "F0"]) == 1
    assert longest_walk([]) == 0
