"""The meter against bytes counted by hand, and against the allocator's own events."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ckptdeco.planning.meter import ActivationMeter, measure_step

FLOAT = 4


def allocator_peak_bytes(step: Callable[[], object], parameters: list[nn.Parameter]) -> int:
    """The same peak from the profiler's record of every allocation and release, scratch memory of kernels included."""
    for parameter in parameters:
        parameter.grad = None
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    allocations = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()))
    gradients = {p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None}
    last = {address: index for index, (_, address, n_bytes) in enumerate(allocations) if n_bytes > 0}
    live = peak = 0
    counted: dict[int, int] = {}
    for index, (_, address, n_bytes) in enumerate(allocations):
        if n_bytes < 0:
            live -= counted.pop(address, 0)  # 0: was there before the step, or a gradient
        elif not (address in gradients and last[address] == index):
            counted[address] = n_bytes
            live += n_bytes
            peak = max(peak, live)
    return peak


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes) of each allocation (positive) and release (negative) in the profiler's tree."""
    for event in events:
        if event.typed[0].name == "Allocation":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _allocations(event.children)


class Mlp(nn.Module):
    def __init__(self, n_layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(n_layers))

    def forward(self, x: torch.Tensor, checkpointed: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return (
            x.square().mean()
        )  # not sum: its gradient is a view, which the next kernel copies out of the meter's sight


def test_bytes_after_forward_and_peak_are_those_counted_by_hand() -> None:
    x = torch.randn(100, requires_grad=True)

    def forward() -> torch.Tensor:
        hidden = x.exp()  # saved: exp keeps its output, 400 bytes
        scaled = hidden * 2.0  # not saved, freed when forward returns
        return scaled.cos().sum()  # cos saves `scaled`, sum saves nothing: 400 and the loss

    trace = measure_step(forward, [])
    assert trace.n_calls["aten.exp.default"] == 1
    assert trace.marks["backward"].live_bytes == 2 * 100 * FLOAT + FLOAT
    # forward: exp, scaled and cos at once, and sum's result while cos's is still there.
    turn = trace.marks["backward"].elapsed_s
    assert max(p.live_bytes for p in trace.timeline if p.elapsed_s <= turn) == 3 * 100 * FLOAT + FLOAT
    # backward: the two saved, the loss, its gradient of one float (expanded, not copied); and sin, -sin, their product.
    assert trace.peak_bytes == 5 * 100 * FLOAT + 2 * FLOAT


def test_parameter_gradients_parameters_and_the_batch_are_left_out() -> None:
    layer = nn.Linear(1000, 10, bias=False)  # gradient: 40 000 bytes
    x = torch.randn(2, 1000)
    trace = measure_step(lambda: layer(x).sum(), layer.parameters())
    assert layer.weight.grad is not None
    assert trace.peak_bytes < 1000
    assert trace.timeline[-1].live_bytes == FLOAT  # the loss, which the caller of backward holds


def test_gradient_accumulated_into_an_existing_one_counts_while_it_lives() -> None:
    layer = nn.Linear(1000, 10, bias=False)
    x = torch.randn(2, 1000)
    layer(x).sum().backward()
    with ActivationMeter(layer.parameters()) as meter:
        layer(x).sum().backward()
    assert meter.trace.peak_bytes >= 40_000
    assert meter.trace.timeline[-1].live_bytes < 1000


def test_views_and_in_place_results_are_counted_once() -> None:
    with ActivationMeter() as meter:
        x = torch.zeros(100)
        y = x.view(10, 10)
        y.add_(1)
        z = x[50:]
    assert meter.trace.peak_bytes == 100 * FLOAT
    del y, z


def test_a_tensor_made_from_python_numbers_is_counted() -> None:
    with ActivationMeter() as meter:
        x = torch.tensor([1.0, 2.0, 3.0])
    assert meter.trace.peak_bytes == x.untyped_storage().nbytes()


def test_a_resized_storage_counts_with_its_new_size() -> None:
    with ActivationMeter() as meter:
        x = torch.zeros(10)
        x.resize_(1000)
        meter.mark("large")
        del x
    assert meter.trace.marks["large"].live_bytes == 1000 * FLOAT
    assert meter.trace.timeline[-1].live_bytes == 0


def test_what_is_freed_after_the_step_changes_nothing() -> None:
    with ActivationMeter() as meter:
        x = torch.zeros(10)
    n_points = len(meter.trace.timeline)
    del x
    assert len(meter.trace.timeline) == n_points
    assert meter.trace.timeline[-1].live_bytes == 10 * FLOAT


def test_meter_keeps_no_storage_alive() -> None:
    gc.disable()
    try:
        with ActivationMeter() as meter:
            x = torch.zeros(10)
            storage = weakref.ref(x.untyped_storage())
            del x
            assert storage() is None
        assert meter.trace.timeline[-1].live_bytes == 0
    finally:
        gc.enable()


def test_random_stream_and_gradients_are_those_of_a_run_without_the_meter() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    measure_step(lambda: model(x).sum(), model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_peak_agrees_with_the_allocator_to_two_percent(checkpointed: bool) -> None:
    model = Mlp()
    x = torch.randn(2048, 64, requires_grad=True)
    parameters = list(model.parameters())
    measured = measure_step(lambda: model(x, checkpointed), parameters).peak_bytes
    expected = allocator_peak_bytes(lambda: model(x, checkpointed).backward(), parameters)
    assert measured == pytest.approx(expected, rel=0.02)


def test_recompute_is_seen_within_backward() -> None:
    model = Mlp(n_layers=4)
    x = torch.randn(256, 64, requires_grad=True)
    plain = measure_step(lambda: model(x), model.parameters())
    checkpointed = measure_step(lambda: model(x, checkpointed=True), model.parameters())
    kept = checkpointed.marks["backward"].live_bytes
    assert kept < plain.marks["backward"].live_bytes
    assert checkpointed.timeline[-1].n_operators > plain.timeline[-1].n_operators
    assert checkpointed.peak_bytes > kept
