"""What is told of each layer call: the report's raw material. Plain numbers; holds no tensor and no layer."""

from __future__ import annotations

import weakref
from typing import Any

from ckptdeco.schedule.actions import Action

__all__ = ["PassLog", "Record"]


class PassLog:
    """The records of one pass: all layer calls from the end of one backward to the end of the next."""

    __slots__ = ("first", "is_over", "policy", "records")

    def __init__(self, policy: Any) -> None:
        self.records: list[Record] = []
        self.is_over = False  # a backward has begun: the next layer call starts a new pass
        self.policy = policy
        self.first: weakref.ref[Any] | None = None

    def note(self, call: Any) -> None:
        """A call was run."""
        if self.first is None:
            self.first = weakref.ref(call)

    def is_abandoned(self) -> bool:
        """Whether the first call's graph is gone: a forward without backward, such as an evaluation with grad on."""
        return self.first is not None and self.first() is None


class Record:
    """One layer call.

    Attributes:
        name: the layer's qualified name.
        position: of the call in its chain.
        action: what was done with its saved tensors.
        why: the reason, where it is not simply the schedule.
        broken_by: what ended the chain's segment before this call, if something did.
        kept_bytes: inputs kept for it.
        input_bytes: its inputs that carry a graph.
        dropped_bytes: unique storages of saved tensors that were dropped.
        n_recomputed: how often it was run again.
    """

    __slots__ = (
        "action", "broken_by", "dropped_bytes", "input_bytes", "kept_bytes", "log", "n_recomputed", "name", "position",
        "why",
    )  # fmt: skip

    def __init__(self, name: str, position: int, action: Action, log: PassLog, why: str = "") -> None:
        self.name = name
        self.position = position
        self.action = action
        self.why = why
        self.broken_by = ""
        self.kept_bytes = 0
        self.input_bytes = 0
        self.dropped_bytes = 0
        self.n_recomputed = 0
        self.log = log

    def store(self, why: str) -> None:
        """The call had to be stored after all."""
        self.action = Action.SAVE
        self.why = why

    def measure(self, sources: list[Any], dropped_bytes: int) -> None:
        """Note what was kept for this call (a side input counts where it was kept first) and what was dropped."""
        self.dropped_bytes = dropped_bytes
        for source in sources:
            if getattr(source, "is_counted", True) is False:
                source.is_counted = True
                self.kept_bytes += source.n_bytes
