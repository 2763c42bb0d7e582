"""Memory and time of `save="matmuls"`, forward and backward: ``python -m benchmarks.save``.

Three models, each beside the plain step, one recompute for each block, and torch's own selective checkpointing
(`create_selective_checkpoint_contexts`, which keeps the same operators). Bytes are counted; times are taken side by
side, in rounds, and given relative to the plain step of the same round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ckptdeco
from benchmarks.models import Block, Chain, torch_per_layer
from ckptdeco.demo.timing import interleaved, median_ratio
from ckptdeco.planning.meter import measure_step

MIB = 2**20
BOUND_MEMORY, BOUND_TIME = 0.65, 1.06  # of the GPT-like model
_aten: Any = torch.ops.aten
OPERATORS = [
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]  # fmt: skip
ROWS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "segment=1": {"segment": 1},
    'save="matmuls"': {"save": "matmuls"},
    'save="matmuls", segment=3': {"save": "matmuls", "segment": 3},
    "torch, per block": {},
    "torch, selective": {"context_fn": partial(create_selective_checkpoint_contexts, OPERATORS)},
}


class Bottleneck(nn.Module):
    """Three convolutions and a residual, with batch norms or without."""

    def __init__(self, width: int, has_norm: bool) -> None:
        super().__init__()
        sizes = ((4 * width, width, 1), (width, width, 3), (width, 4 * width, 1))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2, bias=not has_norm) for a, b, k in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) if has_norm else nn.Identity() for _, b, _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """One block; x has shape [batch, channels, height, width]."""
        h = x
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            h = norm(convolution(F.relu(h) if i else h))
        return F.relu(x + 0.2 * h)


MODELS: dict[str, Callable[[int], tuple[Chain, Tensor]]] = {
    "gpt": lambda n: (Chain(Block(256, 4) for _ in range(n)), torch.randn(2, 256, 256)),
    "resnet": lambda n: (Chain(Bottleneck(64, has_norm=False) for _ in range(n)), torch.randn(4, 256, 24, 24)),
    "resnet_bn": lambda n: (Chain(Bottleneck(64, has_norm=True) for _ in range(n)), torch.randn(4, 256, 24, 24)),
}


def loss_of(model: Chain, name: str, made: Any, x: Tensor) -> Tensor:
    """The loss of one forward; backward is outside of the policy."""
    if name.startswith("torch"):
        return model(x, partial(torch_per_layer, **(ROWS[name] or {}))).square().mean()
    with made:
        return model(x).square().mean()


def step(model: Chain, name: str, made: Any, x: Tensor) -> None:
    """One training step without the optimizer."""
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(model, name, made, x).backward()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for kind, make in MODELS.items():
        torch.manual_seed(0)
        model, x = make(options.layers)
        policies = {
            name: ckptdeco.policy(None) if row is None or name.startswith("torch") else ckptdeco.policy(**row)
            for name, row in ROWS.items()
        }
        bytes_of, steps = {}, {}
        with ckptdeco.decorate(model, layers=[Block, Bottleneck]):
            for name, made in policies.items():
                steps[name] = partial(step, model, name, made, x)
                steps[name]()  # tells the policy the length of the chain
                model.zero_grad()
                bytes_of[name] = measure_step(partial(loss_of, model, name, made, x), model.parameters()).peak_bytes
            elapsed_s = interleaved(steps, options.rounds)
        print(f"{kind}, {options.layers} blocks, one thread\n{'':<28}{'peak MiB':>10}{'memory':>9}{'time':>8}")
        for name, n_bytes in bytes_of.items():
            ratio = median_ratio(elapsed_s[name], elapsed_s["plain"])
            print(f"{name:<28}{n_bytes / MIB:>10.1f}{n_bytes / bytes_of['plain']:>9.3f}{ratio:>8.3f}")
        print()
    print(f'bounds of save="matmuls" on gpt: {BOUND_MEMORY} of the memory at {BOUND_TIME} of the time')


if __name__ == "__main__":
    main()
