"""What `ckptdeco.measure` predicts, beside one real step under each policy: peak bytes, and time.

Run it with ``python -m benchmarks.measured``. The model is measured under ``segment=1`` only; from its figures every
other policy is predicted. Peaks should hold to 2 %. Times leave out what the checkpointing itself costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

import ckptdeco
from benchmarks.models import Block, Bottleneck, ConvNet, Gpt
from benchmarks.overhead import decorated
from ckptdeco.demo.timing import interleaved, median_ratio
from ckptdeco.planning.meter import measure_step

MIB = 2**20
OFF = ckptdeco.policy(None)
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "segment=1": {"segment": 1},
    "segment=2": {"segment": 2},
    "segment=4": {"segment": 4},
    "every=2": {"every": 2},
    "segment=4, levels=2": {"segment": 4, "levels": 2},
    'levels="log"': {"levels": "log"},
}


def gpt(n_layers: int) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A GPT-like model and its forward pass."""
    model = Gpt(cast("type[Block]", decorated(Block)), n_layers=n_layers)
    token_ids, targets = torch.randint(0, 1024, (2, 2, 256))
    return model, partial(model, token_ids, targets)


def conv_net(n_layers: int, *, is_normed: bool) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A residual net and its forward pass."""
    block = cast("type[Bottleneck]", decorated(Bottleneck))
    model = ConvNet(block, n_blocks=max(1, n_layers // 6), is_normed=is_normed)
    return model, partial(model, torch.randn(8, 3, 48, 48), torch.randint(0, 10, (8,)))


MODELS: dict[str, Callable[[int], tuple[nn.Module, Callable[[], torch.Tensor]]]] = {
    "gpt": gpt,
    "conv": partial(conv_net, is_normed=False),
    "conv with BatchNorm": partial(conv_net, is_normed=True),
}


def compare(name: str, model: nn.Module, forward: Callable[[], torch.Tensor], n_rounds: int) -> float:
    """Measure a model, print predicted and real figures of each policy; returns the largest error of a peak."""

    def step(policy: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with policy:
            forward().backward()  # type: ignore[no-untyped-call]

    measured = ckptdeco.measure(
        lambda: forward().backward(),  # type: ignore[no-untyped-call]
        model=model,
        n_steps=2 + n_rounds,
    )
    print(f"\n{name}\n{measured}\n")
    policies = {
        key: ckptdeco.policy(**options) if options else ckptdeco.policy(None) for key, options in POLICIES.items()
    }
    for policy in policies.values():
        step(policy)  # learns the chain's length
    elapsed_s = (
        interleaved({key: partial(step, policy) for key, policy in policies.items()}, n_rounds) if n_rounds else {}
    )
    print(f"{'':<22}{'peak, MiB':^30}{'time, of plain':^24}")
    print(f"{'':<22}{'predicted':>10}{'measured':>10}{'error':>9} {'predicted':>13}{'measured':>10}")
    worst = 0.0
    plain = measured.predict(policies["plain"])
    for key, policy in policies.items():
        with policy:
            trace = measure_step(forward, model.parameters())
        predicted = measured.predict(policy)
        error = trace.peak_bytes / predicted.peak_bytes - 1
        worst = max(worst, abs(error))
        line = f"{key:<22}{predicted.peak_bytes / MIB:>10.2f}{trace.peak_bytes / MIB:>10.2f}{error:>+9.2%}"
        ratio = median_ratio(elapsed_s[key], elapsed_s["plain"])
        print(f"{line} {predicted.elapsed_s / plain.elapsed_s:>13.3f}{ratio:>10.3f}")
    return worst


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=list(MODELS), action="append")
    options = parser.parse_args(arguments)
    for name in options.model or MODELS:
        torch.manual_seed(0)
        model, forward = MODELS[name](options.layers)
        worst = compare(name, model, forward, max(1, options.rounds))
        print(f"largest error of a peak {worst:.2%}")


if __name__ == "__main__":
    main()
