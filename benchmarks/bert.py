"""Memory and time of an encoder of BERT-base shape, forward and backward: ``python -m benchmarks.bert``.

The encoder is that of the ``transformers`` library with random weights, dropout on; nothing in it is edited. Each row
is one way to say which of its modules are layers, and one policy. Bytes are counted; times are taken side by side, in
rounds, and given relative to the plain step of the same round. ``--picture FILE`` draws memory against time.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ckptdeco
from ckptdeco.demo.timing import interleaved, median_ratio
from ckptdeco.planning.meter import measure_step

MIB = 2**20
PLAIN = "plain"
LIBRARY = "gradient_checkpointing_enable()"
BLOCKS: tuple[str, ...] = ("layer.*",)
# The last matrix product of a block saves only its input. Where it is a layer of its own, early stop ends the recompute
# before it; the layer norm after it is not recomputed, so that its input is kept instead.
HALVES = ("layer.*.attention", "layer.*.intermediate", "*[0-9].output.dense")
# Matrix products inside a block that are cheap to keep for what they cost: 3 and 1 times the block's input.
PROJECTIONS = ("*.attention.self.query", "*.attention.self.key", "*.attention.self.value")
OUTPUTS = ("*[0-9].output.dense",)
BOUND_MEMORY, BOUND_TIME = 4.9, 1.25


@dataclass(frozen=True)
class Row:
    """One point: what is decorated, outside and inside of it, and under which policy; nothing is under ``None``."""

    layers: tuple[str, ...] = BLOCKS
    policy: dict[str, Any] | None = None
    inside: tuple[str, ...] = ()


ROWS: dict[str, Row] = {
    PLAIN: Row(),
    LIBRARY: Row(),
    "every=2": Row(BLOCKS, {"every": 2}),
    "every=4": Row(BLOCKS, {"every": 4}),
    "segment=1": Row(BLOCKS, {"segment": 1}),
    "segment=1, keep_last=1": Row(BLOCKS, {"segment": 1, "keep_last": 1}),
    "segment=2": Row(BLOCKS, {"segment": 2}),
    "segment=3": Row(BLOCKS, {"segment": 3}),
    "segment=4": Row(BLOCKS, {"segment": 4}),
    "segment=3, levels=2": Row(BLOCKS, {"segment": 3, "levels": 2}),
    'levels="log"': Row(BLOCKS, {"levels": "log"}),
    "half blocks, segment=3": Row(HALVES, {"segment": 3}),
    "half blocks, segment=3, keep_last=3": Row(HALVES, {"segment": 3, "keep_last": 3}),
    "save outputs, keep_last=1": Row(BLOCKS, {"save": OUTPUTS, "keep_last": 1}, OUTPUTS),
    "save projections, keep_last=1": Row(BLOCKS, {"save": PROJECTIONS, "keep_last": 1}, PROJECTIONS),
    "save both, keep_last=1": Row(BLOCKS, {"save": PROJECTIONS + OUTPUTS, "keep_last": 1}, PROJECTIONS + OUTPUTS),
    'save="matmuls", keep_last=1': Row(BLOCKS, {"save": "matmuls", "keep_last": 1}),
}


def make_encoder(n_layers: int, width: int, attention: str) -> nn.Module:
    """The encoder of transformers' BERT, without embeddings and heads, in training mode."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=8, hidden_size=width, num_hidden_layers=n_layers, num_attention_heads=width // 64,
        intermediate_size=4 * width, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertModel(config, add_pooling_layer=False).train()


def loss_of(model: Any, row: Row, x: Tensor) -> Tensor:
    """The loss of one forward; the policy is left before backward begins."""
    with ckptdeco.policy(**row.policy) if row.policy else ckptdeco.policy(None):
        return model.encoder(x).last_hidden_state.square().mean()


def run(model: Any, name: str, x: Tensor, act: Callable[[Callable[[], Tensor]], Any]) -> Any:
    """Let `act` have the forward of a row, with its modules decorated meanwhile."""
    row = ROWS[name]
    with ExitStack() as stack:
        if name == LIBRARY:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            stack.callback(model.gradient_checkpointing_disable)
        elif row.policy:
            stack.enter_context(ckptdeco.decorate(model.encoder, layers=row.layers))
            if row.inside:
                stack.enter_context(ckptdeco.decorate(model.encoder, layers=row.inside))
        return act(partial(loss_of, model, row, x))


def step(model: Any, name: str, x: Tensor) -> None:
    """One training step without the optimizer."""
    for parameter in model.parameters():
        parameter.grad = None
    run(model, name, x, lambda loss: loss().backward())


def peak_bytes(model: Any, x: Tensor, loss: Callable[[], Tensor]) -> int:
    """Peak activation memory of one step, after one that tells the policy the length of the chain."""
    loss().backward()
    for parameter in model.parameters():
        parameter.grad = None
    return measure_step(loss, model.parameters()).peak_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bert", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager", help="as in 2020, or as today")
    parser.add_argument("--picture", type=Path, help="SVG or PNG: memory against time")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # the library renames what it calls gradient checkpointing
    model = make_encoder(options.layers, options.width, options.attention)
    x = torch.randn(options.batch, options.length, options.width, requires_grad=True)
    print(
        f"{options.layers} layers of width {options.width}, sequences {options.batch} x {options.length}, "
        f"{options.attention} attention, dropout on; {options.rounds} rounds, one thread\n"
    )
    bytes_of = {name: run(model, name, x, partial(peak_bytes, model, x)) for name in ROWS}
    elapsed_s = interleaved({name: partial(step, model, name, x) for name in ROWS}, options.rounds)
    print(f"{'':<38}{'peak MiB':>10}{'less by':>9}{'time':>8}{'s':>8}")
    points = {}
    for name in ROWS:
        less = bytes_of[PLAIN] / bytes_of[name]
        ratio = median_ratio(elapsed_s[name], elapsed_s[PLAIN])
        points[name] = bytes_of[name] / bytes_of[PLAIN], ratio
        good = "  <- both bounds" if less >= BOUND_MEMORY and ratio <= BOUND_TIME else ""
        print(
            f"{name:<38}{bytes_of[name] / MIB:>10.1f}{less:>8.2f}x{ratio:>7.2f}x"
            f"{statistics.median(elapsed_s[name]):>8.2f}{good}"
        )
    print(f"\nbounds: at least {BOUND_MEMORY}x less memory at no more than {BOUND_TIME}x the time")
    if options.picture:
        draw(points, options.picture)


def draw(points: dict[str, tuple[float, float]], path: Path) -> None:
    """Memory against time, both relative to the plain step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, (memory, time) in points.items():
        axes.plot(100 * memory, time, "o", color="0.4" if name in (PLAIN, LIBRARY) else "tab:blue")
        axes.annotate(name, (100 * memory, time), xytext=(5, 3), textcoords="offset points", fontsize=8)
    axes.axvspan(0, 100 / BOUND_MEMORY, ymax=1, color="tab:green", alpha=0.08)
    axes.axhline(BOUND_TIME, color="tab:green", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="peak activation memory, % of the plain step", ylabel="time, relative to the plain step", xlim=(0, 112)
    )
    figure.savefig(path)


if __name__ == "__main__":
    main()
