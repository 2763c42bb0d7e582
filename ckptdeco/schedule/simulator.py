"""An executable model of the engine: runs a schedule over a chain and counts bytes and seconds.

It is exact about order. A value is counted once, however many hold it: a kept boundary, the loop variable and a
saved input are one storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptdeco.errors import PolicyError
from ckptdeco.schedule.actions import Action, Dropped, Event, Freed, Kept, Recomputed, Schedule
from ckptdeco.schedule.classic import Segments

SAVE, DROP_KEEP, DROP = Action.SAVE, Action.DROP_KEEP, Action.DROP
_SIZES = ("input_bytes", "saved_bytes", "forward_temp_bytes", "backward_temp_bytes")
_TIMES = ("forward_s", "backward_s", "skipped_s")


def _require_costs(costs: Layer | Option, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(costs, name) < 0:
            raise PolicyError(name, getattr(costs, name), "cannot be negative", "measure the layer again")
    if costs.skipped_s > costs.forward_s:
        raise PolicyError("skipped_s", costs.skipped_s, "cannot be more than forward_s", "measure the layer again")


@dataclass(frozen=True, slots=True)
class Option:
    """A way to drop a layer call that keeps some of its results, so that a recompute costs less (`save=`).

    Args:
        name: what the user calls it.
        kept_bytes: what stays from forward to the call's backward, its input not included.
        forward_s: seconds of the forward when it is run again.
        skipped_s: what early stop saves of these when the call is the last of a recompute.
        shared_bytes: the part of `kept_bytes` that is among the saved tensors and so free while these are there.
    """

    name: str
    kept_bytes: int
    forward_s: float
    skipped_s: float = 0.0
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        _require_costs(self, ("kept_bytes", "forward_s", "skipped_s", "shared_bytes"))


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer call costs.

    Args:
        forward_s: seconds of a full forward.
        backward_s: seconds of backward, recomputes not included.
        input_bytes: the input that a boundary would keep; its gradient is as large.
        saved_bytes: what autograd stores; the input's bytes included if `input_saved`.
        output_bytes: default the next layer's `input_bytes`, the own for the last layer.
        forward_temp_bytes: live during forward beyond input, saved tensors and output.
        backward_temp_bytes: live during backward beyond saved tensors and the two gradients.
        skipped_s: what early stop saves when this call is the last of a recompute; if any, its output is not made.
        input_saved: whether the input is itself one of the saved tensors, so that a boundary costs no more.
        menu: ways to drop it that keep some results.
    """

    forward_s: float
    backward_s: float
    input_bytes: int
    saved_bytes: int
    output_bytes: int | None = None
    forward_temp_bytes: int = 0
    backward_temp_bytes: int = 0
    skipped_s: float = 0.0
    input_saved: bool = True
    menu: tuple[Option, ...] = ()

    def __post_init__(self) -> None:
        names = (*_SIZES, *_TIMES)
        _require_costs(self, names if self.output_bytes is None else (*names, "output_bytes"))

    @property
    def extra_bytes(self) -> int:
        """The saved tensors' bytes beyond the input's."""
        return self.saved_bytes - self.input_bytes if self.shares_input else self.saved_bytes

    @property
    def shares_input(self) -> bool:
        """Whether the saved tensors hold the whole input."""
        return self.input_saved and self.saved_bytes >= self.input_bytes


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `simulate` predicts.

    `kept_bytes` is what is held when forward has ended, without the last output; `timeline` has the most live bytes
    of each step, in order, such as `("forward 0", 96)`, `("turn", 128)`, `("recompute 3", 160)`, `("backward 3", 192)`.
    `peak_step` is the first of them with the peak, `peak_held_bytes` what is kept for calls then: boundaries, saved
    tensors and results.
    """

    peak_bytes: int
    elapsed_s: float
    n_forwards: tuple[int, ...]
    events: tuple[Event, ...]
    timeline: tuple[tuple[str, int], ...]
    kept_bytes: int
    peak_step: str
    peak_held_bytes: int


class _OverLimit(Exception):
    """The pass needs more than it may."""


class _Pass:
    """One forward and backward over a chain; `held` is what is kept for calls, apart from what merely runs."""

    __slots__ = (
        "chain", "choose", "elapsed_s", "events", "extra", "held", "inputs", "is_kept", "is_saved", "limit",
        "n_forwards", "options", "outputs", "peak", "peak_held", "peak_step", "record", "schedule", "shares",
        "timeline",
    )  # fmt: skip

    def __init__(self, chain: Sequence[Layer], schedule: Schedule, record: bool, limit: float) -> None:
        n_layers = len(chain)
        self.chain, self.schedule, self.record, self.limit = chain, schedule, record, limit
        self.inputs = [layer.input_bytes for layer in chain]
        self.outputs = [
            layer.output_bytes if layer.output_bytes is not None else follower.input_bytes
            for layer, follower in zip(chain, [*chain[1:], chain[-1]], strict=True)
        ]
        self.extra = [layer.extra_bytes for layer in chain]
        self.shares = [layer.shares_input for layer in chain]
        self.is_saved = [False] * n_layers
        self.is_kept = [False] * n_layers
        self.n_forwards = [0] * n_layers
        self.choose: Callable[[int], Option | None] = getattr(schedule, "option", lambda position: None)
        self.options: list[Option | None] = [None] * n_layers
        self.held = self.peak = self.peak_held = 0
        self.peak_step = ("", -1)
        self.elapsed_s = 0.0
        self.events: list[Event] = []
        self.timeline: list[tuple[str, int]] = []

    def held_for(self, call: int) -> int:
        saved, kept = self.is_saved[call], self.is_kept[call]
        has_input = kept or (saved and self.shares[call])
        n_bytes = (self.extra[call] if saved else 0) + (self.inputs[call] if has_input else 0)
        option = self.options[call]
        if option is not None:
            n_bytes += option.kept_bytes - (option.shared_bytes if saved else 0)
        return n_bytes

    def step(self, what: str, call: int, live: int) -> None:
        if live > self.peak:
            self.peak, self.peak_held, self.peak_step = live, self.held, (what, call)
            if live > self.limit:
                raise _OverLimit
        if self.record:
            self.timeline.append((what if call < 0 else f"{what} {call}", live))

    def hold(self, call: int, saved: bool, kept: bool) -> None:
        """Keeps saved tensors or input of the call from here on, besides what is kept already."""
        before = self.held_for(call)
        self.is_saved[call] |= saved
        self.is_kept[call] |= kept
        self.note(call, before)

    def note(self, call: int, before: int) -> None:
        """The call holds more, or as much, as `before`."""
        grown = self.held_for(call) - before
        self.held += grown
        if self.record and grown:
            self.events.append(Kept(call, grown))

    def forward(self) -> None:
        follows_stored = True
        for call, layer in enumerate(self.chain):
            action = self.schedule.forward(call)
            if action is DROP and follows_stored:
                action = DROP_KEEP
            follows_stored = action is SAVE
            # every call is a probe (R19): its saved tensors are held until it returns
            running = self.inputs[call] + self.extra[call] + layer.forward_temp_bytes + self.outputs[call]
            option = None if action is SAVE else self.choose(call)
            if option is not None:
                running += option.kept_bytes - option.shared_bytes
            self.step("forward", call, self.held + running)
            self.elapsed_s += layer.forward_s
            self.n_forwards[call] += 1
            if self.record and action is not SAVE:
                is_input_lost = action is DROP and self.shares[call]
                self.events.append(Dropped(call, layer.saved_bytes if is_input_lost else self.extra[call]))
            before = self.held_for(call)
            self.options[call] = option
            self.is_saved[call], self.is_kept[call] = action is SAVE, action is DROP_KEEP
            self.note(call, before)

    def recompute(self, target: int, gradient: int) -> None:
        first = target
        while not self.is_kept[first]:
            first -= 1
        actions = self.schedule.backward(first, target)
        if len(actions) != target - first + 1 or actions[-1] is not SAVE:
            fix = f"give {target - first + 1} actions, the last Action.SAVE"
            raise PolicyError(
                "schedule", self.schedule, f"cannot recompute calls {first} to {target} by {actions}", fix
            )
        for call, action in enumerate(actions, first):
            layer = self.chain[call]
            costs = self.options[call] or layer
            is_stopped = call == target and costs.skipped_s > 0
            if self.record:
                self.events.append(Recomputed(call))
            self.hold(call, saved=action is SAVE, kept=action is DROP_KEEP)
            has_input = self.is_kept[call] or (self.is_saved[call] and self.shares[call])
            running = layer.forward_temp_bytes + (0 if has_input else self.inputs[call])
            self.step("recompute", call, self.held + gradient + running + (0 if is_stopped else self.outputs[call]))
            self.elapsed_s += costs.forward_s - (costs.skipped_s if call == target else 0.0)
            self.n_forwards[call] += 1

    def backward(self) -> None:
        last = len(self.chain) - 1
        gradient = 2 * self.outputs[last]  # with the last output, which the caller still has
        for call in range(last, -1, -1):
            layer = self.chain[call]
            if not self.is_saved[call] and layer.saved_bytes:  # who saved nothing asks for nothing (R28)
                self.recompute(call, gradient)
            gradients = gradient + self.inputs[call]
            self.step("backward", call, self.held + gradients + layer.backward_temp_bytes)
            self.elapsed_s += layer.backward_s
            freed = self.held_for(call)
            self.held -= freed
            self.is_saved[call] = self.is_kept[call] = False
            self.options[call] = None
            if self.record and freed:
                self.events.append(Freed(call, freed))
            gradient = self.inputs[call]


def simulate(chain: Sequence[Layer], schedule: Schedule, *, head_bytes: int = 0) -> Simulation:
    """Predicts what the engine does with a chain under a schedule.

    Args:
        chain: the layer calls, in order of forward.
        schedule: what is kept and recomputed; its method `option(position)`, if it has one, says which `Option` of its
            menu a dropped call is dropped by, or None.
        head_bytes: what head and loss hold between forward and the last layer's backward.

    Returns:
        Peak, time, forwards of each layer (the first included), events and timeline.

    Raises:
        PolicyError: the chain is empty, or the schedule's backward does not fit the calls it was asked for.

    Cost:
        Memory and compute in proportion to the forwards that are simulated, about 2 µs each.

    Example:
        >>> from ckptdeco.schedule import Segments
        >>> prediction = simulate([Layer(1.0, 2.0, input_bytes=10, saved_bytes=100)] * 6, Segments(3))
        >>> prediction.kept_bytes, prediction.n_forwards, prediction.elapsed_s
        (20, (2, 2, 2, 2, 2, 2), 24.0)
    """
    if not chain:
        raise PolicyError("chain", chain, "has no layers", "give at least one Layer")
    run = _Pass(chain, schedule, record=True, limit=float("inf"))
    run.forward()
    kept_bytes = run.held
    run.step("turn", -1, run.held + run.outputs[-1] + head_bytes)
    run.backward()
    what, call = run.peak_step
    return Simulation(
        run.peak, run.elapsed_s, tuple(run.n_forwards), tuple(run.events), tuple(run.timeline), kept_bytes,
        what if call < 0 else f"{what} {call}", run.peak_held,
    )  # fmt: skip


def best_segment(chain: Sequence[Layer], schedule: Callable[[int], Schedule] = Segments) -> int:
    """Returns the segment length with the lowest predicted peak, the least of those that tie.

    Args:
        chain: the layer calls, in order of forward.
        schedule: makes a schedule of a segment length.

    Raises:
        PolicyError: the chain is empty.

    Cost:
        Compute: all lengths are simulated, each only until it needs more than the best so far; 200 layers take
        0.1 s.

    Example:
        >>> best_segment([Layer(1.0, 2.0, input_bytes=10, saved_bytes=40)] * 64)
        5
    """
    if not chain:
        raise PolicyError("chain", chain, "has no layers", "give at least one Layer")
    best, least = 1, float("inf")
    for n in range(1, len(chain) + 1):
        run = _Pass(chain, schedule(n), record=False, limit=least)
        try:
            run.forward()
            run.backward()
        except _OverLimit:
            continue
        if run.peak < least:
            best, least = n, run.peak
    return best
