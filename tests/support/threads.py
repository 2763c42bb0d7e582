"""Running one thing on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def on_thread(work: Callable[[], Any]) -> Any:
    """Runs `work` on a new thread, waits for it, and returns or raises what it did."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(work())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(got[0], BaseException):
        raise got[0]
    return got[0]
