"""The log of the pass that runs on this thread, and the last one anywhere, for the report."""

from __future__ import annotations

import threading
from typing import Any

from ckptdeco.engine.record import PassLog

__all__ = ["current_log", "last_log"]

_MAX_RECORDS = 50_000  # of forwards without any backward


class _Here(threading.local):
    log: PassLog | None = None


_here = _Here()
_latest: list[PassLog] = []


def current_log(policy: Any, begins_chain: bool) -> PassLog:
    """The log that the next layer call writes to.

    A new one after a backward, under another policy, or where a chain begins and the calls so far are gone.
    """
    log = _here.log
    if (
        log is None
        or log.is_over
        or log.policy is not policy
        or (begins_chain and log.is_abandoned())
        or len(log.records) >= _MAX_RECORDS
    ):
        _here.log = log = PassLog(policy)
        _latest[:] = [log]
    return log


def last_log() -> PassLog | None:
    """The last pass of this thread, or of any thread if this one had none."""
    return _here.log or (_latest[0] if _latest else None)
