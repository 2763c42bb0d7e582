"""Contract 16: DDP and FSDP on one process; DataParallel on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckptdeco import checkpoint
from tests.dropin.comparing import N_CALLS
from tests.support.oracle import assert_equal

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(nn.functional.dropout(self.one(x), 0.2).sin().exp())


class Net(nn.Module):
    """The first layer is used twice, the last shares a weight with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.call: Any = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = self.call(layer, x)
        return x


def gradients(model: nn.Module, parameters: list[Any], seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    model.zero_grad()
    x = torch.randn(2, 4)
    model(x).square().sum().backward()
    grads = [p.grad for p in parameters]
    return tuple(g if g is None or not hasattr(g, "to_local") else g.to_local() for g in grads)


def check(plain: nn.Module, other: nn.Module) -> None:
    for seed in range(N_CALLS):
        expected = gradients(plain, list(plain.parameters()), seed)
        assert_equal(expected, gradients(other, list(other.parameters()), seed), f"step {seed}")


@pytest.mark.parametrize("shares_weights", [False, True])
def test_ddp_with_unused_parameters_and_a_layer_used_twice(shares_weights: bool) -> None:
    plain = Net()
    if shares_weights:
        plain.layers[2].one.weight = plain.layers[0].one.weight  # type: ignore[union-attr]
    other = copy.deepcopy(plain)
    other.call = checkpoint
    check(plain, DistributedDataParallel(other, find_unused_parameters=True))


def test_data_parallel() -> None:
    plain = Net()
    other = copy.deepcopy(plain)
    other.call = checkpoint
    check(plain, DataParallel(other))
    whole = DataParallel(copy.deepcopy(plain))
    for seed in range(N_CALLS):
        expected = gradients(plain, list(plain.parameters()), seed)
        torch.manual_seed(seed)
        whole.zero_grad()
        checkpoint(whole, torch.randn(2, 4)).square().sum().backward()
        assert_equal(expected, tuple(p.grad for p in whole.parameters()), f"step {seed}")


PLACES = ["around the sharded layer", "inside of it", "in a wrapper that is sharded", "the root alone is sharded"]


@pytest.mark.parametrize("place", PLACES)
def test_fsdp2(place: str) -> None:
    """Weights are gathered, freed and gathered again, elsewhere, by hooks around the call or around the layer."""
    plain = Net()
    other = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1,))
    if place in (PLACES[0], PLACES[3]):
        other.call = checkpoint
    for i, layer in enumerate(other.layers):
        if place == PLACES[1]:
            forward = layer.forward
            layer.forward = lambda x, forward=forward: checkpoint(forward, x)  # type: ignore[method-assign]
        elif place == PLACES[2]:
            other.layers[i] = checkpoint_wrapper(layer, checkpoint_fn=checkpoint)
        if place != PLACES[3]:
            fully_shard(other.layers[i], mesh=mesh, reshard_after_forward=True)
    fully_shard(other, mesh=mesh, reshard_after_forward=True)
    check(plain, other)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("place", PLACES[:3:2])
def test_fsdp1(place: str, use_orig_params: bool) -> None:
    """Against FSDP without checkpoints: it gives unused parameters a gradient of zeros."""
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    wrapped = []
    for net, is_checked in zip(nets, (False, True), strict=True):
        if is_checked and place == PLACES[0]:
            net.call = checkpoint
        for i, layer in enumerate(net.layers):
            inner = checkpoint_wrapper(layer, checkpoint_fn=checkpoint) if is_checked and place == PLACES[2] else layer
            net.layers[i] = FullyShardedDataParallel(
                inner, device_id=torch.device("cpu"), use_orig_params=use_orig_params
            )
        wrapped.append(FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=use_orig_params))
    check(*wrapped)
