"""What was measured of a step, as plain numbers: prints as a table, goes to JSON and back, predicts other policies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any

from ckptdeco.errors import PolicyError
from ckptdeco.planning.text import size_text, time_text
from ckptdeco.policy import Policy
from ckptdeco.schedule.actions import Action, Schedule
from ckptdeco.schedule.chain import Chain
from ckptdeco.schedule.simulator import Layer, Simulation, simulate

__all__ = ["Base", "LayerCost", "Measurement", "Prediction"]

_FORMAT = 1
_NOT_OF_LAYER = ("name", "position", "chain", "shared_temp_bytes")


@dataclass(frozen=True)
class LayerCost:
    """What one layer call costs; bytes are of unique storages made in the step, without parameters.

    Attributes:
        name: the layer's qualified name.
        position: 0-based, in its chain.
        chain: number of the chain, by first call in the pass.
        forward_s: seconds of its forward.
        backward_s: seconds of its backward, without the recompute.
        skipped_s: of forward, after the last saved tensor.
        input_bytes: its inputs; what several calls share counts where it came first.
        saved_bytes: what autograd saves.
        output_bytes: what it returns.
        forward_temp_bytes: the most alive during forward beyond input, saved tensors and output.
        backward_temp_bytes: the most alive during backward beyond saved tensors and the gradients of input and output.
        shared_temp_bytes: of these, there only while the call before is stored, since it saves what it returns.
        input_saved: whether the inputs are among the saved tensors.
    """

    name: str
    position: int
    chain: int
    forward_s: float
    backward_s: float
    skipped_s: float
    input_bytes: int
    saved_bytes: int
    output_bytes: int
    forward_temp_bytes: int
    backward_temp_bytes: int
    shared_temp_bytes: int = 0
    input_saved: bool = True

    def as_layer(self) -> Layer:
        """As the simulator and the solver want it."""
        return Layer(**{key: value for key, value in asdict(self).items() if key not in _NOT_OF_LAYER})

    @property
    def sizes(self) -> tuple[int, ...]:
        """All its bytes."""
        temps = self.forward_temp_bytes, self.backward_temp_bytes
        return self.input_bytes, self.saved_bytes, self.output_bytes, *temps


@dataclass(frozen=True)
class Base:
    """What the step needs besides its layer calls.

    Attributes:
        parameter_bytes: all parameters.
        gradient_bytes: their gradients.
        buffer_bytes: the model's buffers; 0 if no model was given.
        optimizer_bytes: state of the optimizers that the step ran; 0 if it ran none.
        head_input_bytes: what the last layer call returns.
        head_saved_bytes: what head and loss hold at the turn from forward to backward, that input included if held.
        head_forward_temp_bytes: the most alive between the last layer call and the turn, beyond that.
        head_backward_temp_bytes: the same between the turn and the backward of the last layer call.
        head_input_saved: whether head and loss hold the output of the last layer call.
        other_bytes: what is alive during the pass and no layer call, nor head or loss, accounts for.
        outside_peak_bytes: the most activations alive before the first layer call and after the last one's backward.
        other_s: seconds of the step outside layer calls and their recomputes.
    """

    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    head_input_bytes: int
    head_saved_bytes: int
    head_forward_temp_bytes: int
    head_backward_temp_bytes: int
    head_input_saved: bool
    other_bytes: int
    outside_peak_bytes: int
    other_s: float

    @property
    def fixed_bytes(self) -> int:
        """What no policy changes: parameters, gradients, buffers, optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.buffer_bytes + self.optimizer_bytes

    def head(self) -> Layer:
        """Head and loss as one more layer, which is always stored; its time is in `other_s`."""
        return Layer(
            0.0,
            0.0,
            input_bytes=self.head_input_bytes,
            saved_bytes=self.head_saved_bytes,
            output_bytes=0,
            forward_temp_bytes=self.head_forward_temp_bytes,
            backward_temp_bytes=self.head_backward_temp_bytes,
            input_saved=self.head_input_saved,
        )


@dataclass(frozen=True)
class Prediction:
    """What a step would need under a policy.

    Attributes:
        peak_bytes: the most activations alive at once.
        elapsed_s: seconds of the step, without what the checkpointing itself costs.
        fixed_bytes: parameters, gradients, buffers and optimizer state, which come on top.
    """

    peak_bytes: int
    elapsed_s: float
    fixed_bytes: int


@dataclass(frozen=True)
class _Joined:
    """Chains that run one after the other, and a head that is stored."""

    schedules: tuple[Schedule, ...]
    starts: tuple[int, ...]
    length: int

    def _place(self, position: int) -> tuple[Schedule, int]:
        index = max(i for i, start in enumerate(self.starts) if start <= position)
        return self.schedules[index], self.starts[index]

    def forward(self, position: int) -> Action:
        if position >= self.length:
            return Action.SAVE
        schedule, start = self._place(position)
        action = schedule.forward(position - start)
        return Action.DROP_KEEP if action is Action.DROP and position == start else action

    def backward(self, first: int, target: int) -> Sequence[Action]:
        schedule, start = self._place(target)
        return schedule.backward(first - start, target - start)


def _peak(costs: Sequence[LayerCost], schedule: Schedule, run: Simulation) -> int:
    """The peak of a simulation, without `shared_temp_bytes` where the call before is not stored."""
    stored = {i for i in range(len(costs)) if schedule.forward(i) is Action.SAVE}
    walk: list[int] = []
    peak = 0
    for what, live in run.timeline:
        kind, _, number = what.partition(" ")
        if kind == "recompute":
            walk.append(int(number))
        elif kind == "backward" and int(number) < len(costs):
            if walk:
                actions = schedule.backward(walk[0], walk[-1])
                stored.update([i for i, action in zip(walk, actions, strict=True) if action is Action.SAVE])
                walk = []
            if int(number) - 1 not in stored:
                live -= costs[int(number)].shared_temp_bytes
        peak = max(peak, live)
    return peak


@dataclass(frozen=True)
class Measurement:
    """What `measure` found; prints as a table.

    Attributes:
        layers: one entry per layer call, in order of forward.
        base: what the step needs besides.
        peak_bytes: the most activations that were alive at once, under `policy(segment=1)`.
        step_s: seconds of the step under that policy.
        n_steps: steps that were run.
        n_passes: forward and backward passes in a step; the largest is what `layers` has.
        device: where the layers ran.
    """

    layers: tuple[LayerCost, ...]
    base: Base
    peak_bytes: int
    step_s: float
    n_steps: int
    n_passes: int
    device: str

    @property
    def chains(self) -> tuple[tuple[Layer, ...], ...]:
        """The chains as the simulator and the solver want them."""
        n_chains = 1 + max(layer.chain for layer in self.layers)
        return tuple(
            [tuple([layer.as_layer() for layer in self.layers if layer.chain == number]) for number in range(n_chains)]
        )

    def predict(self, policy: Policy | Sequence[Schedule]) -> Prediction:
        """What the step would need under a policy, or a schedule for each chain.

        Several chains are taken to run one after the other, and backward in reverse order.

        Cost:
            Compute: one simulation, about 2 µs for each forward in it.
        """
        chains = self.chains
        if isinstance(policy, Policy):
            schedules = tuple([policy.schedule_for(Chain(costs=chain)) for chain in chains])
        else:
            schedules = tuple(policy)
        starts = tuple([sum(map(len, chains[:number])) for number in range(len(chains))])
        joined = _Joined(schedules, starts, len(self.layers))
        run = simulate([layer for chain in chains for layer in chain] + [self.base.head()], joined)
        costs = sorted(self.layers, key=lambda layer: layer.chain)  # stable: in order of forward
        peak_bytes = max(_peak(costs, joined, run) + self.base.other_bytes, self.base.outside_peak_bytes)
        return Prediction(peak_bytes, run.elapsed_s + self.base.other_s, self.base.fixed_bytes)

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        return json.dumps({"ckptdeco": "measurement", "format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """What `to_json` wrote.

        Raises:
            PolicyError: it is something else, or was written by another version.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            if values.pop("ckptdeco") != "measurement" or values.pop("format") != _FORMAT:
                raise ValueError("not a measurement of this version")
            layers = tuple([LayerCost(**layer) for layer in values.pop("layers")])
            return cls(layers=layers, base=Base(**values.pop("base")), **values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            shown = text if len(text) <= 40 else f"{text[:40]}…"
            raise PolicyError(
                "text", shown, f"is no measurement that this version reads ({error})", "measure the step again"
            ) from error

    def __str__(self) -> str:
        return "\n".join(_table(self))


_HEADS = ("forward", "backward", "skipped", "input", "saved", "output", "temp fwd", "temp bwd")


def _table(measured: Measurement) -> list[str]:
    """A line for each run of neighbours with equal bytes, then what is beside the layers, and the sums."""
    groups = [[*group] for _, group in groupby(measured.layers, key=lambda layer: (layer.chain, layer.sizes))]
    names = [_folded(group) for group in groups]
    width = max(len("each of"), *map(len, names))
    n_chains = len(measured.chains)
    lines = [
        f"{len(measured.layers)} layer calls in {n_chains} chain{'s' * (n_chains > 1)} on {measured.device}; a step "
        f"under policy(segment=1) takes {time_text(measured.step_s)}, its activations {size_text(measured.peak_bytes)}",
        _row("each of", width, "chain", "calls", _HEADS),
    ]
    for group, name in zip(groups, names, strict=True):
        times = [sum(getattr(layer, key) for layer in group) / len(group) for key in _TIMES]
        cells = [*map(time_text, times), *map(size_text, group[0].sizes)]
        lines.append(_row(name, width, str(group[0].chain), str(len(group)), cells))
    times = [sum(getattr(layer, key) for layer in measured.layers) for key in _TIMES]
    sums = [*map(time_text, times), *[size_text(sum(layer.sizes[i] for layer in measured.layers)) for i in range(3)]]
    lines.append(_row("sum", width, "", str(len(measured.layers)), sums))
    base = measured.base
    held, forward, backward = base.head_saved_bytes, base.head_forward_temp_bytes, base.head_backward_temp_bytes
    lines += [
        f"base: parameters {size_text(base.parameter_bytes)}, gradients {size_text(base.gradient_bytes)}, buffers "
        f"{size_text(base.buffer_bytes)}, optimizer {size_text(base.optimizer_bytes)}",
        f"head and loss: hold {size_text(held)}, temporaries {size_text(forward)} in forward and {size_text(backward)} "
        "in backward",
        f"besides: {size_text(base.other_bytes)} alive throughout, at most {size_text(base.outside_peak_bytes)} before "
        f"and after the layers, {time_text(base.other_s)} outside them",
    ]
    return lines


_TIMES = tuple([field.name for field in fields(LayerCost) if field.name.endswith("_s")])


def _row(name: str, width: int, chain: str, n_calls: str, cells: Sequence[str]) -> str:
    return f"{name:{width}}  {chain:>5}  {n_calls:>5}" + "".join([f"  {cell:>9}" for cell in cells]).rstrip()


def _folded(group: list[LayerCost]) -> str:
    first, last = group[0].name, group[-1].name
    return first if first == last else f"{first} … {last}"
