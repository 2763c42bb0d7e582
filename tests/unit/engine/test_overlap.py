"""Windows of several threads see each other; those of one thread do not count."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckptdeco.engine.overlap import Window, has_other_threads, rewinds


def elsewhere(work: Callable[[], object]) -> None:
    """Runs a function on another thread, and waits for it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def opened() -> Window:
    window = Window()
    window.open()
    return window


def test_windows_of_one_thread_do_not_overlap() -> None:
    outer = opened()
    inner = opened()
    assert not inner.close()
    assert not outer.close()
    assert not opened().close()


def test_window_within_that_of_another_thread_is_shared() -> None:
    outer = opened()
    seen: list[bool] = []
    elsewhere(lambda: seen.append(opened().close()))
    assert seen == [True]
    assert outer.close()
    assert not opened().close()


def test_window_that_ends_in_that_of_another_thread_is_shared() -> None:
    left: list[Window] = []
    first = opened()
    elsewhere(lambda: left.append(opened()))
    assert first.close()
    elsewhere(lambda: left.append(Window()))
    assert left[0].close()


def test_window_closed_twice_is_closed_once() -> None:
    outer = opened()
    inner = opened()
    inner.close()
    inner.close()
    seen: list[bool] = []
    elsewhere(lambda: seen.append(opened().close()))
    assert seen == [True]  # the outer one is still open
    outer.close()


def test_rewinds_of_other_threads_are_seen_while_they_last_and_afterwards() -> None:
    window = opened()
    elsewhere(lambda: (rewinds.begin(), rewinds.end()))
    window.close()
    assert window.is_rewound
    rewinds.begin()
    own = opened()
    own.close()
    assert not own.is_rewound
    seen: list[bool] = []

    def work() -> None:
        window = opened()
        window.close()
        seen.append(window.is_rewound)

    elsewhere(work)
    rewinds.end()
    elsewhere(work)
    assert seen == [True, False]


def test_other_threads_are_seen() -> None:
    seen: list[bool] = []
    elsewhere(lambda: seen.append(has_other_threads()))
    assert seen == [True]


def test_the_thread_that_refreshes_progress_bars_draws_nothing() -> None:
    class Monitor(threading.Thread):
        __module__ = "tqdm._monitor"

    for kind, expected in ((Monitor, False), (threading.Thread, True)):
        stop = threading.Event()
        thread = kind(target=stop.wait, daemon=True)
        before = has_other_threads()
        thread.start()
        assert has_other_threads() == (before or expected)
        stop.set()
        thread.join()
