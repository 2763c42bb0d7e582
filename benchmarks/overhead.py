"""What checkpointing costs on top of the recompute itself, per layer call: ``python -m benchmarks.overhead``.

The layers are tiny (width 16), so the time beyond "plain step + the forwards that are run again" is the machinery. That
extra time is printed relative to torch's own non-reentrant checkpoint, measured in the same rounds, next to a floor:
the barest checkpoint in Python, which protects nothing. ``--profile NAME`` shows instead which functions one of the
rows spends its time in.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.floor import bare_checkpoint
from benchmarks.models import Block, Call, Chain, TinyLayer, plain_call, torch_per_layer
from ckptdeco.demo.timing import gc_paused, interleaved, median_difference, median_ratio
from ckptdeco.planning.meter import ActivationMeter

INACTIVE_BOUND_US = 1.0
REFERENCE = "torch non-reentrant"
POLICIES: dict[str, dict[str, Any]] = {
    "segment=1": {"segment": 1},
    "segment=4": {"segment": 4},
    "every=2": {"every": 2},
    "segment=4, levels=2": {"segment": 4, "levels": 2},
}
BOUNDS = {"segment=1": 0.5, "segment=4": 0.35}  # of torch's extra
SWITCHES: dict[str, dict[str, Any]] = {
    "preserve_rng_state=False": {"preserve_rng_state": False},
    'determinism_check="none"': {"determinism_check": "none"},
    "early_stop=False": {"early_stop": False},
    "all three": {"preserve_rng_state": False, "determinism_check": "none", "early_stop": False},
}
PLAIN = nullcontext()
HOOKS = "bare saved-tensor hooks"
FLOOR = "floor: nothing protected"


@dataclass(frozen=True)
class Variant:
    """One way to run the step, and how many layer forwards it runs."""

    step: Callable[[], None]
    n_forwards: int


def decorated(layer_class: type[nn.Module]) -> type[nn.Module]:
    """The same layer with its forward made checkpointable."""
    import ckptdeco

    return type(layer_class.__name__, (layer_class,), {"forward": ckptdeco.checkpointable(layer_class.forward)})


def _bare_hooks(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda packed: packed):
        return plain_call(layer, x)


def _step(model: Chain, x: torch.Tensor, call: Call = plain_call, policy: Any = PLAIN, n_extra: int = 0) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(n_extra):
        model(x)
    with policy:
        model(x, call).sum().backward()


def _count_forwards(step: Callable[[], None]) -> int:
    """Layer forwards started in one step; each starts with its one LayerNorm."""
    with ActivationMeter() as meter:
        step()
    return meter.trace.n_calls["aten.native_layer_norm.default"]


def make_variants(n_layers: int, width: int) -> tuple[dict[str, Variant], str]:
    """All rows that can run here, and why ckptdeco's are missing if they are."""
    torch.manual_seed(0)
    plain = Chain(TinyLayer(width) for _ in range(n_layers))
    x = torch.randn(4, width)
    off = {"preserve_rng_state": False, "determinism_check": "none", "early_stop": False}
    steps = {
        "plain": partial(_step, plain, x),
        "plain + one more forward": partial(_step, plain, x, n_extra=1),
        HOOKS: partial(_step, plain, x, _bare_hooks),
        FLOOR: partial(_step, plain, x, bare_checkpoint),
        f"{FLOOR}, early_stop=False": partial(_step, plain, x, partial(bare_checkpoint, early_stop=False)),
        REFERENCE: partial(_step, plain, x, torch_per_layer),
        f"{REFERENCE}, all three": partial(_step, plain, x, partial(torch_per_layer, **off)),
    }
    missing = ""
    try:
        import ckptdeco

        layer_class = decorated(TinyLayer)
        model = Chain(layer_class(width) for _ in range(n_layers))
        model.load_state_dict(plain.state_dict())
        for name, keywords in POLICIES.items():
            steps[name] = partial(_step, model, x, policy=ckptdeco.policy(**keywords))
        for name, keywords in SWITCHES.items():
            steps[f"segment=1, {name}"] = partial(_step, model, x, policy=ckptdeco.policy(segment=1, **keywords))
    except (ImportError, AttributeError) as error:
        missing = f"ckptdeco's rows are missing: {error}"
    return {name: Variant(step, _count_forwards(step)) for name, step in steps.items()}, missing


def extra_us(elapsed_s: dict[str, list[float]], variants: dict[str, Variant], name: str, n_layers: int) -> float:
    """Microseconds per layer call beyond the plain step and the forwards that ``name`` runs again."""
    n_again = (variants[name].n_forwards - n_layers) / n_layers
    rounds = zip(elapsed_s["plain"], elapsed_s["plain + one more forward"], strict=True)
    baseline = [plain + n_again * (more - plain) for plain, more in rounds]
    return median_difference(elapsed_s[name], baseline) / n_layers * 1e6


def active_report(n_layers: int, width: int, n_rounds: int) -> str:
    """The table of what an active policy costs per layer call."""
    variants, missing = make_variants(n_layers, width)
    elapsed_s = interleaved({name: variant.step for name, variant in variants.items()}, n_rounds, n_warmup=3)
    forward_us = median_difference(elapsed_s["plain + one more forward"], elapsed_s["plain"]) / n_layers * 1e6
    reference_us = extra_us(elapsed_s, variants, REFERENCE, n_layers)
    lines = [
        f"Active: {n_layers} layers of width {width}, {n_rounds} rounds, one thread, times per layer call",
        f"  one forward alone {forward_us:.1f} us; extra = step - plain - forwards run again",
        "",
        f"  {'':<40} {'step us':>8} {'forwards':>8} {'extra us':>9} {'of torch':>9}  {'bound':>5}",
    ]
    for name, variant in variants.items():
        step_us = statistics.median(elapsed_s[name]) / n_layers * 1e6
        line = f"  {name:<40} {step_us:>8.1f} {variant.n_forwards / n_layers:>8.2f}"
        if not name.startswith("plain"):
            extra = extra_us(elapsed_s, variants, name, n_layers)
            line += f" {extra:>9.1f} {extra / reference_us:>9.2f}"
            if name in BOUNDS:
                line += f"  {BOUNDS[name]:>5.2f} {'ok' if extra / reference_us <= BOUNDS[name] else 'OVER'}"
        lines.append(line)
    if "segment=1" in variants:
        lines += ["", "  Where segment=1's extra goes (what each switch takes off, us per call):"]
        for name in SWITCHES:
            saved = median_difference(elapsed_s["segment=1"], elapsed_s[f"segment=1, {name}"]) / n_layers * 1e6
            if variants[f"segment=1, {name}"].n_forwards == variants["segment=1"].n_forwards:
                lines.append(f"    {name:<38} {saved:>8.1f}")
        hooks_us = extra_us(elapsed_s, variants, HOOKS, n_layers)
        rest_us = extra_us(elapsed_s, variants, "segment=1, all three", n_layers) - hooks_us
        lines.append(f"    {HOOKS:<38} {hooks_us:>8.1f}")
        lines.append(f"    {'the rest (with all three off)':<38} {rest_us:>8.1f}")
    return "\n".join([*lines, "", f"  {missing}"] if missing else lines)


def inactive_report(n_rounds: int, n_calls: int = 2000) -> str:
    """What a decorated forward costs while nothing is to be recomputed."""
    try:
        import ckptdeco

        policy = ckptdeco.policy(segment=1)
    except (ImportError, AttributeError) as error:
        return f"Inactive: cannot be measured, {error}"

    class Identity(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Decorated(nn.Module):
        @ckptdeco.checkpointable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    x = torch.randn(4)

    def loop(layer: nn.Module) -> None:
        for _ in range(n_calls):
            layer.forward(x)

    def without_grad(layer: nn.Module) -> None:
        with torch.no_grad(), policy:
            loop(layer)

    plain_layer, layer = Identity(), Decorated()
    elapsed_s = interleaved(
        {
            "plain": partial(loop, plain_layer),
            "decorated": partial(loop, layer),
            "plain, no grad": partial(without_grad, plain_layer),
            "decorated, no grad": partial(without_grad, layer),
        },
        n_rounds,
    )
    no_policy_us = median_difference(elapsed_s["decorated"], elapsed_s["plain"]) / n_calls * 1e6
    no_grad_us = median_difference(elapsed_s["decorated, no grad"], elapsed_s["plain, no grad"]) / n_calls * 1e6
    lines = [f"Inactive: what the decorator adds to a direct call of forward (bound {INACTIVE_BOUND_US} us)"]
    for name, cost_us in (("no policy", no_policy_us), ("policy, grad off", no_grad_us)):
        lines.append(f"  {name:<40} {cost_us:>8.2f} us {'ok' if cost_us <= INACTIVE_BOUND_US else 'OVER'}")
    return "\n".join(lines)


def values_report(n_rounds: int, *, n_layers: int = 4, width: int = 256, length: int = 128) -> str:
    """What comparing the values of all saved tensors in every recompute costs with layers of a useful size."""
    try:
        import ckptdeco

        policies = {
            "plain": PLAIN,
            "segment=1": ckptdeco.policy(segment=1),
            'segment=1, determinism_check="values"': ckptdeco.policy(segment=1, determinism_check="values"),
        }
    except (ImportError, AttributeError) as error:
        return f"Comparing values: cannot be measured, {error}"
    torch.manual_seed(0)
    block = decorated(Block)
    model = Chain(block(width, 4) for _ in range(n_layers))
    x = torch.randn(4, length, width)
    steps = {name: partial(_step, model, x, policy=policy) for name, policy in policies.items()}
    elapsed_s = interleaved(steps, n_rounds, n_warmup=3)
    lines = [f"Comparing values: {n_layers} transformer blocks of width {width}, batch 4, {length} tokens"]
    for name, values in elapsed_s.items():
        ratio = median_ratio(values, elapsed_s["segment=1"])
        lines.append(
            f"  {name:<40} {statistics.median(values) / n_layers * 1e3:>8.2f} ms a layer  {ratio:>5.2f} of segment=1"
        )
    return "\n".join(lines)


def profile_report(name: str, n_layers: int, width: int, n_steps: int = 20) -> None:
    """Print the functions one row spends its own time in."""
    step = make_variants(n_layers, width)[0][name].step
    step()
    profiler = cProfile.Profile(time.thread_time)
    with gc_paused(), profiler:
        for _ in range(n_steps):
            step()
    print(f"{name}: {n_steps} steps of {n_layers} layers (the profiler itself makes Python code look slower)")
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(25)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60, help="more rounds, steadier medians (default 60)")
    parser.add_argument("--profile", metavar="NAME", help='profile one row instead, e.g. --profile "segment=1"')
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.profile:
        profile_report(options.profile, options.layers, options.width)
        return
    print(inactive_report(options.rounds), end="\n\n")
    print(active_report(options.layers, options.width, options.rounds), end="\n\n")
    print(values_report(max(options.rounds // 4, 3)))


if __name__ == "__main__":
    main()
