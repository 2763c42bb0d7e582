"""Bytes alive after forward and at the peak, predicted and measured, of a GPT-like model.

Run it with ``python -m benchmarks.memory``. One layer and the head are measured alone. From their sizes the simulator
predicts each policy, and one real step under the policy is measured beside it. Every prediction should hold to 2 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch

import ckptdeco
from benchmarks.models import Block, Call, Gpt, plain_call, torch_per_layer
from benchmarks.overhead import decorated
from ckptdeco.planning.meter import ActivationMeter, ActivationTrace, measure_step
from ckptdeco.policy import Chain as KnownChain
from ckptdeco.schedule import Layer, StoreLast, simulate

MIB = 2**20
PLAIN: dict[str, Any] = {}
TORCH = "torch per layer"
POLICIES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "every=2": {"every": 2},
    "every=4": {"every": 4},
    "segment=1": {"segment": 1},
    "segment=2": {"segment": 2},
    "segment=4": {"segment": 4},
    'segment="sqrt"': {"segment": "sqrt"},
    'segment="auto"': {"segment": "auto"},
    "segment=4, levels=2": {"segment": 4, "levels": 2},
    'segment="sqrt", levels=2': {"segment": "sqrt", "levels": 2},
    'levels="log"': {"levels": "log"},
    "segment=1, keep_last=4": {"segment": 1, "keep_last": 4},
}


def measure_layer(forward: Call, parameters: Iterable[torch.nn.Parameter], x: torch.Tensor) -> Layer:
    """The sizes of one layer, its input being there before; its times are guesses."""
    x = x.clone().requires_grad_()
    with ActivationMeter(parameters) as meter:
        output = forward(x)
        meter.mark("output")
        loss = output.mul(2.0).sum()  # holds nothing, and gives the layer a gradient that nobody else holds
        meter.mark("backward")
        loss.backward()
    trace = meter.trace
    x_bytes, output_bytes = x.untyped_storage().nbytes(), output.untyped_storage().nbytes()
    after, turn = trace.marks["output"], trace.marks["backward"]
    peak_forward = max(point.live_bytes for point in trace.timeline if point.elapsed_s <= after.elapsed_s)
    peak_backward = max(point.live_bytes for point in trace.timeline if point.elapsed_s >= turn.elapsed_s)
    return Layer(
        forward_s=1.0,
        backward_s=2.0,
        input_bytes=x_bytes,
        saved_bytes=after.live_bytes - output_bytes + x_bytes,
        output_bytes=output_bytes,
        forward_temp_bytes=peak_forward - after.live_bytes,
        backward_temp_bytes=max(peak_backward - turn.live_bytes - output_bytes - x_bytes, 0),
        skipped_s=0.25,
    )


def measure(step: Callable[[], torch.Tensor], model: Gpt, policy: Any) -> ActivationTrace:
    """One step under a policy, after one that lets it learn the chain's length and sizes."""
    with policy:
        step().backward()  # type: ignore[no-untyped-call]
        return measure_step(step, model.parameters())


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    block = cast("type[Block]", decorated(Block))
    model = Gpt(block, n_layers=options.layers, width=options.width, max_length=options.length)
    token_ids, targets = torch.randint(0, 1024, (2, options.batch, options.length))
    x = torch.randn(options.batch, options.length, options.width)
    single = Block(options.width, 4)
    layer = measure_layer(single, single.parameters(), x)
    head = measure_layer(lambda x: model.loss(x, targets), model.parameters(), x)
    chain = (layer,) * options.layers
    print(
        f"{options.layers} layers; one layer's input {layer.input_bytes / MIB:.2f} MiB (x), its saved tensors "
        f"{layer.saved_bytes / MIB:.2f} MiB (a), a/x = {layer.saved_bytes / layer.input_bytes:.1f}; "
        f"head and loss {head.saved_bytes / MIB:.2f} MiB\n"
    )
    print(f"{'MiB':<26}{'after forward':^30}{'peak':^30}")
    print(f"{'':<26}" + f"{'predicted':>10}{'measured':>10}{'error':>9} " * 2 + f"{'of plain':>9}")
    step = partial(model, token_ids, targets)
    plain_peak = 0
    for name, keywords in [*POLICIES.items(), (TORCH, {"segment": 1})]:
        policy = ckptdeco.policy(**keywords) if keywords else ckptdeco.policy(None)
        # head and loss are one more layer, which no policy recomputes
        schedule = StoreLast(policy.schedule_for(KnownChain(costs=chain)), 1, options.layers + 1)
        predicted = simulate((*chain, head), schedule)
        call = torch_per_layer if name == TORCH else plain_call
        trace = measure(partial(step, call), model, nullcontext() if name == TORCH else policy)
        plain_peak = plain_peak or trace.peak_bytes
        after = predicted.kept_bytes + (head.output_bytes or 0)
        print(
            f"{name:<26}{_compared(after, trace.marks['backward'].live_bytes)} "
            f"{_compared(predicted.peak_bytes, trace.peak_bytes)} {trace.peak_bytes / plain_peak:>9.3f}"
        )


def _compared(predicted_bytes: int, measured_bytes: int) -> str:
    error = measured_bytes / predicted_bytes - 1
    return f"{predicted_bytes / MIB:>10.2f}{measured_bytes / MIB:>10.2f}{error:>+9.2%}"


if __name__ == "__main__":
    main()
