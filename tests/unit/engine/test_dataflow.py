"""Recognising what a layer call returned, and counting positions (R2, R14, R16, R17, R36)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ckptdeco.engine.dataflow import (
    Chain,
    Stamp,
    nodes_between,
    recognise,
    stamp_outputs,
    trace_inputs,
)
from ckptdeco.engine.running import Frame


def stamped(position: int = 0, chain: Chain | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Stamp]:
    """The output of a layer call."""
    y = torch.randn(4, 4, dtype=dtype, requires_grad=True).exp()
    (stamp,) = stamp_outputs([y], None, chain or Chain(), position, None)
    return y, stamp


def test_output_is_recognised_as_itself() -> None:
    y, stamp = stamped()
    assert recognise(y) == (stamp, True)


@pytest.mark.parametrize(
    "same", [lambda y: y.view(y.shape), lambda y: y.view_as(y), lambda y: y[...]], ids=["view", "view_as", "ellipsis"]
)
def test_identity_views_are_recognised(same: Callable[[Tensor], Tensor]) -> None:
    y, stamp = stamped()
    assert recognise(same(y)) == (stamp, True)


@pytest.mark.parametrize(
    "other",
    [
        lambda y: y + 0,
        lambda y: y.clone(),
        lambda y: y.t(),
        lambda y: y[:2],
        lambda y: y.view(2, 8),
        lambda y: y * 1,
    ],
    ids=["add", "clone", "transposed", "slice", "reshaped", "times"],
)
def test_other_values_are_not(other: Callable[[Tensor], Tensor]) -> None:
    y, _ = stamped()
    assert not recognise(other(y))[1]


def test_conjugate_is_another_value() -> None:
    """R17: it has the storage, shape, strides and version of what it conjugates."""
    y, _ = stamped(dtype=torch.complex64)
    assert not recognise(y.conj())[1]
    assert recognise(y)[1]


@pytest.mark.parametrize("cut", [Tensor.detach, lambda y: y.detach().requires_grad_(), lambda y: y.data])
def test_detached_tensor_does_not_continue_the_graph(cut: Callable[[Tensor], Tensor]) -> None:
    """R14."""
    y, _ = stamped()
    assert recognise(cut(y)) == (None, False)
    assert trace_inputs([cut(y)], None).chain is None


def test_result_of_no_grad_does_not_continue_the_graph() -> None:
    """R14."""
    y, _ = stamped()
    with torch.no_grad():
        assert recognise(y.view(y.shape)) == (None, False)


def test_swapped_data_is_another_value() -> None:
    y, stamp = stamped()
    y.data = torch.randn(4, 4)
    assert recognise(y) == (stamp, False)


def test_output_changed_in_place_is_another_value() -> None:
    y, _ = stamped()
    y.add_(1)
    found, unchanged = recognise(y)
    assert not unchanged
    upstream = trace_inputs([y], None)
    assert upstream.stamps == [None]
    assert upstream.position == 0
    assert upstream.broken_by
    assert found is not None or upstream.chain is not None


def test_write_by_a_view_changes_it() -> None:
    y, _ = stamped()
    y.detach()[0].zero_()
    assert not recognise(y)[1]


def test_subclass_is_recognised_as_object_only() -> None:
    class Sub(torch.Tensor):
        pass

    y = torch.randn(4, requires_grad=True).exp().as_subclass(Sub)
    (stamp,) = stamp_outputs([y], None, Chain(), 0, None)
    assert stamp.geometry is None
    assert recognise(y) == (stamp, True)
    assert not recognise(y.view(y.shape))[1]


def test_outputs_of_one_node_are_told_apart() -> None:
    a, b = torch.randn(4, 2, requires_grad=True).exp().unbind(1)
    first, second = stamp_outputs([a, b], None, Chain(), 0, None)
    assert recognise(a) == (first, True)
    assert recognise(b) == (second, True)


def test_output_that_was_only_passed_through_stays_its_producers() -> None:
    y, stamp = stamped()
    assert stamp_outputs([y], None, Chain(), 1, None) == []
    assert recognise(y) == (stamp, True)


def test_output_without_graph_gets_no_stamp() -> None:
    assert stamp_outputs([torch.randn(3)], None, Chain(), 0, None) == []


def test_stamp_keeps_no_tensor_alive() -> None:
    """R15."""
    y, stamp = stamped()
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None
    assert stamp.tensor() is None


def test_position_is_found_through_operations_between_layers() -> None:
    """R36."""
    chain = Chain()
    y, _ = stamped(5, chain)
    upstream = trace_inputs([(y * 2 + 1).tanh()], None)
    assert upstream.chain is chain
    assert upstream.position == 5
    assert upstream.stamps == [None]
    assert "Tanh" in upstream.broken_by


def test_search_is_bounded() -> None:
    """R36: what is far upstream is another chain."""
    y, _ = stamped(5)
    for _ in range(200):
        y = y + 1
    assert trace_inputs([y], None).chain is None


def test_furthest_of_several_inputs_gives_the_position() -> None:
    chain = Chain()
    near, _ = stamped(2, chain)
    far, stamp = stamped(7, chain)
    upstream = trace_inputs([near, far], None)
    assert upstream.position == 7
    assert upstream.stamps[1] is stamp


def test_calls_of_another_frame_are_not_seen() -> None:
    y, _ = stamped()
    assert trace_inputs([y], Frame([], again=False)).chain is None
    frame = Frame([], again=False)
    z = torch.randn(3, requires_grad=True).exp()
    stamp_outputs([z], None, Chain(), 0, frame)
    assert trace_inputs([z], None).chain is None
    assert trace_inputs([z], frame).chain is not None


def test_nodes_of_a_call_are_those_between_its_inputs_and_outputs() -> None:
    x = torch.randn(3, requires_grad=True) * 2
    h = x.exp()
    y = h.sin() + h
    names = sorted(node.name() for node in nodes_between([y], [x]))
    assert names == ["AddBackward0", "ExpBackward0", "SinBackward0"]
    assert list(nodes_between([torch.randn(3)], [x])) == []
