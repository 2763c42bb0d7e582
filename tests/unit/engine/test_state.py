"""Module state: read at entry, put back for a recompute, left as it was afterwards (R11, R19)."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ckptdeco.engine.layer import Protection
from ckptdeco.engine.state import ModuleTree, Snapshot
from ckptdeco.engine.undo import Undo

NOTHING: frozenset[Any] = frozenset()


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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale = 2.0
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.zeros(20_000))  # so large that buffers are not cloned just in case


def snapshot(layer: nn.Module, written: frozenset[Any] = NOTHING, **known: bool) -> Snapshot:
    """The state at entry of a checked call; `known` is what earlier calls of the layer did."""
    protection = Protection()
    protection.written_buffers = written
    for name, value in known.items():
        setattr(protection, name, value)
    return Snapshot(ModuleTree(layer), layer, protection)


def recompute(shot: Snapshot) -> Any:
    return _put_back(shot, hide_grads=False)


def _put_back(shot: Snapshot, hide_grads: bool) -> Any:
    """Puts the state back; returns what leaves it again and tells whether attributes are as they were at entry."""
    undo = Undo()
    shot.put_back(undo, shot.is_untouched(), hide_grads)

    def leave() -> bool:
        is_stray = not shot.has_same_attributes()
        undo.run()
        return is_stray

    return leave


def test_flags_are_put_back_and_left_as_they_were() -> None:
    layer = Layer()
    shot = snapshot(layer)
    layer.eval()
    layer.linear.weight.requires_grad_(False)
    leave = recompute(shot)
    assert layer.training
    assert layer.norm.training
    assert layer.linear.weight.requires_grad
    leave()
    assert not layer.training
    assert not layer.norm.training
    assert not layer.linear.weight.requires_grad


def test_attribute_that_was_changed_is_put_back() -> None:
    layer = Layer()
    shot = snapshot(layer)
    layer.scale = 3.0
    leave = recompute(shot)
    assert layer.scale == 2.0
    leave()
    assert layer.scale == 3.0


def test_attribute_that_was_added_is_away_meanwhile() -> None:
    layer = Layer()
    shot = snapshot(layer)
    layer.extra = 1
    leave = recompute(shot)
    assert not hasattr(layer, "extra")
    leave()
    assert layer.extra == 1


def test_attribute_that_was_removed_is_there_meanwhile() -> None:
    layer = Layer()
    shot = snapshot(layer)
    del layer.scale
    leave = recompute(shot)
    assert layer.scale == 2.0
    leave()
    assert not hasattr(layer, "scale")


def test_attributes_of_a_torch_module_are_put_back_too() -> None:
    layer = Layer()
    shot = snapshot(layer)
    layer.norm.momentum = 0.5
    leave = recompute(shot)
    assert layer.norm.momentum == 0.1
    leave()
    assert layer.norm.momentum == 0.5


def test_what_the_recompute_writes_on_the_module_goes() -> None:
    """R23: a tensor that the layer stores on itself would keep the recompute's graph."""
    layer = Layer()
    layer.last = torch.zeros(1)
    shot = snapshot(layer)
    leave = recompute(shot)
    value = torch.randn(2, requires_grad=True).exp()
    gone = weakref.ref(value)
    layer.last = value
    layer.another = 1
    leave()
    del value
    gc.collect()
    assert gone() is None
    assert torch.equal(layer.last, torch.zeros(1))
    assert not hasattr(layer, "another")


def test_stored_tensor_keeps_no_graph_in_the_snapshot() -> None:
    layer = Layer()
    layer.last, node = exp_with_witness(torch.randn(2, requires_grad=True))
    shot = snapshot(layer, replaces_attributes=True)
    assert node() is not None
    layer.last = None
    shot.attribute_change()  # the call is over
    gc.collect()
    assert node() is None
    leave = recompute(shot)
    assert layer.last.requires_grad
    leave()


def test_replaced_parameter_is_back_for_the_recompute() -> None:
    layer = Layer()
    first = layer.linear.weight
    shot = snapshot(layer)
    second = nn.Parameter(torch.randn(2, 2))
    layer.linear.weight = second
    assert shot.changed_parameter() is None
    leave = recompute(shot)
    assert layer.linear.weight is first
    leave()
    assert layer.linear.weight is second


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer: layer.linear.bias.detach().add_(1), "linear.bias"),
        (lambda layer: layer.linear.weight.detach().zero_(), "linear.weight"),
        (lambda layer: setattr(layer.linear.weight, "data", torch.randn(2, 2)), "linear.weight"),
        (lambda layer: layer.count.add_(1), "count"),
        (lambda layer: layer.norm.running_mean.add_(1), "norm.running_mean"),
    ],
    ids=["bias", "in place", "data", "buffer", "nested buffer"],
)
def test_changed_parameter_or_buffer_is_named(change: Any, name: str) -> None:
    layer = Layer()
    shot = snapshot(layer)
    assert shot.is_untouched()
    assert shot.changed_parameter() is None
    change(layer)
    assert not shot.is_untouched()
    assert shot.changed_parameter() == name


def test_written_buffers_are_named_with_their_siblings() -> None:
    """A kernel that writes several may count a version for one only."""
    layer = Layer()
    shot = snapshot(layer)
    assert shot.written_buffers() == set()
    layer.norm(torch.randn(4, 2))
    owner = id(layer.norm._buffers)
    assert {(owner, "running_mean"), (owner, "running_var"), (owner, "num_batches_tracked")} <= shot.written_buffers()
    assert (id(layer._buffers), "count") not in shot.written_buffers()


def test_replaced_buffer_counts_as_written() -> None:
    layer = Layer()
    shot = snapshot(layer)
    layer.count = layer.count + 1
    assert (id(layer._buffers), "count") in shot.written_buffers()


def test_recompute_writes_to_clones_of_the_buffers_of_entry() -> None:
    layer = Layer()
    written = frozenset({(id(layer._buffers), "count")})
    shot = snapshot(layer, written)
    buffer = layer.count
    layer.count.add_(5)
    assert shot.changed_parameter() is None
    for _ in range(2):  # each recompute has a clone of its own
        leave = recompute(shot)
        assert layer.count is not buffer
        assert layer.count == 0
        layer.count.add_(1)
        leave()
        assert layer.count is buffer
        assert layer.count == 5


def test_nothing_is_done_where_nothing_changed() -> None:
    layer = Layer()
    shot = snapshot(layer)
    before = dict(layer.__dict__)
    recompute(shot)()
    assert layer.__dict__ == before


def test_tree_keeps_no_module_alive() -> None:
    layer = Layer()
    tree = ModuleTree(layer)
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
    assert tree.has_large_buffers


def test_module_that_was_added_is_found() -> None:
    layer = Layer()
    tree = ModuleTree(layer)
    n_before = len(tree.modules(layer))
    layer.other = nn.Linear(2, 2)
    assert len(tree.modules(layer)) == n_before + 1


def test_buffer_values_see_a_write_without_a_version() -> None:
    layer = Layer()
    shot = snapshot(layer)
    before = shot.buffer_values()
    layer.count.data.add_(1)
    after = shot.buffer_values()
    assert [key[1] for key in after if after[key] != before[key]] == ["count"]
    assert all(name != "weight" for _, name in after)


def test_small_buffers_are_cloned_whether_the_layer_writes_them_or_not() -> None:
    """Kernels such as batch_norm write buffers without a trace."""
    layer = nn.BatchNorm1d(2)
    shot = snapshot(layer)
    layer.running_mean.data.add_(1)
    assert shot.changed_parameter() is None
    leave = recompute(shot)
    assert torch.equal(layer.running_mean, torch.zeros(2))
    leave()
    assert torch.equal(layer.running_mean, torch.ones(2))


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda layer: None, ""),
        (lambda layer: setattr(layer, "seen", [1]), "replaced"),
        (lambda layer: layer.seen.append(1), "changed in place"),
        (lambda layer: layer.table_of["a"].append(1), "changed in place"),
        (lambda layer: layer.memory.add_(1), "changed in place"),
    ],
    ids=["nothing", "replaced", "list", "nested list", "tensor"],
)
def test_what_a_call_did_to_attributes_is_known(write: Any, expected: str) -> None:
    layer = Layer()
    layer.seen, layer.table_of, layer.memory = [], {"a": []}, torch.zeros(2)
    shot = snapshot(layer)
    write(layer)
    assert shot.attribute_change() == expected


def test_list_that_the_layer_changes_in_place_is_as_at_entry_in_each_recompute() -> None:
    layer = Layer()
    layer.seen = [1]
    shot = snapshot(layer, mutates_attributes=True)
    kept = layer.seen
    layer.seen.append(2)
    shot.attribute_change()
    for _ in range(2):
        leave = recompute(shot)
        assert layer.seen == [1]
        layer.seen.append(3)
        leave()
        assert layer.seen is kept
        assert layer.seen == [1, 2]


def test_gradients_are_hidden_from_a_backward_within_the_layer() -> None:
    layer = Layer()
    grad = layer.linear.weight.grad = torch.ones(2, 2)
    shot = snapshot(layer)
    leave = _put_back(shot, hide_grads=True)
    assert layer.linear.weight.grad is None
    layer.linear.weight.grad = torch.zeros(2, 2)
    leave()
    assert layer.linear.weight.grad is grad


def test_leaving_tells_whether_attributes_were_left_changed() -> None:
    layer = Layer()
    shot = snapshot(layer)
    assert recompute(shot)() is False
    leave = recompute(shot)
    layer.scale = 5.0
    assert leave() is True
    assert layer.scale == 2.0
