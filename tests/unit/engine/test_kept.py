"""Kept tensors: checked by version, seen by hooks, shared, and a leaf is itself (R3, R27, R29)."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from ckptdeco.engine.kept import Kept, geometry, keep
from ckptdeco.engine.running import Frame


def exp_with_witness(x: torch.Tensor) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """`x.exp()`, and what dies with its node."""

    class Holder:
        value: torch.Tensor

    held: list[weakref.ref[Any]] = []

    def pack(tensor: torch.Tensor) -> Any:
        holder = Holder()
        holder.value = tensor.detach()
        held.append(weakref.ref(holder))
        return holder

    with saved_tensors_hooks(pack, lambda holder: holder.value):
        y = x.exp()
    return y, held[0]


def test_kept_tensor_comes_back_with_its_values() -> None:
    x = torch.randn(3, requires_grad=True).exp()
    kept = Kept(x)
    assert torch.equal(kept.get(), x)
    assert kept.get().data_ptr() == x.data_ptr()
    assert kept.n_bytes == 12


def test_change_in_place_raises_in_autograds_words() -> None:
    x = torch.randn(3)
    kept = Kept(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        kept.get()


def test_change_of_a_view_of_it_raises_too() -> None:
    x = torch.randn(3, 2)
    kept = Kept(x)
    x[0].zero_()
    with pytest.raises(RuntimeError, match="version"):
        kept.get()


def test_without_hooks_no_graph_is_held() -> None:
    """R27: a detached alias leads to no graph."""
    x, node = exp_with_witness(torch.randn(3, requires_grad=True))
    kept = Kept(x)
    assert node() is not None
    assert kept.node is None
    assert kept.tensor is not None
    assert kept.tensor.grad_fn is None
    del x
    gc.collect()
    assert node() is None


def test_hooks_of_the_user_see_it_packed_and_unpacked() -> None:
    packed, unpacked = [], []

    def pack(t: torch.Tensor) -> Any:
        packed.append(t.clone())
        return packed[-1]

    def unpack(t: Any) -> torch.Tensor:
        unpacked.append(t)
        return t

    x = torch.randn(3, requires_grad=True).exp()
    with saved_tensors_hooks(pack, unpack):
        kept = Kept(x)
    assert len(packed) == 1
    assert torch.equal(kept.get(), x)
    assert len(unpacked) == 1


def test_under_hooks_a_change_in_place_still_leaves_what_the_hook_kept() -> None:
    """As for autograd: what a hook copied away cannot be changed."""
    x = torch.randn(3)
    before = x.clone()
    with torch.autograd.graph.save_on_cpu():
        kept = Kept(x.requires_grad_().exp())
    assert torch.equal(kept.get(), before.exp())


def test_shared_tensor_is_kept_once() -> None:
    mask = torch.randn(3)
    one = keep(mask, None)
    assert keep(mask, None) is one


def test_changed_tensor_is_kept_anew() -> None:
    mask = torch.randn(3)
    one = keep(mask, None)
    mask.add_(1)
    assert keep(mask, None) is not one


def test_nested_calls_keep_their_own() -> None:
    mask = torch.randn(3)
    outside = keep(mask, None)
    frame = Frame([], again=False)
    inside = keep(mask, frame)
    assert inside is not outside
    assert keep(mask, frame) is inside
    assert keep(mask, Frame([], again=True)) is not inside


def test_register_keeps_nothing_alive() -> None:
    mask = torch.randn(3)
    gone = weakref.ref(keep(mask, None))
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("requires_grad", [True, False])
def test_leaf_that_is_alive_comes_back_as_itself(requires_grad: bool) -> None:
    leaf = torch.randn(3, requires_grad=requires_grad)
    assert Kept(leaf).get() is leaf


def test_parameter_is_not_on_the_bill() -> None:
    assert Kept(torch.nn.Parameter(torch.randn(3))).n_bytes == 0


def test_inference_tensor_is_kept_as_a_plain_reference() -> None:
    """R17."""
    with torch.inference_mode():
        x = torch.randn(3)
    assert Kept(x).get() is x


def test_geometry_tells_views_conjugates_and_versions_apart() -> None:
    y = torch.randn(4, 4, dtype=torch.complex64)
    others = [y.t(), y[:2], y[1:], y.conj(), y.view(16), torch.view_as_real(y), y.clone()]
    seen = {geometry(t) for t in (y, *others)}
    assert len(seen) == len(others) + 1
    assert geometry(y.detach()) == geometry(y)
    before = geometry(y)
    y.add_(1)
    assert geometry(y) != before
