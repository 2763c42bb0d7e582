"""The user's own saved-tensor hooks and save_on_cpu, outside and inside the policy and inside a layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.support.layers import DIM, Layer, Stack, batch, stack
from tests.support.oracle import assert_same, total
from tests.support.subject import checkpointable


def test_save_on_cpu_outside(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with save_on_cpu(), context():
            out = model(*inputs)
        total(out).backward()
        return out

    assert_same(lambda: stack(6, p=0.2), program, lambda: (batch(),), under)


def test_save_on_cpu_inside_the_policy(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context(), save_on_cpu():
            out = model(*inputs)
            loss = total(out)
        loss.backward()
        return out

    assert_same(lambda: stack(6, p=0.2), program, lambda: (batch(),), under)


def test_hooks_that_change_the_representation(under: Any) -> None:
    """Lossless compression: what is packed is no tensor at all."""

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        def pack(t: torch.Tensor) -> tuple[Any, ...]:
            return t.detach().contiguous().numpy().tobytes(), t.dtype, t.shape, t.stride()

        def unpack(packed: tuple[Any, ...]) -> torch.Tensor:
            raw, dtype, shape, stride = packed
            values = torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
            return torch.empty_strided(shape, stride, dtype=dtype).copy_(values)

        with saved_tensors_hooks(pack, unpack), context():
            out = model(*inputs)
        total(out).backward()
        return out

    assert_same(lambda: stack(6), program, lambda: (batch(),), under)


class HooksInside(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(lambda t: [t], lambda packed: packed[0]):
            h = torch.tanh(self.one(x))
        return self.two(h) * h


def test_hooks_inside_a_layer(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        total(out).backward()
        return out

    assert_same(lambda: Stack([HooksInside() for _ in range(5)]), program, lambda: (batch(),), under)


def test_torch_checkpoint_around_the_model(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = torch.utils.checkpoint.checkpoint(model, *inputs, use_reentrant=False)
            total(out).backward()
        return out

    assert_same(lambda: stack(5), program, lambda: (batch(),), under)


def test_torch_checkpoint_around_the_model_with_its_recompute_outside_the_policy(under: Any) -> None:
    """torch runs the model again in backward, where no policy is active: exact, or an error with no wrong cause."""

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = torch.utils.checkpoint.checkpoint(model, *inputs, use_reentrant=False)
        total(out).backward()
        return out

    try:
        assert_same(lambda: stack(5), program, lambda: (batch(),), under)
    except torch.utils.checkpoint.CheckpointError as error:
        assert "inplace" not in str(error), str(error)  # noqa: PT017


class TorchCheckpointInside(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(self.one(t)), x, use_reentrant=False)
        return self.two(h) * h


def test_torch_checkpoint_inside_a_layer(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        total(out).backward()
        return out

    assert_same(lambda: Stack([TorchCheckpointInside() for _ in range(5)]), program, lambda: (batch(),), under)


def test_checkpointed_model_inside_a_larger_plain_graph_with_its_own_hooks(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        seen: list[int] = []
        with saved_tensors_hooks(lambda t: (seen.append(1), t)[1], lambda t: t):
            x = inputs[0].sin()
        with context():
            out = model(x)
        with saved_tensors_hooks(lambda t: (seen.append(1), t)[1], lambda t: t):
            loss = total(out.cos())
        loss.backward()
        return out, len(seen)

    assert_same(lambda: stack(5), program, lambda: (batch(),), under)
