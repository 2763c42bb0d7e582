"""Which bytes of a metered step belong to which layer call, in the terms of the simulator.

The simulator knows of a layer its input, saved tensors, output, and what is alive beyond those for a while. A metered
step gives live bytes over time. So temporaries are what is alive beyond what the simulator counts at that place; that
makes its prediction exact for the schedule that was metered, also where a model has more than a chain.
"""

from __future__ import annotations

from typing import Any

from ckptdeco.planning.watching import PassSeen, StepMeter

__all__ = ["Bytes"]


class Bytes:
    """The bytes of one pass.

    Attributes:
        calls: its layer calls, in order of forward.
        extra: what each saves beyond its input.
        other: alive throughout, and of no call.
    """

    def __init__(self, meter: StepMeter, seen: PassSeen) -> None:
        self.calls = seen.calls
        self._pass = seen
        self._live = [0, *[point.live_bytes for point in meter.trace.timeline]]
        self._freed_at = meter.freed_at
        self.extra = [
            max(0, self._live[call.end_at] - self._live[call.begin_at] - call.output_bytes) for call in self.calls
        ]
        # Held by each call once it is over: its input, and all that it saved if it was stored.
        self._held = [
            call.input_bytes + (extra if call.is_stored else 0)
            for call, extra in zip(self.calls, self.extra, strict=True)
        ]
        last = self.calls[-1]
        self.other = max(0, self._live[last.over_at] - sum(self._held) - last.output_bytes)

    def forward_temp(self, index: int) -> int:
        """Alive for a while in the forward of a call."""
        call = self.calls[index]
        return max(0, self._peak(call.begin_at, call.end_at) - self._live[call.end_at])

    def backward_temp(self, index: int) -> tuple[int, int]:
        """The same in its backward, and how much of it is only there if the call before holds this one's input, too."""
        call = self.calls[index]
        if call.reached is None:
            return 0, 0
        is_last = index == len(self.calls) - 1
        gradients = call.input_bytes + (call.output_bytes if is_last else self.calls[index + 1].input_bytes)
        saved = 0 if call.is_stored else self.extra[index]
        counted = self.other + sum(self._held[: index + 1]) + saved + gradients
        peak = alone = self._peak(call.reached_at, call.left_at)
        for serial, n_bytes in call.shared.items():
            freed_at = self._freed_at.get(serial, call.left_at)
            if call.reached_at <= freed_at < call.left_at:
                peak = max(peak, self._peak(freed_at + 1, call.left_at) + n_bytes)
        return max(0, peak - counted), max(0, peak - counted) - max(0, alone - counted)

    def base(self) -> dict[str, Any]:
        """What `Base` has of bytes beside what no policy changes."""
        first, last, backwards = self.calls[0], self.calls[-1], self._pass.backwards
        turn_at = max(self._pass.turn_at, last.over_at)
        at_turn = self._live[turn_at]
        return {
            "head_input_bytes": last.output_bytes,
            "head_saved_bytes": max(0, at_turn - self._live[last.over_at] + last.output_bytes),
            "head_forward_temp_bytes": max(0, self._peak(last.over_at, turn_at) - at_turn),
            "head_backward_temp_bytes": max(
                0, self._peak(turn_at, backwards[0].needed_at) - at_turn - last.output_bytes
            ),
            "head_input_saved": self._pass.holds_output,
            "other_bytes": self.other,
            "outside_peak_bytes": max(
                self._peak(0, first.begin_at), self._peak(backwards[-1].left_at, len(self._live) - 1)
            ),
        }

    def _peak(self, start: int, end: int) -> int:
        """The most bytes alive from one place of the timeline to another."""
        return max(self._live[start : max(start, end) + 1])
