"""The fastest schedule within a number of bytes, for a chain of unequal layers.

Start at `Planner.fastest`. The dynamic programme is in `table`, what it writes down in `planned`, the classic
schedules that it is compared with in `rivals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log2

from ckptdeco.errors import BudgetError, PolicyError
from ckptdeco.schedule.actions import Schedule
from ckptdeco.schedule.classic import StoreAll
from ckptdeco.schedule.rivals import Rivals
from ckptdeco.schedule.simulator import Layer, Simulation, simulate
from ckptdeco.schedule.table import Table, common_divisor, numpy

N_SLOTS = 500
_MAX_TABLES = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule with its predicted cost.

    Args:
        schedule: what to keep and recompute; `StoreAll` if nothing needs to be dropped.
        base_bytes: what is live besides the layer calls: parameters, gradients, optimizer state.
        prediction: what `simulate` says of the schedule.
    """

    schedule: Schedule
    base_bytes: int
    prediction: Simulation = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak, with the base."""
        return self.base_bytes + self.prediction.peak_bytes

    @property
    def elapsed_s(self) -> float:
        """The predicted seconds of forward and backward of the layer calls."""
        return self.prediction.elapsed_s

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """What the peak is made of, largest concerns first: name and bytes."""
        held, peak = self.prediction.peak_held_bytes, self.prediction.peak_bytes
        return (
            ("outside the layers (parameters, gradients, optimizer state)", self.base_bytes),
            (f"kept for layer calls at {self.prediction.peak_step}", held),
            ("the running layer, gradients and outputs then", peak - held),
        )


class Planner:
    """Finds the fastest schedule of a chain for any budget.

    Args:
        chain: the layer calls, in order of forward, as measured; each with its menu.
        head_bytes: the most that head and loss hold between forward and the last layer's backward, the last output not
            included.
        base_bytes: what is live all the time: parameters, gradients, optimizer state.
        n_slots: how fine bytes are counted.

    Raises:
        PolicyError: the chain is empty.
        MissingExtraError: numpy is not installed, and something has to be dropped.

    Cost:
        Compute: 50 unlike layers take under 0.1 s, 200 about 1.5 s (`python -m benchmarks.planning`), equal layers a
        tenth; the table is kept, and answers all other budgets down to 0.7 of it at once. The peak is never above the
        budget, and the time the least of all answers to the two questions, up to what rounding to slots loses: nothing
        if `n_slots` times the sizes' greatest common divisor reach the budget. It depends on nothing asked before.

    Example:
        >>> layers = [Layer(1.0, 2.0, input_bytes=10, saved_bytes=170, skipped_s=0.25)] * 12
        >>> planner = Planner(layers)
        >>> planner.plain.peak_bytes, planner.plain.elapsed_s
        (2070, 36.0)
        >>> plan = planner.fastest(1000)
        >>> plan.peak_bytes, plan.elapsed_s
        (950, 41.25)

    References:
        Beaumont et al. 2019, Optimal checkpointing for heterogeneous chains, Algorithm 1. Differs: early stop and the
        held input of a recompute are in the cost, forward and recomputes are told apart, and calls have a menu.
    """

    def __init__(
        self, chain: Sequence[Layer], *, head_bytes: int = 0, base_bytes: int = 0, n_slots: int = N_SLOTS
    ) -> None:
        self.chain = tuple(chain)
        self.head_bytes = head_bytes
        self.base_bytes = base_bytes
        self.n_slots = n_slots
        self.plain = self._plan(StoreAll())
        self._tables: dict[int, Table] = {}
        self._divisor: int | None = None
        self._rivals: Rivals | None = None
        self._least: Plan | None = None

    def __repr__(self) -> str:
        return f"Planner({len(self.chain)} layers, plain {self.plain.peak_bytes} bytes)"

    def _plan(self, schedule: Schedule) -> Plan:
        return Plan(schedule, self.base_bytes, simulate(self.chain, schedule, head_bytes=self.head_bytes))

    def fastest(self, budget_bytes: int) -> Plan:
        """The fastest plan whose peak is at most `budget_bytes`; plain if that fits.

        Raises:
            PolicyError: the budget is not a whole number.
            BudgetError: no plan fits.
        """
        if type(budget_bytes) is not int:
            raise PolicyError("budget", budget_bytes, "must be a whole number of bytes", "budget=2 * 2**30")
        if self.plain.peak_bytes <= budget_bytes:
            return self.plain
        room = budget_bytes - self.base_bytes
        table, plan = self._table(room), None
        if room > 0:
            plan = self._from_table(table, room)
        if plan is None:
            plan = self.least()
            if plan.peak_bytes > budget_bytes:
                raise BudgetError(budget_bytes, plan.peak_bytes, plan.parts)
        return plan if table.is_exact else self._faster_classic(plan, room)

    def least(self) -> Plan:
        """The plan with the lowest peak that was found, the fastest of these."""
        if self._least is None:
            best, plan = None, self.plain
            while best is None or plan.peak_bytes < best.peak_bytes:  # finer each time
                best = plan
                table = self._table(plan.prediction.peak_bytes - 1)
                steps = table.steps()
                if steps:
                    plan = self._plan(table.schedule(steps[0]))
            self._least = best
        return self._least

    def frontier(self, n_points: int = 40) -> tuple[Plan, ...]:
        """Plans from the least memory to plain, each faster than the one before: at most about `n_points`."""
        plain_bytes = self.plain.prediction.peak_bytes
        plans = [self.least(), self.plain]
        for top in (plain_bytes, plain_bytes // 4):  # twice as fine where little memory is left
            table = self._table(top)
            steps = table.steps()
            stride = max(1, ceil(2 * len(steps) / n_points))
            plans += [self._plan(table.schedule(entry)) for entry in steps[::stride]]
        front: list[Plan] = []
        for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.elapsed_s)):
            if not front or plan.elapsed_s < front[-1].elapsed_s:
                front.append(plan)
        return tuple(front)

    def _table(self, room: int) -> Table:
        """The table that answers for `room`; whatever was asked before, it is the same.

        If sizes have a large common divisor, it is one without rounding: the last entry differs from `room` by a
        multiple of that. Else its top is the least above `room` of a series that falls by √2 from the plain peak.
        """
        top = self.plain.prediction.peak_bytes
        if self._divisor is None:
            self._divisor = common_divisor(self.chain)
        if room // self._divisor <= self.n_slots:
            n_more = min((top - room) // self._divisor, self.n_slots - room // self._divisor)
            top = room + max(0, n_more) * self._divisor
        else:
            n_halves = max(0, int(2 * log2(top / room)))
            top = next(t for n in range(n_halves, -1, -1) if (t := ceil(top / 2 ** (n / 2))) >= room)
        if top not in self._tables:
            while len(self._tables) >= _MAX_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[top] = Table(self.chain, top, self.n_slots, head_bytes=self.head_bytes)
        return self._tables[top]

    def _from_table(self, table: Table, room: int) -> Plan | None:
        """The fastest of the table that fits: rounding is upwards, so an entry beyond `room` may."""
        low, high = table.entry(room), table.width - 1
        best = None
        if low >= 0 and table.np.isfinite(table.extra_s[low]):
            best = self._plan(table.schedule(low))
        while low < high and not table.is_exact:
            middle = (low + high + 1) // 2
            plan = self._plan(table.schedule(middle)) if table.np.isfinite(table.extra_s[middle]) else None
            if plan is not None and plan.prediction.peak_bytes > room:
                high = middle - 1
                continue
            low = middle
            if plan is not None and (best is None or plan.elapsed_s < best.elapsed_s):
                best = plan
        return best

    def _faster_classic(self, plan: Plan, room: int) -> Plan:
        """The fastest of the classic schedules if it is faster: it can be by what rounding lost."""
        if self._rivals is None:
            self._rivals = Rivals(self.chain, self.head_bytes, numpy())
        found = self._rivals.best(room, plan.elapsed_s - self.plain.elapsed_s)
        return plan if found is None else Plan(found[0], self.base_bytes, found[1])
