"""`policy()` and `Policy`: which layer calls are recomputed, and how they are grouped.

A policy is a value: it resolves to a schedule for a chain and knows nothing of tensors. `Policy.at_forward` and
`Policy.at_backward` are the two questions that the decorator asks.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from ckptdeco import context
from ckptdeco.errors import PolicyError
from ckptdeco.matching import Selectors, is_selected, selectors, shown, unpacked
from ckptdeco.save import Chosen, Save, hashable, selects
from ckptdeco.schedule.actions import Action, Schedule
from ckptdeco.schedule.chain import Chain, resolve
from ckptdeco.schedule.classic import Binomial, Segments, StoreAll, StoreLast, TwoLevel

__all__ = ["Chain", "Policy", "Site", "policy"]

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P", bound="Policy")

_UNSET: Final[Any] = object()
_PLANNED = ("budget", "offload", "plan")
_DETERMINISM_CHECKS = ("default", "values", "none")
_FLAGS = ("nested", "preserve_rng_state", "early_stop", "debug")


class Site:
    """Where a decorated call happens: what a policy may look at to decide.

    Args:
        layer: the module, or the function.
        name: its qualified name.
        position: 0-based in its chain.
        chain: what is known of the chain.
    """

    __slots__ = ("chain", "layer", "name", "position")

    def __init__(self, layer: Any, name: str, position: int, chain: Chain) -> None:
        self.layer = layer
        self.name = name
        self.position = position
        self.chain = chain

    def __repr__(self) -> str:
        return f"Site({self.name!r}, position={self.position}, {self.chain!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Policy:
    """The value that `policy()` makes; see there for the fields.

    It is immutable, hashable and equal to another of the same class and fields (predicates compare by identity).
    As a context manager it may be entered again, also while it is active; as a decorator it is active whenever the
    function runs, on whichever thread, and for generators only while their own code runs.

    Subclass it for a rule of your own: override `at_forward`, and `at_backward` if calls are to be recomputed in
    another way than all together.

    Cost:
        Compute: `at_forward` takes under 1 µs for all policies that `policy()` makes, once the chain has been seen.

    Example:
        >>> class OnlyLarge(Policy):
        ...     def at_forward(self, site):
        ...         return Action.DROP_KEEP if site.layer.width > 1024 else Action.SAVE
        >>> OnlyLarge(debug=True)
        OnlyLarge(segment=1, debug=True)
    """

    segment: int | str | None = None
    every: int | None = None
    levels: int | str = 1
    only: Selectors = dataclasses.field(default=None, kw_only=True)
    skip: Selectors = dataclasses.field(default=None, kw_only=True)
    keep_last: int = dataclasses.field(default=0, kw_only=True)
    save: Save = dataclasses.field(default=None, kw_only=True)
    nested: bool = dataclasses.field(default=False, kw_only=True)
    preserve_rng_state: bool = dataclasses.field(default=True, kw_only=True)
    determinism_check: str = dataclasses.field(default="default", kw_only=True)
    early_stop: bool = dataclasses.field(default=True, kw_only=True)
    debug: bool = dataclasses.field(default=False, kw_only=True)
    is_off: bool = dataclasses.field(default=False, kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets a subclass leave out the `chain` of `at_backward`."""
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("at_backward")
        if inspect.isfunction(own) and len(inspect.signature(own).parameters) < 4:

            @functools.wraps(own)
            def at_backward(self: Any, first: int, target: int, chain: Chain | None = None) -> Sequence[Action]:
                answer: Sequence[Action] = own(self, first, target)
                return answer

            cls.at_backward = at_backward  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        for name in ("only", "skip"):
            object.__setattr__(self, name, selectors(name, getattr(self, name)))
        _check(self)
        object.__setattr__(self, "save", hashable(self.save))
        if self.segment is None and self.every is None and not self.is_off:
            object.__setattr__(self, "segment", {1: 1, 2: "sqrt", "log": None}[self.levels])

    # ---- which calls, and what happens to them

    def matches(self, layer: Any, name: str) -> bool:
        """Whether `only=` and `skip=` let this layer through."""
        if self.only is not None and not is_selected(self.only, layer, name):
            return False
        return self.skip is None or not is_selected(self.skip, layer, name)

    def at_forward(self, site: Site) -> Action:
        """What to do with the call at `site`."""
        return self._bound(site.chain).forward(site.position)

    def at_backward(self, first: int, target: int, chain: Chain | None = None) -> Sequence[Action]:
        """How the calls `first` to `target` are run to have the saved tensors of `target` back."""
        if chain is None:
            return (Action.SAVE,) * (target - first + 1)
        return self._bound(chain).backward(first, target)

    def schedule_for(self, chain: Chain) -> Schedule:
        """The schedule for a chain; while its length or costs are needed but unknown, each call is a segment (R37)."""
        if self.is_off:
            return StoreAll()
        costs = chain.costs if self.segment == "auto" else None
        return resolve(self.segment, self.every, self.levels, self.keep_last, chain.length, costs)

    def segment_limit(self, chain: Chain) -> int | None:
        """The most calls one recompute may run (R24), or None where the rule sets no limit."""
        if type(self).at_forward is not Policy.at_forward:
            return None
        schedule = self.schedule_for(chain)
        while isinstance(schedule, StoreLast):
            schedule = schedule.inner
        if isinstance(schedule, (Segments, TwoLevel, Binomial)):
            return schedule.n
        return 1

    def _bound(self, chain: Chain) -> Schedule:
        """The schedule for a chain, resolved once for a policy and a pass."""
        bound = chain.bound
        if bound is None or bound[0] is not self:
            chain.bound = bound = (self, self.schedule_for(chain))
        return bound[1]

    # ---- context manager and decorator

    def __enter__(self: P) -> P:
        return cast("P", context.push(self).policy)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        left: list[context.Entry] = []
        try:
            context.leave(self, left)
        except BaseException:  # an interrupt: to leave once more does no harm
            context.leave(self, left)
            raise
        if kind is None and left:
            self._check_matched(left[0])

    def __call__(self, function: F) -> F:
        """Decorates a function, coroutine function, generator function or async generator function."""
        if isinstance(function, type) or not callable(function):
            raise PolicyError("function", function, "a policy decorates functions", "decorate a method, or use `with`")
        return context.decorate(function, self, self._check_matched)

    def _check_matched(self, entry: context.Entry) -> None:
        """Raises if layers were selected, decorated calls came by, and none was among the selected."""
        if (self.only is None and self.skip is None) or entry.n_matched or not entry.n_seen:
            return
        name = "only" if self.only is not None else "skip"
        seen = ", ".join(repr(layer) for layer in entry.names)
        left = "none of the {} decorated calls matched" if self.skip is None else "all {} decorated calls were left out"
        problem = f"{left.format(entry.n_seen)}; layers seen: {seen}"
        fix = f"give {name}= a class, a glob such as '*{entry.names[0] if entry.names else ''}', or a predicate"
        raise PolicyError(name, unpacked(getattr(self, name)), problem, fix)

    @functools.cached_property
    def selection(self) -> Chosen | Callable[[], Any] | None:
        """What `save=` means, or None."""
        return None if self.save is None else selects(self.save)

    # ---- as a value

    def _key(self) -> tuple[Any, ...]:
        values = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("only", "skip") and value is not None:
                value = tuple(item if isinstance(item, (str, type)) else id(item) for item in value)
            values.append(value)
        return (type(self), *values)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key())  # asked for at each decorated call

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_hash", "selection")
        }  # it holds in this process only

    def __repr__(self) -> str:
        name = "policy" if type(self) is Policy else type(self).__name__
        said = ["None"] if self.is_off else []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "is_off" and value != field.default:
                said.append(f"{field.name}={shown(value)}")
        return f"{name}({', '.join(said)})"


def policy(
    plan: None = _UNSET,
    /,
    *,
    segment: int | str | None = None,
    every: int | None = None,
    levels: int | str = 1,
    only: Selectors = None,
    skip: Selectors = None,
    keep_last: int = 0,
    save: Save = None,
    nested: bool = False,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    early_stop: bool = True,
    debug: bool = False,
    **unknown: Any,
) -> Policy:
    """Says how the layer calls in a `with` block, or in a decorated function, are checkpointed.

    `segment=n` keeps the input of every n-th layer call and recomputes n calls together; `every=n` recomputes every
    n-th call and stores the others; `policy(None)` stores all, also inside another policy; without arguments each
    call is recomputed alone.

    Args:
        plan: None for off; nothing else may be given by position.
        segment: a number, `"sqrt"` for ⌊√length⌋, or `"auto"` for the number with the lowest predicted peak. The
            last two need a pass to learn from; until then each call is recomputed alone.
        every: a number, instead of `segment`.
        levels: 1; 2 to rebuild a segment boundary by boundary and recompute each layer alone (without `segment`:
            `"sqrt"`); `"log"` for Revolve (without `segment`: over the whole chain).
        only: the layers to recompute: a class, a glob on the qualified name, a predicate that takes the layer, or
            a list of those. All others are stored.
        skip: the layers to store, likewise.
        keep_last: stores the last k calls of a chain, once its length is known.
        save: what stays inside recomputed calls and is not run again: `"matmuls"` (matrix products, convolutions,
            attention); a name given by `checkpoint_name`; a function of torch such as `torch.matmul`; the class of a
            decorated layer inside, or a glob on its name; a list of those. Or operators of ATen, or a callable that
            answers with `torch.utils.checkpoint.CheckpointPolicy`: these use torch's dispatch modes, at their cost.
        nested: whether decorated calls inside a decorated call are checkpointed too.
        preserve_rng_state: whether the recompute sees the random numbers that forward saw.
        determinism_check: `"default"` compares metadata of saved tensors, `"values"` values too, `"none"` neither.
        early_stop: whether a recompute stops as soon as the last tensor that is needed exists.
        debug: whether errors show the first operation that differs.
        **unknown: none; an option that does not exist is an error that names the nearest one.

    Returns:
        A `Policy`: a context manager and a decorator.

    Raises:
        PolicyError: an argument cannot be used, or is unknown. On leaving the block: `only=` or `skip=` was given
            and no decorated call matched.

    Cost:
        For L layers of x input and a saved bytes. `segment=n`: ⌈L/n⌉·x after forward and n·a more in backward, one
        more forward. `levels=2`: (⌈L/n⌉ + n)·x + a, at most two more forwards. `levels="log"`: O(log n)·x + a beyond
        ⌈L/n⌉·x, O(log n) more forwards. `every=n`: ⌈L/n⌉·x + (L − ⌈L/n⌉)·a, one more forward of ⌈L/n⌉ layers.

    Example:
        >>> policy(segment=3, keep_last=1)
        policy(segment=3, keep_last=1)
        >>> policy() == policy(segment=1)
        True
        >>> with policy(every=2) as active:
        ...     active.matches(layer=len, name="len")
        True

    References:
        Chen et al. 2016 for `segment`; Griewank & Walther 2000 for `levels="log"`.
    """
    if unknown:
        _reject_unknown(*next(iter(unknown.items())))
    return Policy(
        segment, every, levels, only=only, skip=skip, keep_last=keep_last, save=save, nested=nested,
        preserve_rng_state=preserve_rng_state, determinism_check=determinism_check, early_stop=early_stop, debug=debug,
        is_off=_is_off(plan),
    )  # fmt: skip


# ---- checks


def _check(self: Policy) -> None:
    """Raises PolicyError unless the fields fit each other."""
    if self.is_off:
        for name, default in (("segment", None), ("every", None), ("levels", 1)):
            if (value := getattr(self, name)) != default:
                raise PolicyError(name, value, "means nothing in a policy that is off", "leave out the None")
    _check_grouping(self)
    _require_count("keep_last", self.keep_last, 0, "keep_last=1 stores the last layer call of each chain")
    self.selection  # noqa: B018 - raises if it cannot be read
    for name in _FLAGS:
        if type(getattr(self, name)) is not bool:
            raise PolicyError(name, getattr(self, name), "must be True or False", f"{name}=True")
    if self.determinism_check not in _DETERMINISM_CHECKS:
        problem = f"must be one of {', '.join(map(repr, _DETERMINISM_CHECKS))}"
        fix = f"determinism_check={_nearest(self.determinism_check, _DETERMINISM_CHECKS) or 'default'!r}"
        raise PolicyError("determinism_check", self.determinism_check, problem, fix)


def _check_grouping(self: Policy) -> None:
    segment, every, levels = self.segment, self.every, self.levels
    if segment is not None and every is not None:
        raise PolicyError("segment", segment, f"cannot be combined with every={every!r}", "give one of the two")
    if segment is not None and segment not in ("sqrt", "auto") and not _is_count(segment, 1):
        problem = "must be a whole number of at least 1, 'sqrt' or 'auto'"
        raise PolicyError("segment", segment, problem, "segment=1 recomputes each layer call alone")
    if every is not None:
        _require_count("every", every, 1, "every=2 recomputes every other layer call")
    if levels != "log" and not (_is_count(levels, 1) and levels <= 2):  # type: ignore[operator]
        raise PolicyError("levels", levels, "must be 1, 2 or 'log'", "levels=2 rebuilds a segment boundary by boundary")
    if every is not None and levels != 1:
        raise PolicyError("levels", levels, "needs segments, but every= has none", "give segment= instead of every=")


def _is_off(plan: object) -> bool:
    """Whether the argument by position is None; anything else that was given is an error."""
    if plan is not None and plan is not _UNSET:
        if callable(plan):
            raise PolicyError("plan", plan, "a function was decorated with `policy` itself", "write @policy(segment=1)")
        raise PolicyError("plan", plan, "only None may be given by position", f"say what it is: segment={plan!r}")
    return plan is None


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _require_count(name: str, value: object, least: int, fix: str) -> None:
    if not _is_count(value, least):
        raise PolicyError(name, value, f"must be a whole number of at least {least}", fix)


def _reject_unknown(name: str, value: object) -> None:
    if name in _PLANNED:
        raise PolicyError(name, value, "is not available yet", "leave it out; segment= and every= are available")
    known = [field.name for field in dataclasses.fields(Policy) if field.name != "is_off"]
    near = _nearest(name, known)
    fix = f"did you mean {near}=?" if near else f"the options are {', '.join(known)}"
    raise PolicyError(name, value, "is not an option of policy()", fix)


def _nearest(name: object, known: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)), None)
