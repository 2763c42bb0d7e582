"""The stack of active policies: nesting, interleaved generators, tasks, threads."""

import asyncio
import contextvars
import threading

import pytest

from ckptdeco import context


class On:
    """Stands for a policy: the context asks only whether it is off."""

    is_off = False


class Off:
    is_off = True


@pytest.fixture(autouse=True)
def _own_context():
    before = context.innermost()
    context.replace(None)
    yield
    context.replace(before)


def active_policy():
    entry = context.active()
    return None if entry is None else entry.policy


def test_nothing_is_active_at_first():
    assert context.active() is None


def test_innermost_policy_is_active_and_the_outer_comes_back():
    a, b = On(), On()
    outer = context.push(a)
    inner = context.push(b)
    assert context.active() is inner
    assert inner.parent is outer
    assert context.pop(b) is inner
    assert context.active() is outer
    assert context.pop(a) is outer
    assert context.active() is None


def test_same_policy_twice_gets_two_entries():
    a = On()
    first, second = context.push(a), context.push(a)
    assert first is not second
    assert context.pop(a) is second
    assert context.active() is first
    context.pop(a)


def test_policy_that_is_off_hides_the_outer_one():
    a, off = On(), Off()
    context.push(a)
    entry = context.push(off)
    assert entry.alive
    assert not entry.is_on
    assert context.active() is None
    context.pop(off)
    assert active_policy() is a
    context.pop(a)


def test_blocks_left_in_any_order_never_bring_a_dead_policy_back():
    """R34: interleaved generators leave in the order in which they entered."""
    a, b, c = On(), On(), On()
    for policy in (a, b, c):
        context.push(policy)
    context.pop(b)
    assert active_policy() is c
    context.pop(a)
    assert active_policy() is c
    context.pop(c)
    assert context.active() is None


def test_dead_off_entry_does_not_hide_the_one_below():
    a, off, b = On(), Off(), On()
    context.push(a)
    context.push(off)
    context.push(b)
    context.pop(off)
    context.pop(b)
    assert active_policy() is a
    context.pop(a)


def test_pop_of_a_policy_that_is_not_there_is_none():
    a = On()
    assert context.pop(a) is None
    context.push(a)
    context.pop(a)
    assert context.pop(a) is None


def test_replace_switches_policies_off_until_restore():
    a = On()
    entry = context.push(a)
    before = context.innermost()
    context.replace(None)
    assert context.active() is None
    context.replace(before)
    assert context.active() is entry
    context.pop(a)


def test_restore_does_not_revive_what_was_left_meanwhile():
    a, b = On(), On()
    outer, inner = context.push(a), context.push(b)
    before = context.innermost()
    context.replace(None)
    context.remove(inner)
    context.replace(before)
    assert context.active() is outer
    context.remove(outer)


def test_new_entries_hang_on_living_ones_so_that_the_stack_does_not_grow():
    a, b = On(), On()
    context.push(a)
    for _ in range(100):
        context.push(b)
        context.pop(b)
    assert context.push(b).parent.policy is a
    context.pop(b)
    context.pop(a)


def test_entry_counts_calls_and_remembers_five_names():
    entry = context.push(On())
    for i in range(8):
        entry.note(f"layers.{i % 7}", is_matched=i == 3)
    context.remove(entry)
    assert (entry.n_seen, entry.n_matched) == (8, 1)
    assert entry.names == tuple(f"layers.{i}" for i in range(5))
    assert entry.unmatched_backward is False
    assert not hasattr(entry, "__dict__")


def test_absorb_adds_the_counts_of_another_part():
    total, part = context.Entry(On()), context.Entry(On())
    total.note("a", is_matched=False)
    part.note("a", is_matched=True)
    part.note("b", is_matched=False)
    part.unmatched_backward = True
    total.absorb(part)
    assert (total.n_seen, total.n_matched, total.names) == (3, 1, ("a", "b"))
    assert total.unmatched_backward is True


def test_tasks_inherit_and_do_not_disturb_each_other():
    a = On()

    async def child(policy, seen):
        seen.append(active_policy())
        context.push(policy)
        await asyncio.sleep(0)
        seen.append(active_policy())
        context.pop(policy)
        seen.append(active_policy())

    async def main():
        context.push(a)
        b, c, seen_b, seen_c = On(), On(), [], []
        await asyncio.gather(child(b, seen_b), child(c, seen_c))
        assert seen_b == [a, b, a]
        assert seen_c == [a, c, a]
        context.pop(a)

    asyncio.run(main())


def test_task_that_outlives_the_block_does_not_keep_its_policy():
    a = On()

    async def child(event):
        assert active_policy() is a
        await event.wait()
        assert context.active() is None

    async def main():
        event = asyncio.Event()
        context.push(a)
        task = asyncio.ensure_future(child(event))
        await asyncio.sleep(0)
        context.pop(a)
        event.set()
        await task

    asyncio.run(main())


def test_threads_inherit_only_by_a_copied_context():
    """R34."""
    a, seen = On(), []
    context.push(a)
    for run in (lambda f: f(), contextvars.copy_context().run):
        thread = threading.Thread(target=run, args=(lambda: seen.append(active_policy()),))
        thread.start()
        thread.join()
    context.pop(a)
    assert seen == [None, a]
