"""`explain()`: what the last pass kept, dropped and recomputed, and where a chain broke."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptdeco.context import elsewhere
from ckptdeco.engine.passes import last_log
from ckptdeco.planning.text import size_text
from ckptdeco.schedule.actions import Action

__all__ = ["CallReport", "Explanation", "explain"]


@dataclass(frozen=True)
class CallReport:
    """One layer call of a pass.

    Attributes:
        name: the layer's qualified name.
        position: 0-based, in its chain.
        action: what was done with its saved tensors.
        kept_bytes: inputs kept for it; one shared by several calls counts where it was kept first.
        dropped_bytes: unique storages of saved tensors that were dropped.
        n_recomputed: how often its forward was run again so far.
        why: why it was stored, or what broke the chain before it; "" if nothing did.
    """

    name: str
    position: int
    action: Action
    kept_bytes: int
    dropped_bytes: int
    n_recomputed: int
    why: str

    def row(self, width: int) -> str:
        """One line of the table, with `width` characters for the name."""
        is_stored = self.action is Action.SAVE
        kept, dropped = ("all", "-") if is_stored else (size_text(self.kept_bytes), size_text(self.dropped_bytes))
        line = (
            f"{self.name:{width}}  {self.position:3d}  {self.action.name:9}  {kept:9}  {dropped:9}  {self.n_recomputed}"
        )
        return f"{line}  {self.why}" if self.why else line


@dataclass(frozen=True)
class Explanation:
    """What happened in a pass; prints as a table.

    Attributes:
        policy: the policy, as it reads; "" if there was no pass.
        calls: one report per layer call, in order.
        n_without_policy: decorated calls that other threads ran without a policy while one was active here: a
            thread has a policy only if it inherits the context, or runs a function that the policy decorates.
    """

    policy: str
    calls: tuple[CallReport, ...]
    n_without_policy: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of all kept inputs."""
        return sum(call.kept_bytes for call in self.calls)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of all dropped saved tensors."""
        return sum(call.dropped_bytes for call in self.calls)

    def __str__(self) -> str:
        if not self.calls:
            return "\n".join(
                [
                    "no decorated layer call took part in a policy with grad enabled "
                    "(only= and skip= may leave all out)",
                    "  Fix: put @ckptdeco.checkpointable on a layer's forward, and the step in "
                    "`with ckptdeco.policy(...):`",
                    *self._missed(),
                ]
            )
        width = max(len("layer"), *[len(call.name) for call in self.calls])
        n_stored = sum(call.action is Action.SAVE for call in self.calls)
        total = f"inputs kept {size_text(self.kept_bytes)}, saved tensors dropped {size_text(self.dropped_bytes)}"
        if n_stored:
            total += f", {n_stored} calls stored whole"
        rows = [call.row(width) for call in self.calls]
        lines = [
            f"{self.policy}: {len(self.calls)} layer calls, {total}",
            f"{'layer':{width}}  pos  action     kept       dropped    recomputed",
            *rows,
            *self._missed(),
        ]
        return "\n".join(lines)

    def _missed(self) -> list[str]:
        if not self.n_without_policy:
            return []
        return [
            f"{self.n_without_policy} decorated calls ran without a policy, on threads that did not inherit it",
            "  Fix: start the thread's function with contextvars.copy_context().run, or decorate it with the policy.",
        ]


def explain() -> Explanation:
    """Tell what the last pass did: per layer call kept or dropped, in bytes, recomputed how often, and why.

    A pass is all layer calls from one backward to the next. It is that of this thread; a thread without one gets the
    last of any.

    Returns:
        An `Explanation`; print it.

    Cost:
        Nothing during training beyond counters; here one object per layer call.

    Example:
        >>> import ckptdeco
        >>> print(ckptdeco.explain())  # doctest: +SKIP
    """
    log = last_log()
    n_missed = sum(list(elsewhere.n_missed.values()))
    if log is None:
        return Explanation("", (), n_missed)
    return Explanation(repr(log.policy), tuple([_report(record) for record in log.records]), n_missed)


def _report(record: Any) -> CallReport:
    why = record.why
    if not why and record.broken_by:
        why = f"chain broken before it: {record.broken_by}"
    return CallReport(
        record.name, record.position, record.action, record.kept_bytes, record.dropped_bytes, record.n_recomputed, why
    )
