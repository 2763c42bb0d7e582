"""With `save=` no selected kernel runs in a recompute, and memory is what it says: counted, not timed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import Block
from tests.selective.conftest import MORE
from tests.selective.test_saved_operations import PRODUCTS, under_autocast
from tests.support.inside import Inner, Runs, attention, stack_of
from tests.support.layers import DIM, Stack
from tests.support.meters import step_peak_bytes
from tests.support.subject import checkpointable, policy

KERNELS = frozenset(
    {
        "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution", "aten._trilinear",
        "aten._scaled_dot_product_flash_attention_for_cpu",
    }
)  # fmt: skip


class Kernels(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def n_kernels(self) -> int:
        return sum(self.counts[name] for name in KERNELS)


def counted(model: nn.Module, made: Any, x: Tensor, n_steps: int = 3) -> Kernels:
    """What one step ran, after some others."""
    for _ in range(n_steps):
        with Kernels() as kernels:
            with made:
                out = model(x)
            out.square().sum().backward()
    return kernels


COUNTED = {
    name: PRODUCTS[name]
    for name in (
        "linear", "returned", "attention", "attention last", "bmm", "einsum of three", "einsum of three last",
        "broadcast",
        "methods", "convolution", "transposed convolution", "bilinear", "tied", "of one tensor", "expanded",
    )
} | {"autocast": under_autocast()}  # fmt: skip
STOPPING = {name: options for name, options in MORE.items() if "early_stop" not in options}


@pytest.mark.parametrize("options", STOPPING.values(), ids=STOPPING)
@pytest.mark.parametrize("function", COUNTED.values(), ids=COUNTED)
def test_no_product_is_run_again(function: Any, options: Any) -> None:
    model, x = stack_of(function), torch.randn(4, DIM, requires_grad=True)
    plain = counted(model, policy(None), x, 1)
    assert plain.n_kernels > 0
    assert counted(model, policy(save="matmuls", **options), x, 2).n_kernels == plain.n_kernels


@pytest.mark.parametrize("shape", [(DIM, DIM), (2, 4, DIM)], ids=str)
def test_no_product_is_run_again_under_autocast(shape: Any) -> None:
    model, x = stack_of(under_autocast()), torch.randn(shape, requires_grad=True)
    plain = counted(model, policy(None), x, 1).n_kernels
    assert counted(model, policy(save="matmuls", segment=3), x).n_kernels == plain


def test_the_count_notices_products_that_are_run_again() -> None:
    model, x = stack_of(PRODUCTS["linear"]), torch.randn(4, DIM, requires_grad=True)
    plain = counted(model, policy(None), x, 1).n_kernels
    assert counted(model, policy(segment=1), x).n_kernels == plain + 3
    assert counted(model, policy(segment=1, save="*.other"), x).n_kernels == plain + 3


def test_operations_that_changed_are_run_again() -> None:
    model, x = stack_of(lambda s, x: x + s.two(s.one(x).relu_())), torch.randn(4, DIM, requires_grad=True)
    plain = counted(model, policy(None), x, 1).n_kernels
    assert counted(model, policy(save="matmuls"), x).n_kernels == plain + 3


def test_dropout_and_named_results_are_not_run_again() -> None:
    from ckptdeco import checkpoint_name

    model = stack_of(lambda s, x: x + checkpoint_name(F.gelu(F.dropout(s.one(x), 0.3)), "h").sin())
    x = torch.randn(4, DIM, requires_grad=True)
    plain = counted(model, policy(None), x, 1).counts
    for save, name in ((F.dropout, "aten.bernoulli_"), ("h", "aten.gelu")):
        assert plain[name] == 3
        assert counted(model, policy(save=save, segment=2), x).counts[name] == 3, save
    assert counted(model, policy(save="other", segment=2), x).counts["aten.gelu"] > 3


def test_a_selected_layer_is_not_run_again() -> None:
    model = stack_of(lambda s, x: x + s.two(s.inner(x)).sin(), lambda s, x: F.gelu(s.linear(x)))
    x = torch.randn(4, DIM, requires_grad=True)
    plain = counted(model, policy(None), x, 1).counts
    assert counted(model, policy(save=Inner, segment=3), x).counts["aten.gelu"] == plain["aten.gelu"] == 3
    assert counted(model, policy(segment=1), x).counts["aten.gelu"] == 6


class Gpt(Block):
    forward = checkpointable(Block.forward)


@pytest.fixture(scope="module")
def blocks() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Stack([Gpt(32, 2) for _ in range(24)]), torch.randn(2, 16, 32, requires_grad=True)


def peak(model: nn.Module, x: Tensor, **options: Any) -> int:
    made = policy(**options) if options else policy(None)

    def step() -> None:
        with made:
            out = model(x)
        out.square().mean().backward()

    step()
    return step_peak_bytes(model, step)


def test_blocks_of_a_language_model_keep_two_thirds_of_their_memory(blocks: Any) -> None:
    model, x = blocks
    plain = peak(model, x)
    assert peak(model, x, save="matmuls") <= 0.65 * plain
    assert peak(model, x, segment=1) < peak(model, x, save="matmuls")


@pytest.mark.parametrize("options", STOPPING.values(), ids=STOPPING)
def test_peak_of_blocks_is_below_the_plain_peak(blocks: Any, options: Any) -> None:
    model, x = blocks
    assert peak(model, x, save="matmuls", **options) < peak(model, x)


class Bottleneck(nn.Module):
    """Convolutions and relu, which keep their results anyway: little to gain, nothing to lose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4 * width, width, 1), nn.Conv2d(width, width, 3, padding=1)
        self.three = nn.Conv2d(width, 4 * width, 1)

    @checkpointable
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.three(F.relu(self.two(F.relu(self.one(x))))))


def test_calls_that_would_gain_nothing_are_stored() -> None:
    from ckptdeco import explain

    model, x = nn.Sequential(*[Bottleneck(4) for _ in range(8)]), torch.randn(2, 16, 8, 8)
    for _ in range(3):
        with policy(save="matmuls"):
            out = model(x)
        out.sum().backward()
        calls = explain().calls
        assert {call.why for call in calls} == {"what save= would keep of it is about as much as what it would drop"}
        assert [call.n_recomputed for call in calls] == [0] * 8


@pytest.mark.parametrize("options", STOPPING.values(), ids=STOPPING)
def test_peak_of_convolutions_without_norm_is_not_above_the_plain_peak(options: Any) -> None:
    model, x = nn.Sequential(*[Bottleneck(4) for _ in range(8)]), torch.randn(2, 16, 8, 8)
    assert peak(model, x, save="matmuls", **options) <= peak(model, x)


@pytest.mark.parametrize("options", STOPPING.values(), ids=STOPPING)
def test_nothing_is_left_after_backward(options: Any) -> None:
    import gc
    import weakref

    results: list[Any] = []

    def function(s: Runs, x: Tensor) -> Tensor:
        h = s.one(x)
        results.append(weakref.ref(h.untyped_storage()))
        return s.two(F.gelu(h)) + attention(s, h)

    model = stack_of(function)
    gc.disable()
    try:
        for _ in range(3):
            with policy(save="matmuls", **options):
                out = model(torch.randn(4, DIM))
            out.sum().backward()
            del out
            assert not [result for result in results if result() is not None]
    finally:
        gc.enable()
