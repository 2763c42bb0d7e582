"""The numbers of a chain as the table needs them: bytes and seconds per call, for one way to drop all calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptdeco.schedule.simulator import Layer, Option


class Call(NamedTuple):
    """What one call costs, as `simulate` counts it.

    Two calls with equal values are of one kind: a stretch of calls costs the same wherever its kinds stand.
    """

    rerun_s: float  # forward, run again
    skipped_s: float
    input_bytes: int
    output_bytes: int
    gradient_bytes: int  # of its output, with the last output itself
    forward_temp_bytes: int
    backward_temp_bytes: int
    pinned_bytes: int  # of the option, from forward to backward
    saved_bytes: int
    held_bytes: int  # with its saved tensors, made on a walk
    held_kept_bytes: int  # the same if the input is kept, too
    probe_bytes: int  # live while it runs in forward
    option: Option | None

    @property
    def run_bytes(self) -> int:
        """Live while it runs again without saved tensors."""
        return self.forward_temp_bytes + self.input_bytes + self.output_bytes

    @property
    def save_bytes(self) -> int:
        """Live while it runs again with saved tensors, beyond the gradient and the output."""
        return self.held_kept_bytes + self.forward_temp_bytes

    @property
    def backward_bytes(self) -> int:
        """Live in its backward beyond what is held for it."""
        return self.gradient_bytes + self.input_bytes + self.backward_temp_bytes


def calls_of(chain: Sequence[Layer], way: int | None) -> list[Call]:
    """The calls of a chain, each dropped by the entry `way` of its menu if it has one, else plainly."""
    calls = []
    for i, layer in enumerate(chain):
        follower = chain[i + 1] if i + 1 < len(chain) else None
        output = layer.output_bytes
        if output is None:
            output = layer.input_bytes if follower is None else follower.input_bytes
        option = layer.menu[way] if way is not None and way < len(layer.menu) and layer.saved_bytes else None
        pinned, shared = (0, 0) if option is None else (option.kept_bytes, option.shared_bytes)
        running = option or layer
        calls.append(
            Call(
                running.forward_s,
                running.skipped_s,
                layer.input_bytes,
                output,
                2 * output if follower is None else follower.input_bytes,
                layer.forward_temp_bytes,
                layer.backward_temp_bytes,
                pinned,
                layer.saved_bytes,
                layer.saved_bytes + pinned - shared,
                layer.saved_bytes + pinned - shared + (0 if layer.shares_input else layer.input_bytes),
                layer.input_bytes + layer.extra_bytes + layer.forward_temp_bytes + output + pinned - shared,
                option,
            )
        )
    return calls


def array(calls: Sequence[Call], name: str, np: Any) -> Any:
    """One field of all calls as whole numbers."""
    return np.array([getattr(call, name) for call in calls], dtype=np.int64)
