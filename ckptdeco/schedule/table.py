"""The dynamic programme: the least time to recompute any stretch of a chain with any memory.

Let `held` be what is kept for the calls before i. With m bytes beyond it, and the gradient of call l's output come:

* node(i, l, m): the input of i is kept; the saved tensors of i…l are not there. A walk is run from i to l.
* walk(i, l, m): the same while the walk goes on: the input of i has just been computed.
* head(i, m): forward has come to i and goes on to the loss.

A call i on the way is (a) run with its saved tensors, which leaves walk(i+1, l, m − saved), or (b) its input is kept,
i…j−1 run without, which leaves walk(j, l, m − input) and then, with all memory, node(i, j−1, m). The walk ends with
l, which early stop cuts short. All three agree with `simulate` byte by byte; bytes are counted in slots, rounded up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ckptdeco.extras import MissingExtraError
from ckptdeco.schedule.actions import Action
from ckptdeco.schedule.costs import Call, array, calls_of
from ckptdeco.schedule.planned import Planned, Walk
from ckptdeco.schedule.simulator import Layer, Option

SAVE, DROP_KEEP, DROP = Action.SAVE, Action.DROP_KEEP, Action.DROP


def numpy() -> Any:
    """The array package, which is an extra.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import numpy as np
    except ImportError as error:
        raise MissingExtraError(["numpy"], "budget") from error
    return np


class Grid:
    """Bytes as slots. Row entry m stands for `base + m · slot` bytes, the last for all of `top_bytes`."""

    __slots__ = ("base", "n_slots", "slot")

    def __init__(self, top_bytes: int, slot: int) -> None:
        self.slot = slot
        self.n_slots = top_bytes // slot
        self.base = top_bytes % slot

    @classmethod
    def fitting(cls, top_bytes: int, n_slots: int, sizes: Any, np: Any) -> Grid:
        """The grid of at most `n_slots` that rounds these sizes up by least, not at all if it can."""
        divisor = int(np.gcd.reduce(sizes)) or 1
        if top_bytes // divisor <= n_slots:
            return cls(top_bytes, divisor)
        least = -(-top_bytes // n_slots)
        slots = np.unique(np.linspace(least, 2 * least, 101).astype(np.int64))
        excess = (-sizes[:, None] % slots).sum(axis=0) + slots * (len(sizes) // 8)  # a coarse grid costs resolution
        return cls(top_bytes, int(slots[excess.argmin()]))

    def taken(self, n_bytes: Any) -> Any:
        """Slots that hold so much."""
        return -(-n_bytes // self.slot)

    def entry(self, n_bytes: int) -> int:
        """The first entry with so much memory."""
        return max(0, -((self.base - n_bytes) // self.slot))

    def entries(self, n_bytes: Any) -> Any:
        """The same for an array."""
        return (-((self.base - n_bytes) // self.slot)).clip(0)

    def n_bytes(self, entry: int) -> int:
        """The memory of an entry."""
        return self.base + entry * self.slot


class Stretches:
    """node and walk for all stretches of a chain whose calls are all dropped by one way.

    Stretches of equal kinds are solved once. Rows are in seconds: `walk(i, l)` is walk(i, l, ·), `node(i, l)` is
    node(i, l, ·) and one more run of i…l, for that is how (b) needs it. Where all stretches differ, the rows that one
    of them needs lie side by side: the walks of one l, the nodes of one i.
    """

    def __init__(self, calls: Sequence[Call], grid: Grid, np: Any, *, by_kind: bool) -> None:
        self.calls, self.grid, self.np, self.n = calls, grid, np, len(calls)
        self.width = grid.n_slots + 1
        self.pins = [*itertools.accumulate((call.pinned_bytes for call in calls), initial=0)]
        self.runs = [*itertools.accumulate((call.rerun_s for call in calls), initial=0.0)]
        self.walk_ids, self.node_ids = np.zeros((2, self.n, self.n), np.intp)
        fresh = self._name(by_kind)
        self.walks, self.nodes = np.empty((2, len(fresh), self.width), np.float32)
        # per row: the first entry that is feasible
        self.first_walk, self.first_node = np.full((2, len(fresh)), self.width, np.intp)
        self.full = [self.width] * len(fresh)  # per walk: from when on storing all is possible
        run_bytes = array(calls, "run_bytes", np)
        self.most_run = [np.maximum.accumulate(np.concatenate([[0], run_bytes[i + 1 :]])) for i in range(self.n)]
        self.buffer = np.empty((self.n, self.width), np.float32)
        for i, last in fresh:
            self._solve(i, last)

    def _name(self, by_kind: bool) -> list[tuple[int, int]]:
        """Gives each stretch the numbers of its rows, equal ones the same; returns one stretch per number."""
        np, n = self.np, self.n
        kinds: dict[Any, int] = {}
        kind = [kinds.setdefault(call if by_kind else i, len(kinds)) for i, call in enumerate(self.calls)]
        known: dict[tuple[int, int], int] = {}
        fresh: list[tuple[int, int]] = []
        after: list[int] = []
        for i in reversed(range(n)):
            row = []
            for last in range(i, n):
                key = (kind[i], -1 if last == i else after[last - i - 1])
                number = known.setdefault(key, len(fresh))
                if number == len(fresh):
                    fresh.append((i, last))
                row.append(number)
            self.node_ids[i, i:] = after = row
        by_last = np.empty(len(fresh), np.intp)
        by_last[sorted(range(len(fresh)), key=lambda number: fresh[number][::-1])] = np.arange(len(fresh))
        self.walk_ids = by_last[self.node_ids]
        self.are_nodes_together = [bool((np.diff(self.node_ids[i, i:]) == 1).all()) for i in range(n)]
        self.are_walks_together = [bool((np.diff(self.walk_ids[: i + 1, i]) == 1).all()) for i in range(n)]
        return fresh

    def _right(self, i: int, last: int) -> Any:
        """The rows of walk(j, last) for j from i + 1."""
        ids = self.walk_ids
        if self.are_walks_together[last]:
            return slice(ids[i + 1, last], ids[last, last] + 1)
        return ids[i + 1 : last + 1, last]

    def _left(self, i: int, last: int) -> Any:
        """The rows of node(i, j − 1) for the same j."""
        ids = self.node_ids
        return slice(ids[i, i], ids[i, last - 1] + 1) if self.are_nodes_together[i] else ids[i, i:last]

    def _solve(self, i: int, last: int) -> None:
        call, end = self.calls[i], self.calls[last]
        walk_id, node_id = self.walk_ids[i, last], self.node_ids[i, last]
        walk, node = self.walks[walk_id], self.nodes[node_id]
        run_s = self.np.float32(self.runs[last + 1] - self.runs[i])
        if not end.saved_bytes:  # who saved nothing is not brought back (R28)
            walk[:] = self.np.inf
            node[:] = end.rerun_s
            first = self.grid.entry(call.input_bytes + self.pins[last + 1] - self.pins[i] + end.backward_bytes)
            if i < last:
                node += self.nodes[self.node_ids[i, last - 1]]
                first = max(first, int(self.first_node[self.node_ids[i, last - 1]]))
            node[:first] = self.np.inf
            self.first_node[node_id] = first
            return
        first, full = self._store(i, last, call.held_bytes, walk)
        self.full[walk_id] = full
        first_kept = first
        if call.held_kept_bytes != call.held_bytes:
            first_kept, full = self._store(i, last, call.held_kept_bytes, node)
        best, lowest = self._keep(i, last, min(full, self.width)) if i < last else (None, self.width)
        if best is not None:
            self.np.minimum(walk[lowest:full], best, out=walk[lowest:full])
        if call.held_kept_bytes == call.held_bytes:
            self.np.add(walk, run_s, out=node)
        else:
            if best is not None:
                self.np.minimum(node[lowest:full], best, out=node[lowest:full])
            node += run_s
        self.first_walk[walk_id], self.first_node[node_id] = min(first, lowest), min(first_kept, lowest)

    def _store(self, i: int, last: int, held_bytes: int, row: Any) -> tuple[int, int]:
        """(a), into `row`; returns from which entry on it is feasible, and from which on for all calls."""
        grid, call, end = self.grid, self.calls[i], self.calls[last]
        need = call.save_bytes + self.pins[last + 1] - self.pins[i + 1] + end.gradient_bytes
        if i < last or not call.skipped_s:
            need += call.output_bytes
        needed = grid.entry(max(need, held_bytes + call.backward_bytes))
        if i == last:
            row[:] = call.rerun_s - call.skipped_s
            first = full = needed
        else:
            taken = min(grid.taken(held_bytes), self.width)
            rest = self.walk_ids[i + 1, last]
            self.np.add(self.walks[rest, : self.width - taken], self.np.float32(call.rerun_s), out=row[taken:])
            first = max(taken + int(self.first_walk[rest]), needed)
            full = max(taken + self.full[rest], needed)
        row[:first] = self.np.inf
        return min(first, self.width), full

    def _keep(self, i: int, last: int, full: int) -> tuple[Any, int]:
        """(b), below the entry from which on all may be stored anyway; returns from which entry on it is feasible."""
        np = self.np
        taken, lowest = self._kept(i, last)
        if lowest >= full:
            return None, self.width
        right, left = self._right(i, last), self._left(i, last)
        firsts = np.maximum(self.first_walk[right] + taken, self.first_node[left])
        lowest = max(lowest, int(firsts.min()))
        if lowest >= full:
            return None, self.width
        if isinstance(taken, int):
            walks = self.walks[right, lowest - taken : full - taken]
        else:
            right = np.arange(right.start, right.stop) if isinstance(right, slice) else right
            walks = self._at(right[:, None], np.arange(lowest, full) - taken[:, None])
        sums = np.add(walks, self.nodes[left, lowest:full], out=self.buffer[: last - i, lowest:full])
        return sums.min(axis=0), lowest

    def _at(self, walk: Any, entries: Any) -> Any:
        """Walks at these entries, where less than no memory is infeasible."""
        return self.np.where(entries < 0, self.np.float32("inf"), self.walks[walk, self.np.maximum(entries, 0)])

    def _kept(self, i: int, last: int) -> tuple[Any, int]:
        """What (b) takes, in slots, for each j if calls hold results, and the entry that it needs at least.

        Whatever j is, all calls before the last run on the walk, with the input of i kept and the gradient waiting.
        """
        call, grid = self.calls[i], self.grid
        pinned = self.pins[last + 1] - self.pins[i]
        most_run = max(call.forward_temp_bytes + call.output_bytes, int(self.most_run[i][last - i - 1]))
        taken = int(grid.taken(call.input_bytes))
        need = call.input_bytes + pinned + self.calls[last].gradient_bytes + most_run
        lowest = max(taken, grid.entry(need))
        if pinned:
            return grid.taken(self.np.array(self.pins[i + 1 : last + 1]) - self.pins[i] + call.input_bytes), lowest
        return taken, lowest

    def node(self, i: int, entries: Any) -> Any:
        """Of the stretches from i to each l, the seconds with these entries."""
        runs = self.np.array(self.runs[i + 1 :]) - self.runs[i]
        return self.nodes[self.node_ids[i, i:]][:, entries] - runs[:, None]

    def split(self, i: int, last: int, entry: int, *, is_kept: bool) -> int:
        """Where the best walk goes on: i for (a), else j of (b)."""
        if i == last:
            return i
        np, call = self.np, self.calls[i]
        row = np.empty(self.width, np.float32)
        self._store(i, last, call.held_kept_bytes if is_kept else call.held_bytes, row)
        taken, lowest = self._kept(i, last)
        if entry < lowest:
            return i
        right, left = self.walk_ids[i + 1 : last + 1, last], self.node_ids[i, i:last]
        sums = self._at(right, entry - taken) + self.nodes[left, entry]
        best = int(sums.argmin())
        return i if row[entry] <= sums[best] else i + 1 + best


def _ways(chain: Sequence[Layer]) -> list[list[Call]]:
    """The calls dropped plainly, then by each entry of the menus."""
    return [calls_of(chain, way) for way in (None, *range(max(len(layer.menu) for layer in chain)))]


def _sizes(ways: Sequence[Sequence[Call]], np: Any) -> Any:
    """All sizes that are taken from a memory."""
    names = ("input_bytes", "pinned_bytes", "saved_bytes", "held_bytes", "held_kept_bytes")
    return np.concatenate([array(calls, name, np) for calls in ways for name in names])


def common_divisor(chain: Sequence[Layer]) -> int:
    """Of all sizes that a table rounds: with slots of this size, or a part of it, nothing is lost."""
    np = numpy()
    return int(np.gcd.reduce(_sizes(_ways(chain), np))) or 1


class Table:
    """The answer for every memory up to `top_bytes`.

    Args:
        chain: the layer calls, in order of forward.
        top_bytes: the most memory that is asked for.
        n_slots: how fine bytes are counted; they are exact if so many of their common divisor are enough.
        head_bytes: as in `simulate`.
        by_kind: whether stretches of equal layers are solved once.

    Attributes:
        extra_s: row of seconds beyond those of the plain pass, by entry; infinite where nothing fits.
        is_exact: whether no byte is lost to rounding.

    Raises:
        MissingExtraError: numpy is not installed.

    Cost:
        Memory: 4 · s · (slots + 1) bytes twice for each way of the menu, s being the number of different stretches, at
        most L(L+1)/2. Compute: O(s · L · slots).
    """

    def __init__(
        self, chain: Sequence[Layer], top_bytes: int, n_slots: int, *, head_bytes: int = 0, by_kind: bool = True
    ) -> None:
        self.np = np = numpy()
        self.top_bytes = top_bytes
        ways = _ways(chain)
        sizes = _sizes(ways, np)
        self.grid = grid = Grid.fitting(top_bytes, n_slots, sizes, np)
        self.is_exact = not (sizes % grid.slot).any()
        self.ways = [Stretches(calls, grid, np, by_kind=by_kind) for calls in ways]
        self.calls, self.n, self.width = ways[0], len(chain), grid.n_slots + 1
        self.heads = np.full((self.n + 1, self.width), np.inf)
        self.heads[-1, grid.entry(self.calls[-1].output_bytes + head_bytes) :] = 0.0
        for i in reversed(range(self.n)):
            stored, *kept = self._candidates(i, np.arange(self.width))
            self.heads[i] = np.minimum.reduce([stored, *[sums.min(axis=0) for sums in kept]])
        self.extra_s = self.heads[0]

    def _candidates(self, i: int, entries: Any) -> list[Any]:
        """head(i, ·) by way of (a), then, for each way of the menu, of (b) for all j."""
        np, grid, call = self.np, self.grid, self.calls[i]
        need = max(call.probe_bytes, call.saved_bytes + call.backward_bytes)
        found = [self._at(i + 1, entries - grid.taken(call.saved_bytes))]
        found[0][entries < grid.entry(need)] = np.inf
        ends = np.arange(i + 1, self.n + 1)
        for way in self.ways:
            pins = np.array(way.pins[i : self.n + 1]) - way.pins[i]
            probes = array(way.calls[i:], "probe_bytes", np)
            probes[1:] += call.input_bytes + pins[1:-1]
            sums = self._at(ends[:, None], entries - grid.taken(call.input_bytes + pins[1:])[:, None])
            sums += way.node(i, entries)
            sums[entries < grid.entries(np.maximum.accumulate(probes))[:, None]] = np.inf
            found.append(sums)
        return found

    def _at(self, i: Any, entries: Any) -> Any:
        """head(i, entries), where less than no memory is infeasible."""
        return self.np.where(entries < 0, self.np.inf, self.heads[i, self.np.maximum(entries, 0)])

    def steps(self) -> list[int]:
        """The entries with which a faster schedule becomes possible, the first that is feasible among them."""
        np = self.np
        steps: list[int] = np.flatnonzero(self.extra_s < np.concatenate([[np.inf], self.extra_s[:-1]])).tolist()
        return steps

    def entry(self, n_bytes: int) -> int:
        """The entry for so much memory; less than 0 if there is none."""
        return min((n_bytes - self.grid.base) // self.grid.slot, self.width - 1)

    def schedule(self, entry: int) -> Planned:
        """The fastest schedule with the memory of an entry that is feasible."""
        np, grid = self.np, self.grid
        actions: list[Action] = []
        options: list[Option | None] = []
        walks: list[Walk | None] = [None] * self.n
        i = 0
        while i < self.n:
            stored, *kept = self._candidates(i, np.array([entry]))
            best = min(range(len(kept)), key=lambda number: float(kept[number].min()))
            if stored[0] <= kept[best].min():
                actions.append(SAVE)
                options.append(None)
                entry -= int(grid.taken(self.calls[i].saved_bytes))
                i += 1
                continue
            way, end = self.ways[best], i + 1 + int(kept[best].argmin())
            actions += [DROP_KEEP, *[DROP] * (end - i - 1)]
            options += [call.option for call in way.calls[i:end]]
            self._plan(way, i, end - 1, entry, walks)
            entry -= int(grid.taken(self.calls[i].input_bytes + way.pins[end] - way.pins[i]))
            i = end
        return Planned(tuple(actions), tuple(walks), tuple(options) if any(options) else ())

    def _plan(self, way: Stretches, first: int, last: int, entry: int, walks: list[Walk | None]) -> None:
        """Writes down the walks of node(first, last)."""
        nodes = [(first, last, entry)]
        while nodes:
            first, last, entry = nodes.pop()
            while last >= first and not way.calls[last].saved_bytes:
                last -= 1
            if last < first:
                continue
            actions: list[Action] = []
            i, is_kept = first, True
            while i < last:
                j, call = way.split(i, last, entry, is_kept=is_kept), way.calls[i]
                if j == i:
                    actions.append(SAVE)
                    entry -= int(self.grid.taken(call.held_kept_bytes if is_kept else call.held_bytes))
                    j += 1
                else:
                    actions += [DROP_KEEP, *[DROP] * (j - i - 1)]
                    nodes.append((i, j - 1, entry))
                    entry -= int(self.grid.taken(call.input_bytes + way.pins[j] - way.pins[i]))
                i, is_kept = j, False
            walks[last] = Walk(first, (*actions, SAVE))
