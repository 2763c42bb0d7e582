"""What a chain of layer calls keeps, drops and recomputes, and when; free of torch.

Invariant: a schedule is a pure function of positions. It answers two questions (what happens to a call at
forward, how a call is recomputed at backward) and has no state, so it may be shared by threads and passes.
Start at `actions.Schedule`, then `classic.Segments`; `simulator.simulate` runs any schedule and predicts its
peak memory and time, and `optimal.Planner` finds the fastest for a number of bytes.
"""

from ckptdeco.schedule.actions import Action, Dropped, Event, Freed, Kept, Recomputed, Schedule
from ckptdeco.schedule.chain import Chain, resolve
from ckptdeco.schedule.classic import (
    Binomial,
    EveryNth,
    Segments,
    StoreAll,
    StoreLast,
    TwoLevel,
    sqrt_segment,
)
from ckptdeco.schedule.optimal import Plan, Planner
from ckptdeco.schedule.planned import Planned, Walk
from ckptdeco.schedule.simulator import Layer, Option, Simulation, best_segment, simulate

__all__ = [
    "Action",
    "Binomial",
    "Chain",
    "Dropped",
    "Event",
    "EveryNth",
    "Freed",
    "Kept",
    "Layer",
    "Option",
    "Plan",
    "Planned",
    "Planner",
    "Recomputed",
    "Schedule",
    "Segments",
    "Simulation",
    "StoreAll",
    "StoreLast",
    "TwoLevel",
    "Walk",
    "best_segment",
    "resolve",
    "simulate",
    "sqrt_segment",
]
