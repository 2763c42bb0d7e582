"""Train the demo's model under each policy; measure what differs (memory, time) and what must not (results)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import ckptdeco
from ckptdeco.demo.model import Block, CharacterTransformer, Size, TorchCheckpointedBlock
from ckptdeco.demo.text import encode, make_batches, read_source
from ckptdeco.demo.timing import interleaved, median_ratio
from ckptdeco.planning.meter import ActivationTrace, measure_step

PLAIN = "plain"
TORCH = "torch checkpoint"
# The policies compared, by the name of their row; each is `ckptdeco.policy(**keywords)`.
POLICIES: dict[str, dict[str, Any]] = {
    "every=2": {"every": 2},
    "segment=1": {"segment": 1},
    "segment=3": {"segment": 3},
    'segment="sqrt"': {"segment": "sqrt"},
    "segment=4, levels=2": {"segment": 4, "levels": 2},
    'segment="auto"': {"segment": "auto"},
}
ROWS = (PLAIN, TORCH, *POLICIES)

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """How long the demo trains and how often it times.

    Attributes:
        n_steps: training steps per row.
        n_rounds: timed steps per row.
        seed: for weights, batches and dropout.
        n_characters: length of the text.
        size: of model and batch.
    """

    n_steps: int = 6
    n_rounds: int = 5
    seed: int = 0
    n_characters: int = 2_000_000
    size: Size = field(default_factory=Size)

    @classmethod
    def quick(cls) -> Settings:
        """Seconds instead of a minute; too small for its times to mean anything."""
        return cls(n_steps=2, n_rounds=1, n_characters=100_000, size=Size(width=32, length=64, batch_size=2))


@dataclass(frozen=True)
class Row:
    """What was measured under one policy.

    Attributes:
        name: name of the row, as the keywords of its policy.
        trace: live activation bytes over one step.
        forward_bytes: those alive between forward and backward.
        n_forwards: layer forwards run in one step.
        step_s: median time of a step.
        time_ratio: median over the rounds of this row's time by that of the plain step.
        losses: one for each training step.
        is_equal: whether all losses, gradients, final weights and the random stream are bit for bit those of the
            plain run.
    """

    name: str
    trace: ActivationTrace
    forward_bytes: int
    n_forwards: int
    step_s: float
    time_ratio: float
    losses: tuple[float, ...]
    is_equal: bool

    @property
    def peak_bytes(self) -> int:
        """The most activation bytes alive at once."""
        return self.trace.peak_bytes


@dataclass
class Training:
    """What a training run leaves behind, to be compared bit for bit."""

    model: CharacterTransformer
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)
    random_state: torch.Tensor | None = None

    def is_equal(self, other: Training) -> bool:
        """Whether losses, the gradients of every step, the final weights and the random stream are the same bits."""
        return (
            _all_equal(self.losses, other.losses)
            and all(_all_equal(mine, theirs) for mine, theirs in zip(self.gradients, other.gradients, strict=True))
            and _all_equal(list(self.model.state_dict().values()), list(other.model.state_dict().values()))
            and _all_equal([self.random_state], [other.random_state])
        )


def _all_equal(mine: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> bool:
    """Bit-for-bit equality, None equal to None only."""
    return len(mine) == len(theirs) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)
    )


def policy_of(name: str) -> AbstractContextManager[object]:
    """The policy of a row; the plain and the torch row run without one."""
    return ckptdeco.policy(**POLICIES[name]) if name in POLICIES else nullcontext()


def train(name: str, settings: Settings, batches: Sequence[Batch], on_step: Callable[[], object]) -> Training:
    """Train from the seed under one row's policy, keeping everything that must be equal."""
    torch.manual_seed(settings.seed)
    model = CharacterTransformer(settings.size, TorchCheckpointedBlock if name == TORCH else Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    result = Training(model)
    with policy_of(name):
        for tokens, targets in batches[: settings.n_steps]:
            optimizer.zero_grad()
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            result.losses.append(loss.detach())
            result.gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            on_step()
    result.random_state = torch.get_rng_state()
    return result


def run(settings: Settings, *, on_start: Callable[[str], object], on_step: Callable[[], object]) -> Mapping[str, Row]:
    """Run all rows, in one thread: on a busy machine several threads mostly wait for each other.

    Args:
        settings: sizes and lengths.
        on_start: called with what comes next, in words.
        on_step: called after each step of any kind; `n_steps_in_all` says how many there will be.

    Returns:
        the rows, in the order of `ROWS`.
    """
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(settings, on_start, on_step)
    finally:
        torch.set_num_threads(n_threads)


def _run(settings: Settings, on_start: Callable[[str], object], on_step: Callable[[], object]) -> Mapping[str, Row]:
    tokens, size = encode(read_source(settings.n_characters)), settings.size
    *batches, last = make_batches(tokens, settings.n_steps + 1, size.batch_size, size.length, settings.seed)
    trainings: dict[str, Training] = {}
    traces: dict[str, ActivationTrace] = {}
    is_equal: dict[str, bool] = {}
    for name in ROWS:
        on_start(f"training: {name}")
        training = trainings[name] = train(name, settings, batches, on_step)
        is_equal[name] = training.is_equal(trainings[PLAIN])
        if name != PLAIN:
            training.gradients.clear()  # compared; no need to hold them to the end
        with policy_of(name):
            traces[name] = measure_step(partial(training.model, *last), training.model.parameters())
        on_step()

    on_start("timing, in turns")
    steps = {name: partial(_timed_step, trainings[name].model, last, policy_of(name)) for name in ROWS}
    elapsed_s = interleaved(steps, settings.n_rounds, on_step=on_step)
    rows = {}
    for name in ROWS:
        rows[name] = Row(
            name=name,
            trace=traces[name],
            forward_bytes=traces[name].marks["backward"].live_bytes,
            n_forwards=count_forwards(traces[name]),
            step_s=statistics.median(elapsed_s[name]),
            time_ratio=median_ratio(elapsed_s[name], elapsed_s[PLAIN]),
            losses=tuple(loss.item() for loss in trainings[name].losses),
            is_equal=is_equal[name],
        )
    return rows


def n_steps_in_all(settings: Settings) -> int:
    """How many steps `run` takes: training, one measured, and the timed ones with one round of warm-up."""
    return len(ROWS) * (settings.n_steps + 1 + settings.n_rounds + 1)


def count_forwards(trace: ActivationTrace) -> int:
    """Layer forwards in a step: each runs attention exactly once."""
    return sum(n for name, n in trace.n_calls.items() if "_scaled_dot_product" in name and "backward" not in name)


def _timed_step(model: CharacterTransformer, batch: Batch, policy: AbstractContextManager[object]) -> None:
    model.zero_grad()
    with policy:
        model(*batch).backward()
