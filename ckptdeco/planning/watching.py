"""What one step's layer calls do, and when: the raw material of a measurement.

A `Watch` is told by the engine of each layer call (`engine.observe`) and notes stamps of a clock and places in the
timeline of a meter. It holds plain numbers: no call, no tensor, no layer.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ckptdeco.engine.kept import storage_address
from ckptdeco.engine.running import running
from ckptdeco.engine.saved import is_parameter
from ckptdeco.engine.torch_private import at_end_of_backward, graph_task_id
from ckptdeco.engine.tree import tensors_in
from ckptdeco.planning.meter import ActivationMeter

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call
    from ckptdeco.engine.dataflow import Chain

__all__ = ["CallSeen", "Clock", "DeviceClock", "HostClock", "PassSeen", "StepMeter", "Watch"]

Stamp = Any  # of a clock
Pack = Callable[[Tensor], Any]


class Clock(Protocol):
    """Stamps moments; what lies between two of them is asked for when the step is over."""

    def stamp(self) -> Stamp:
        """The present moment."""

    def seconds(self, start: Stamp, end: Stamp) -> float:
        """What lies between."""

    def finish(self) -> None:
        """Wait until all stamps can be read."""


class HostClock:
    """Wall time, for the CPU."""

    stamp = staticmethod(time.perf_counter)

    def seconds(self, start: float, end: float) -> float:
        """What lies between."""
        return end - start

    def finish(self) -> None:
        """Nothing to wait for."""


class DeviceClock:
    """Events in the current stream of an accelerator, which runs behind the program."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stamp(self) -> torch.Event:
        """The moment at which the device comes to what is asked of it next."""
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        """What lies between."""
        return float(start.elapsed_time(end)) / 1e3

    def finish(self) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize(self.device)


class StepMeter(ActivationMeter):  # type: ignore[no-untyped-call]
    """A meter that finds the parameters of a step by itself, and the turn from forward to backward.

    Attributes:
        parameter_bytes: of unique storages of the parameters that operators were given.
        gradient_bytes: of the gradients that backward gave them.
        at_turn: called when a backward runs its first operator.
        freed_at: places in the timeline at which storages were freed, by their number; known at exit.
    """

    freed_at: dict[int, int]

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        super().__init__(parameters)
        self.parameter_bytes = self.gradient_bytes = 0
        self.at_turn: Callable[[], None] = lambda: None
        self._task = -1
        self._found: set[int] = set()
        self._weights: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._handles: list[Any] = []
        for parameter in self._parameters:
            self._note_parameter(parameter)

    def _note_parameter(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._found:
            return
        self._found.add(id(parameter))
        address = storage_address(parameter)
        if address not in self._weights:
            self._weights.add(address)
            self.parameter_bytes += parameter.nbytes
        if parameter.requires_grad and parameter.is_leaf:
            handle = parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _note_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._sizes[id(parameter)] = gradient.nbytes
            self.gradient_bytes = sum(self._sizes.values())
            self.leave_out(gradient)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        task = graph_task_id()
        if task != self._task:
            self._task = task
            if task != -1 and not running.recomputing:
                self.at_turn()
        for value in args:
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, nn.Parameter):
                    self._note_parameter(item)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __exit__(self, *error: Any) -> None:
        self.freed_at = {event.serial: at for at, event in enumerate(self._events) if event.delta_bytes < 0}
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@dataclass
class CallSeen:
    """One layer call: stamps and places (`_at`) in the meter's timeline."""

    name: str
    position: int
    chain: int
    begin: Stamp = None
    end: Stamp = None
    over: Stamp = None
    packs: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    last_saved: int = -1  # of `packs`: after it nothing is needed
    needed: Stamp = None  # backward has come to it
    reached: Stamp = None  # its backward begins; its recompute, if any, has ended
    left: Stamp = None
    begin_at: int = 0
    end_at: int = 0
    over_at: int = 0
    needed_at: int = 0  # its recompute begins
    reached_at: int = 0
    left_at: int = 0
    input_bytes: int = 0
    saved_input_bytes: int = 0  # by this call or the one that made it
    shared: dict[int, int] = field(default_factory=dict)  # bytes of inputs that the calls that made them save, too
    output_bytes: int = 0
    saves_output: bool = False
    is_stored: bool = False


@dataclass
class PassSeen:
    """The layer calls from the end of one backward to the end of the next, in order of forward."""

    calls: list[CallSeen] = field(default_factory=list)
    backwards: list[CallSeen] = field(default_factory=list)  # in order of backward
    turn_at: int = -1
    holds_output: bool = False  # whether the last call's output is alive at the turn


class Watch:
    """Watches the layer calls of one step.

    Args:
        clock: what stamps are taken of.
        policy: the policy of the measurement; calls under another one are only noted.
        meter: counts bytes in this step; None in a step that is timed.
    """

    def __init__(self, clock: Clock, policy: Any, meter: StepMeter | None = None) -> None:
        self.clock, self.policy, self.meter = clock, policy, meter
        self.passes: list[PassSeen] = []
        self.other_policy: Any = None
        self.device: torch.device | None = None
        self.start: Stamp = None
        self.end: Stamp = None
        self._log: Any = None
        self._chains: dict[int, int] = {}
        self._seen: weakref.WeakKeyDictionary[Call, CallSeen] = weakref.WeakKeyDictionary()
        self._inputs: set[int] = set()
        self._saved: set[int] = set()  # addresses, of the call that runs
        self._saved_outputs: set[int] = set()  # of what calls both save and return
        self._sizes: dict[int, int] = {}  # of the storages among the inputs of the call that runs
        self._results: list[Tensor] = []
        self._output: list[weakref.ref[torch.UntypedStorage]] = []
        self._handles: list[Any] = []
        self._tasks: set[int] = set()
        if meter is not None:
            meter.at_turn = self._turn

    def close(self) -> None:
        """The step is over: leave nothing of this on graphs that outlive it."""
        self._leave()
        self.clock.finish()
        for handle in self._handles:
            handle.remove()
        if self.meter is not None:
            self.meter.at_turn = lambda: None
            self.meter = None
        self._handles, self._results, self._output, self._log, self.policy = [], [], [], None, None
        self._seen.clear()

    def _at(self) -> int:
        return 0 if self.meter is None else self.meter.n_points

    @property
    def elapsed_s(self) -> float:
        """Seconds of the step."""
        return self.clock.seconds(self.start, self.end)

    @property
    def inside_s(self) -> float:
        """Seconds of it in layer calls, their recomputes and their backwards."""
        total = 0.0
        for seen in [seen for one in self.passes for seen in one.calls]:
            total += self.clock.seconds(seen.begin, seen.over)
            if seen.left is not None:
                total += self.clock.seconds(seen.needed, seen.left)
        return total

    # ------------------------------------------------------------------------------------------------- forward

    def begins(self, call: Call, chain: Chain | None, inputs: list[Tensor], pack: Pack) -> Pack:
        """The forward of a layer call is about to run."""
        if chain is None or running.frame is not None:
            return pack
        log = call.record.log
        if log.policy is not self.policy:
            self.other_policy = log.policy
            return pack
        if call.devices:
            self.device = call.devices[0]
        if log is not self._log:
            self._log = log
            self.passes.append(PassSeen())
            self._chains, self._inputs, self._saved_outputs = {}, set(), set()
        number = self._chains.setdefault(id(chain), len(self._chains))
        seen = CallSeen(call.info.name, call.position, number)
        self._saved = set()
        if self.meter is not None:
            self._sizes = self._made_here(inputs, self._inputs)
            self._inputs |= self._sizes.keys()
            seen.input_bytes = sum(self._sizes.values())
            for tensor in inputs:
                if storage_address(tensor) in self._sizes.keys() & self._saved_outputs:
                    seen.shared[self.meter.serial(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        if call.position == 0:  # be told when backward leaves it for what its inputs were made of
            self._listen(inputs, partial(self._left, seen))
        self._seen[call] = seen
        seen.begin_at = self._at()
        seen.begin = self.clock.stamp()
        return partial(self._pack, seen, pack)

    def _pack(self, seen: CallSeen, pack: Pack, tensor: Tensor) -> Any:
        start = self.clock.stamp()
        packed = pack(tensor)
        if self.meter is not None and not is_parameter(tensor):
            self._saved.add(storage_address(tensor))
        seen.packs.append((start, self.clock.stamp()))
        return packed

    def body_ended(self, call: Call, result: Any) -> None:
        """The forward has run, and nothing is dropped yet."""
        seen = self._seen.get(call)
        if seen is None:
            return
        seen.end = self.clock.stamp()
        seen.end_at = self._at()
        outputs = self._results = tensors_in(result)
        if self.meter is None:
            return
        saved = self._saved | self._saved_outputs
        seen.saved_input_bytes = sum(self._sizes[address] for address in self._sizes.keys() & saved)
        made = self._made_here(outputs, self._inputs)
        seen.output_bytes = sum(made.values())
        seen.saves_output = bool(made.keys() & self._saved)
        self._saved_outputs |= made.keys() & self._saved
        self._output = [weakref.ref(tensor.untyped_storage()) for tensor in outputs if storage_address(tensor) in made]

    def is_over(self, call: Call) -> None:
        """What can be recomputed is dropped."""
        seen = self._seen.get(call)
        if seen is None or not self.passes:
            return
        results, self._results = self._results, []
        seen.over_at = self._at()
        seen.over = self.clock.stamp()
        may_stop = call.options.early_stop and call.protection.is_stop_safe and call.structure is None
        alive = [index for index, slot in enumerate(call.slots) if slot is not None and slot() is not None]
        seen.is_stored = not alive
        if may_stop and alive and alive[-1] < len(seen.packs):
            seen.last_saved = alive[-1]
        if seen.is_stored:  # no recompute will tell when backward comes to it
            self._listen(results, partial(self._reached, seen))
        self.passes[-1].calls.append(seen)

    def _made_here(self, tensors: list[Tensor], known: set[int]) -> dict[int, int]:
        """Address and bytes of the storages made in this step that are not known."""
        found = {}
        for tensor in tensors:
            if tensor.layout is not torch.strided or is_parameter(tensor):
                continue
            address, storage = storage_address(tensor), tensor.untyped_storage()
            if address not in known and self.meter is not None and self.meter.serial(storage) >= 0:
                found[address] = storage.nbytes()
        return found

    # ------------------------------------------------------------------------------------------------ backward

    def _listen(self, tensors: list[Tensor], told: Callable[[Any], None]) -> None:
        """Be told when backward has the gradient of what these tensors are."""
        for tensor in tensors:
            if tensor.grad_fn is not None:
                self._handles.append(tensor.grad_fn.register_prehook(told))

    def _reached(self, seen: CallSeen, grads: Any) -> None:
        if seen.reached is None and not running.recomputing:
            self._leave()
            seen.needed_at = self._at()
            seen.needed = self.clock.stamp()
            self._begin_backward(seen)

    def _left(self, seen: CallSeen, grads: Any) -> None:
        if seen.reached is not None and seen.left is None and not running.recomputing:
            self._leave()

    def _leave(self) -> None:
        """The backward that runs has come to the end of the call it is in."""
        if not self.passes or not self.passes[-1].backwards:
            return
        current = self.passes[-1].backwards[-1]
        if current.left is None:
            current.left = self.clock.stamp()
            current.left_at = self._at()

    def _turn(self) -> None:
        if self.passes and self.passes[-1].turn_at < 0:
            self.passes[-1].turn_at = self._at()
            self.passes[-1].holds_output = any(reference() is not None for reference in self._output)

    def recompute_begins(self, call: Call) -> None:
        """Backward has come to the call."""
        seen = self._seen.get(call)
        if seen is None or seen.reached is not None:
            return
        self._leave()
        seen.needed_at = self._at()
        seen.needed = self.clock.stamp()

    def recompute_ended(self, call: Call) -> None:
        """Its saved tensors are there."""
        seen = self._seen.get(call)
        if seen is None or seen.reached is not None:
            return
        self._begin_backward(seen)

    def _begin_backward(self, seen: CallSeen) -> None:
        self.passes[-1].backwards.append(seen)
        seen.reached_at = self._at()
        seen.reached = self.clock.stamp()
        task = graph_task_id()
        if task != -1 and task not in self._tasks:
            self._tasks.add(task)
            at_end_of_backward(self._leave)
