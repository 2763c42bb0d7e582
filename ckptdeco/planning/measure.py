"""`measure(step)`: what each layer call of a training step costs, in seconds and bytes.

The step runs under the most careful schedule, each call alone, so that what one call needs can be told from the rest:
once to learn, once with a meter for bytes, then with a clock. `watching` notes what happens; the result is a value of
`measurement`.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from ckptdeco.engine.observe import observed_by
from ckptdeco.errors import PolicyError
from ckptdeco.planning.attribution import Bytes
from ckptdeco.planning.measurement import Base, LayerCost, Measurement
from ckptdeco.planning.put_back import ModelState, Optimizers
from ckptdeco.planning.watching import CallSeen, Clock, DeviceClock, HostClock, PassSeen, StepMeter, Watch
from ckptdeco.policy import policy

__all__ = ["measure"]


def measure(step: Callable[[], object], *, model: nn.Module | None = None, n_steps: int = 3) -> Measurement:
    """Measure what each layer call of a training step costs, and what the step needs besides.

    The step runs `n_steps` times under `policy(segment=1)`: once to learn, once to count bytes, then to take times.

    * Without `model` these are training steps like any other: weights, buffers and random number streams go on as plain
      steps would have them, bit for bit. Let the first steps of a training be measured, and it goes on from there.
    * With `model` all is as before afterwards, bit for bit: its parameters, buffers, gradients and training flags, the
      streams of random numbers (torch, Python, NumPy, those that the model or `step` hold), and the state of
      optimizers that the step runs. Not put back: data loaders, schedulers and gradient scalers that `step` advances.

    Args:
        step: runs forward and backward; may run an optimizer. Takes no arguments.
        model: what to put back, and whose buffers to count; gradients are None at the begin of each measured step.
        n_steps: how often the step runs, at least 3; times are medians over all but the first two.

    Returns:
        A `Measurement`; print it.

    Raises:
        PolicyError: the step fails, runs no decorated layer call or no backward, or has a policy of its own.

    Cost:
        Memory: the peak of `policy(segment=1)`; with `model`, a copy of it on the CPU. Compute: `n_steps` steps with
        one more forward; that with the meter is slower, by tens of microseconds an operator.

    Example:
        >>> import torch, ckptdeco
        >>> layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        >>> model = torch.nn.Sequential(*layers)
        >>> decorated = ckptdeco.decorate(model, layers=torch.nn.Linear)
        >>> measured = ckptdeco.measure(lambda: model(torch.ones(2, 8)).sum().backward(), model=model)
        >>> [layer.output_bytes for layer in measured.layers]
        [64, 64, 64, 64]
    """
    if not callable(step):
        raise PolicyError("step", step, "it is run without arguments", "give a function: measure(lambda: ...)")
    if type(n_steps) is not int or n_steps < 3:
        raise PolicyError("n_steps", n_steps, "one step learns, one counts bytes, one is timed", "give 3 or more")
    if model is not None and not isinstance(model, nn.Module):
        raise PolicyError("model", model, "it is not a module", "give the nn.Module that the step trains, or nothing")
    state = None if model is None else ModelState(model, step)
    optimizers = Optimizers(may_put_back=state is not None)
    try:
        return _measure(step, model, state, optimizers, n_steps)
    finally:
        optimizers.close()
        if state is not None:
            state.put_back()


def _measure(
    step: Callable[[], object], model: nn.Module | None, state: ModelState | None, optimizers: Optimizers, n_steps: int
) -> Measurement:
    careful = policy(segment=1)
    clock: Clock = HostClock()
    meter = StepMeter(() if model is None else model.parameters())
    timed: list[Watch] = []
    with _progress(n_steps) as advance:
        learnt = _run(step, Watch(clock, careful), careful, state)
        _check(step, learnt)
        advance()
        counted = _run(step, Watch(clock, careful, meter), careful, state)
        _check(step, counted)
        advance()
        if learnt.device is not None:
            clock = DeviceClock(learnt.device)
        for _ in range(n_steps - 2):
            timed.append(_run(step, Watch(clock, careful), careful, state))
            advance()
    index, main = max(enumerate(counted.passes), key=lambda found: _weight(found[1]))
    same = [watch for watch in timed if [*map(_key, _calls(watch, index))] == [*map(_key, main.calls)]]
    if not same:
        raise PolicyError(
            "step", step, "its layer calls differ from run to run", "measure a step that does the same each time"
        )
    times = [_times(watch, index) for watch in same]
    bytes_of = Bytes(meter, main)
    layers = tuple([_cost(bytes_of, i, [of_step[i] for of_step in times]) for i in range(len(main.calls))])
    step_s = statistics.median([watch.elapsed_s for watch in same])
    inside_s = statistics.median([watch.inside_s for watch in same])
    buffers = {} if model is None else {id(buffer): buffer.nbytes for buffer in model.buffers()}
    fixed = meter.parameter_bytes, meter.gradient_bytes, sum(buffers.values()), optimizers.n_bytes
    base = Base(*fixed, **bytes_of.base(), other_s=max(0.0, step_s - inside_s))
    device = "cpu" if learnt.device is None else str(learnt.device)
    return Measurement(layers, base, meter.trace.peak_bytes, step_s, n_steps, len(counted.passes), device)


def _run(step: Callable[[], object], watch: Watch, careful: Any, state: ModelState | None) -> Watch:
    """One step, watched."""
    if state is not None:
        state.clear_gradients()
    with observed_by(watch):
        try:
            with watch.meter or nullcontext(), careful:
                watch.start = watch.clock.stamp()
                step()
                watch.end = watch.clock.stamp()
        except Exception as error:
            raise PolicyError(
                "step",
                step,
                f"raised {type(error).__name__}: {error}",
                "call it by itself first; it must run forward and backward each time",
            ) from error
        finally:
            watch.close()
    return watch


def _check(step: Callable[[], object], watch: Watch) -> None:
    if watch.other_policy is not None:
        raise PolicyError(
            "step", step, f"it enters a policy of its own, {watch.other_policy!r}", "measure the step without it"
        )
    if not any(seen.calls for seen in watch.passes):
        raise PolicyError(
            "step",
            step,
            "it ran no decorated layer call with grad enabled",
            "put @ckptdeco.checkpointable on the layers' forward, or call ckptdeco.decorate(model) first",
        )
    if not any(seen.backwards for seen in watch.passes):
        raise PolicyError("step", step, "no backward came to its layer calls", "call loss.backward() in the step")


def _key(seen: CallSeen) -> tuple[str, int, int]:
    return seen.name, seen.chain, seen.position


def _calls(watch: Watch, index: int) -> list[CallSeen]:
    return watch.passes[index].calls if index < len(watch.passes) else []


def _weight(seen: PassSeen) -> int:
    """What tells the largest pass of a step; only one that backward went through counts."""
    return sum(call.input_bytes + call.output_bytes for call in seen.calls) + len(seen.calls) if seen.backwards else -1


def _times(watch: Watch, index: int) -> list[tuple[float, float, float]]:
    """Forward, backward and skipped seconds of the calls of a pass."""
    return [_times_of(watch.clock, seen) for seen in watch.passes[index].calls]


def _times_of(clock: Clock, seen: CallSeen) -> tuple[float, float, float]:
    packing = [clock.seconds(*pair) for pair in seen.packs]
    forward_s = max(0.0, clock.seconds(seen.begin, seen.end) - sum(packing))
    backward_s = 0.0 if seen.left is None else max(0.0, clock.seconds(seen.reached, seen.left))
    skipped_s = 0.0
    if seen.last_saved >= 0:
        after = clock.seconds(seen.packs[seen.last_saved][0], seen.end) - sum(packing[seen.last_saved :])
        skipped_s = min(max(0.0, after), forward_s)
    return forward_s, backward_s, skipped_s


def _cost(bytes_of: Bytes, index: int, times: list[tuple[float, float, float]]) -> LayerCost:
    """The figures of one call."""
    seen = bytes_of.calls[index]
    backward_temp, shared_temp = bytes_of.backward_temp(index)
    forward_s, backward_s, skipped_s = [statistics.median(values) for values in zip(*times, strict=True)]
    return LayerCost(
        seen.name,
        seen.position,
        seen.chain,
        forward_s,
        backward_s,
        0.0 if seen.saves_output else skipped_s,
        seen.input_bytes,
        bytes_of.extra[index] + seen.saved_input_bytes,
        seen.output_bytes,
        bytes_of.forward_temp(index),
        backward_temp,
        shared_temp,
        seen.saved_input_bytes == seen.input_bytes,
    )


@contextmanager
def _progress(n_steps: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, if rich is installed."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=n_steps)
        yield lambda: bar.advance(task)
