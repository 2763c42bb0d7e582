"""policy() and Policy: what they accept and say, what they resolve to, and how they enter and leave."""

import asyncio
import copy
import gc
import inspect
import pickle
import threading
import weakref

import pytest
import torch

from ckptdeco import context
from ckptdeco.errors import CheckpointError, PolicyError
from ckptdeco.policy import Chain, Policy, Site, policy
from ckptdeco.schedule import (
    Action,
    Binomial,
    EveryNth,
    Layer,
    Segments,
    StoreAll,
    StoreLast,
    TwoLevel,
    best_segment,
)

SAVE, DROP_KEEP, DROP = Action.SAVE, Action.DROP_KEEP, Action.DROP
COSTS = (Layer(1.0, 2.0, input_bytes=10, saved_bytes=40),) * 64
SKEWED = tuple(Layer(1.0, 2.0, input_bytes=10, saved_bytes=20 + 7 * i) for i in range(12))


class Block:
    pass


class WideBlock(Block):
    pass


def is_wide(layer):
    return isinstance(layer, WideBlock)


def error_of(*args, **kwargs):
    with pytest.raises(PolicyError) as caught:
        policy(*args, **kwargs)
    return caught.value


def active_policy():
    entry = context.active()
    return None if entry is None else entry.policy


# ---- as a value


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (policy(), "policy(segment=1)"),
        (policy(None), "policy(None)"),
        (policy(segment=3, keep_last=1), "policy(segment=3, keep_last=1)"),
        (policy(every=2, early_stop=False), "policy(every=2, early_stop=False)"),
        (policy(segment="auto"), "policy(segment='auto')"),
        (policy(levels=2), "policy(segment='sqrt', levels=2)"),
        (policy(levels="log"), "policy(levels='log')"),
        (policy(segment=8, levels="log"), "policy(segment=8, levels='log')"),
        (policy(only="a.*", determinism_check="none"), "policy(segment=1, only='a.*', determinism_check='none')"),
        (policy(skip=[Block, "head"]), "policy(segment=1, skip=(Block, 'head'))"),
        (policy(only=is_wide, debug=True, nested=True), "policy(segment=1, only=is_wide, nested=True, debug=True)"),
        (policy(preserve_rng_state=False), "policy(segment=1, preserve_rng_state=False)"),
    ],
)  # fmt: skip
def test_repr_reads_as_the_call(made, shown):
    assert repr(made) == shown
    assert eval(shown, {"policy": policy, "Block": Block, "is_wide": is_wide}) == made


def test_equal_calls_make_equal_policies():
    assert policy() == policy(segment=1) == policy(levels=1)
    assert policy(levels=2) == policy(segment="sqrt", levels=2)
    assert policy(only=Block) == policy(only=[Block]) == policy(only=(Block,))
    assert hash(policy(segment=3, only=is_wide)) == hash(policy(segment=3, only=is_wide))
    different = [policy(), policy(None), policy(segment=2), policy(every=2), policy(every=1), policy(debug=True)]
    assert len(set(different)) == len(different)
    assert policy() != "policy(segment=1)"


def test_predicates_compare_by_identity():
    def predicates():
        return lambda layer: True

    assert policy(only=predicates()) != policy(only=predicates())
    one = predicates()
    assert policy(only=one) == policy(only=one)


def test_unhashable_predicate_still_makes_a_hashable_policy():
    class Unhashable:
        __hash__ = None

        def __call__(self, layer):
            return True

    one = Unhashable()
    assert hash(policy(only=one)) == hash(policy(only=one))


@pytest.mark.parametrize("made", [policy(segment=3, only=[Block, "a.*", is_wide]), policy(None), policy(levels="log")])
def test_policies_copy_and_pickle(made):
    hash(made)  # is remembered, but must not travel: strings and predicates hash otherwise in another process
    for other in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
        assert "_hash" not in vars(other)
        assert other == made
        assert hash(other) == hash(made)
        assert repr(other) == repr(made)


def test_policy_is_frozen():
    with pytest.raises(AttributeError):
        policy().segment = 2


# ---- errors


@pytest.mark.parametrize("value", [0, -1, True, "x", 2.5, [2], (1, 2)])
def test_segment_that_is_no_length_is_an_error(value):
    error = error_of(segment=value)
    assert isinstance(error, (CheckpointError, ValueError))
    assert (error.argument, error.value) == ("segment", value)
    assert error.problem == "must be a whole number of at least 1, 'sqrt' or 'auto'"
    assert error.fix == "segment=1 recomputes each layer call alone"


@pytest.mark.parametrize(
    ("options", "argument", "problem", "fix"),
    [
        ({"segment": 2, "every": 2}, "segment", "cannot be combined with every=2", "give one of the two"),
        ({"every": 0}, "every", "whole number of at least 1", "every=2"),
        ({"every": "2"}, "every", "whole number of at least 1", "every=2"),
        ({"every": True}, "every", "whole number of at least 1", "every=2"),
        ({"every": 2, "levels": 2}, "levels", "every= has none", "segment="),
        ({"levels": 3}, "levels", "must be 1, 2 or 'log'", "levels=2"),
        ({"levels": True}, "levels", "must be 1, 2 or 'log'", "levels=2"),
        ({"levels": "tree"}, "levels", "must be 1, 2 or 'log'", "levels=2"),
        ({"keep_last": -1}, "keep_last", "whole number of at least 0", "keep_last=1"),
        ({"keep_last": True}, "keep_last", "whole number of at least 0", "keep_last=1"),
        ({"keep_last": "1"}, "keep_last", "whole number of at least 0", "keep_last=1"),
        ({"determinism_check": "value"}, "determinism_check", "'default', 'values', 'none'", "'values'"),
        ({"determinism_check": None}, "determinism_check", "'default', 'values', 'none'", "determinism_check="),
        ({"nested": 1}, "nested", "must be True or False", "nested=True"),
        ({"preserve_rng_state": None}, "preserve_rng_state", "must be True or False", "preserve_rng_state=True"),
        ({"early_stop": "no"}, "early_stop", "must be True or False", "early_stop=True"),
        ({"debug": 0}, "debug", "must be True or False", "debug=True"),
        ({"only": 3}, "only", "a class, a name glob, a predicate", "only='*.layers.*'"),
        ({"skip": [Block, None]}, "skip", "a class, a name glob, a predicate", "skip='*.layers.*'"),
        ({"only": []}, "only", "selects nothing", "leave only= out"),
        ({"budget": "20GiB"}, "budget", "is not available yet", "leave it out"),
        ({"save": 3}, "save", "does not say what to save", "'matmuls', a name of checkpoint_name()"),
        ({"save": []}, "save", "selects nothing", "leave save= out"),
        ({"save": ("matmuls", torch.ops.aten.mm)}, "save", "mixes operators of ATen", "operators only"),
        ({"save": [len, lambda ctx, op: None]}, "save", "mixes operators of ATen, or a callable", "one callable only"),
        ({"offload": "cpu"}, "offload", "is not available yet", "leave it out"),
        ({"plan": "a.json"}, "plan", "is not available yet", "leave it out"),
        ({"segmnt": 3}, "segmnt", "is not an option", "did you mean segment=?"),
        ({"earlystop": 3}, "earlystop", "is not an option", "did you mean early_stop=?"),
        ({"xyz": 3}, "xyz", "is not an option", "the options are segment, every, levels,"),
    ],
)
def test_options_that_cannot_be_are_errors_with_fields_and_one_fix(options, argument, problem, fix):
    error = error_of(**options)
    assert error.argument == argument
    assert error.value == options[argument]
    assert problem in error.problem
    assert fix in error.fix
    assert str(error) == f"{argument}={options[argument]!r}: {error.problem}\n  Fix: {error.fix}"


def test_layer_instance_as_selector_is_an_error_not_a_predicate_to_call():
    class Layer:
        def __call__(self, layer):
            raise AssertionError("called")

        def forward(self):
            pass

    assert error_of(only=Layer()).fix == "only=lambda layer: layer is the_layer"


def test_only_none_may_be_given_by_position():
    assert error_of(3).fix == "say what it is: segment=3"
    assert error_of("sqrt").argument == "plan"
    assert "@policy(segment=1)" in error_of(is_wide).fix


@pytest.mark.parametrize("options", [{"segment": 1}, {"every": 2}, {"levels": 2}])
def test_off_with_a_grouping_is_an_error(options):
    assert error_of(None, **options).argument == next(iter(options))


def test_policy_does_not_decorate_classes():
    with pytest.raises(PolicyError, match="decorates functions"):
        policy()(Block)
    with pytest.raises(PolicyError, match="decorates functions"):
        policy()(3)


# ---- which layers


def test_without_selectors_all_layers_match():
    assert policy().matches(Block(), "a")


@pytest.mark.parametrize(
    ("selector", "matched"),
    [
        (Block, ["a.0", "a.1"]),
        (WideBlock, ["a.1"]),
        ("a.*", ["a.0", "a.1"]),
        ("A.*", []),
        ("*.1", ["a.1"]),
        (is_wide, ["a.1"]),
        ([WideBlock, "f"], ["a.1", "f"]),
        (("nothing", lambda layer: layer is len), ["f"]),
    ],
)
def test_selectors_are_classes_globs_and_predicates(selector, matched):
    layers = {"a.0": Block(), "a.1": WideBlock(), "f": len}
    assert [name for name, layer in layers.items() if policy(only=selector).matches(layer, name)] == matched
    others = [name for name in layers if name not in matched]
    assert [name for name, layer in layers.items() if policy(skip=selector).matches(layer, name)] == others


def test_skip_wins_over_only():
    made = policy(only=Block, skip="*.1")
    assert made.matches(Block(), "a.0")
    assert not made.matches(Block(), "a.1")


# ---- which schedule


@pytest.mark.parametrize(
    ("options", "length", "schedule"),
    [
        ({}, None, Segments(1)),
        ({"segment": 3}, None, Segments(3)),
        ({"segment": 3}, 9, Segments(3)),
        ({"every": 2}, None, EveryNth(2)),
        ({"segment": 4, "levels": 2}, 9, TwoLevel(4)),
        ({"segment": 4, "levels": "log"}, None, Binomial(4)),
        ({"segment": "sqrt"}, None, Segments(1)),
        ({"segment": "sqrt"}, 16, StoreLast(Segments(4), 0, 16)),
        ({"segment": "sqrt", "keep_last": 7}, 16, StoreLast(Segments(3), 7, 16)),
        ({"levels": 2}, 16, StoreLast(TwoLevel(4), 0, 16)),
        ({"levels": 2}, None, Segments(1)),
        ({"levels": "log"}, 16, StoreLast(Binomial(None, 16), 0, 16)),
        ({"levels": "log", "keep_last": 1}, 16, StoreLast(Binomial(None, 15), 1, 16)),
        ({"levels": "log"}, None, Segments(1)),
        ({"segment": "auto"}, 16, Segments(1)),
        ({"segment": "auto"}, None, Segments(1)),
        ({"segment": 3, "keep_last": 2}, 9, StoreLast(Segments(3), 2, 9)),
        ({"segment": 3, "keep_last": 2}, None, Segments(3)),
        ({"segment": 3, "keep_last": 20}, 9, StoreLast(Segments(3), 9, 9)),
        ({"segment": "sqrt", "keep_last": 20}, 9, StoreLast(Segments(1), 9, 9)),
        ({"every": 2, "keep_last": 2}, 9, StoreLast(EveryNth(2), 2, 9)),
    ],
)
def test_policy_resolves_to_a_schedule_and_to_the_careful_one_while_it_cannot(options, length, schedule):
    """R37."""
    assert policy(**options).schedule_for(Chain(length)) == schedule


def test_off_resolves_to_store_all():
    assert policy(None).schedule_for(Chain(4)) == StoreAll()
    assert policy(None).at_forward(Site(None, "a", 0, Chain())) is SAVE


@pytest.mark.parametrize(("levels", "make"), [(1, Segments), (2, TwoLevel), ("log", Binomial)])
def test_auto_takes_the_length_with_the_lowest_predicted_peak(levels, make):
    chain = Chain(costs=SKEWED)
    assert chain.length == 12
    n = best_segment(SKEWED, make)
    made = policy(segment="auto", levels=levels)
    assert made.schedule_for(chain) == StoreLast(make(n), 0, 12)
    assert made.segment_limit(chain) == n


@pytest.mark.parametrize(
    ("options", "length", "limit"),
    [
        ({"segment": 3, "keep_last": 1}, 9, 3),
        ({"segment": "sqrt"}, 16, 4),
        ({"segment": "sqrt"}, None, 1),
        ({"every": 4}, None, 1),
        ({"levels": "log"}, 16, None),
        ({"segment": 5, "levels": "log"}, None, 5),
    ],
)
def test_segment_limit_is_the_most_calls_one_recompute_may_run(options, length, limit):
    """R24."""
    assert policy(**options).segment_limit(Chain(length)) == limit


def test_at_forward_and_at_backward_ask_the_schedule_of_the_chain():
    made, chain = policy(segment="sqrt", levels=2), Chain(9)
    actions = [made.at_forward(Site(None, f"layers.{i}", i, chain)) for i in range(11)]
    assert actions == [DROP_KEEP, DROP, DROP] * 3 + [DROP_KEEP] * 2
    assert tuple(made.at_backward(3, 5, chain)) == (DROP_KEEP, DROP_KEEP, SAVE)
    assert tuple(made.at_backward(3, 5)) == (SAVE, SAVE, SAVE)


def test_one_chain_is_resolved_once_for_each_policy():
    class Counting(Policy):
        def schedule_for(self, chain):
            asked.append(self)
            return super().schedule_for(chain)

    asked, chain, one, other = [], Chain(9), Counting(segment=3), Counting(every=2)
    for position in range(9):
        one.at_forward(Site(None, "a", position, chain))
    assert other.at_forward(Site(None, "a", 1, chain)) is SAVE
    assert asked == [one, other]


def test_policy_may_be_subclassed_by_its_two_questions():
    class Wide(Policy):
        def at_forward(self, site):
            return DROP_KEEP if is_wide(site.layer) else SAVE

        def at_backward(self, first, target):
            return (DROP,) * (target - first) + (SAVE,)

    made, chain = Wide(keep_last=1), Chain(4)
    assert made.at_forward(Site(WideBlock(), "a", 0, chain)) is DROP_KEEP
    assert made.at_forward(Site(Block(), "a", 1, chain)) is SAVE
    assert tuple(made.at_backward(1, 2, chain)) == tuple(made.at_backward(1, 2)) == (DROP, SAVE)
    assert made.segment_limit(chain) is None
    assert repr(made) == ".".join(Wide.__name__.split()) + "(segment=1, keep_last=1)"
    assert made == Wide(keep_last=1) != policy(keep_last=1)


def test_site_and_chain_are_slotted_and_show_themselves():
    site = Site(None, "layers.3", 3, Chain(12))
    assert repr(site) == "Site('layers.3', position=3, Chain(length=12, costs=None))"
    assert repr(Chain(costs=COSTS)) == "Chain(length=64, costs=measured)"
    assert not hasattr(site, "__dict__")
    assert not hasattr(site.chain, "__dict__")


# ---- context manager


def see(*names, matched=(), error=None):
    """What the decorator does at decorated calls of these names."""
    for name in names:
        context.active().note(name, is_matched=name in matched)
    if error is not None:
        raise error


def test_policy_is_active_inside_its_block_only_and_may_be_entered_again():
    made = policy(segment=2)
    for _ in range(2):
        with made as entered:
            assert entered is made
            assert active_policy() is made
            with made, policy(None):
                assert active_policy() is None
            assert active_policy() is made
        assert active_policy() is None


def test_exception_leaves_the_policy():
    with pytest.raises(KeyError), policy():
        raise KeyError
    assert active_policy() is None


def test_interleaved_generators_never_bring_a_dead_policy_back():
    def steps(made):
        with made:
            yield
            yield

    a, b = policy(segment=2), policy(segment=3)
    first, second = steps(a), steps(b)
    next(first), next(second)
    first.close()
    assert active_policy() is b
    second.close()
    assert active_policy() is None


@pytest.mark.parametrize("name", ["only", "skip"])
def test_selector_that_matched_no_call_is_an_error_that_names_what_was_seen(name):
    with pytest.raises(PolicyError) as caught, policy(**{name: "layer.*"}):
        see(*(f"layers.{i}" for i in range(7)))
    assert active_policy() is None
    error = caught.value
    assert (error.argument, error.value) == (name, "layer.*")
    left = {"only": "none of the 7 decorated calls matched", "skip": "all 7 decorated calls were left out"}[name]
    assert error.problem == f"{left}; layers seen: 'layers.0', 'layers.1', 'layers.2', 'layers.3', 'layers.4'"
    assert error.fix == f"give {name}= a class, a glob such as '*layers.0', or a predicate"


def test_selector_is_not_complained_of_without_reason():
    with policy(only="a"):  # no decorated call seen
        pass
    with policy(only="a"):
        see("b", "a", matched="a")
    with policy():  # nothing was selected
        see("b")


def test_selector_does_not_hide_an_exception():
    with pytest.raises(KeyError), policy(only="a"):
        see("b", error=KeyError)


# ---- function decorator


def test_decorated_function_keeps_its_name_signature_and_kind():
    def step(x: int, *, y: int = 1) -> int:
        """Doc."""
        return x + y

    wrapped = policy()(step)
    assert wrapped.__name__ == "step"
    assert wrapped.__doc__ == "Doc."
    assert inspect.signature(wrapped) == inspect.signature(step)
    assert wrapped(1, y=2) == 3

    async def coroutine():
        pass

    def generator():
        yield

    async def async_generator():
        yield

    for function, kind in [
        (coroutine, inspect.iscoroutinefunction),
        (generator, inspect.isgeneratorfunction),
        (async_generator, inspect.isasyncgenfunction),
    ]:
        assert kind(policy()(function))


def test_decorated_function_may_call_itself_and_raise():
    made = policy(segment=2)

    @made
    def down(n):
        assert active_policy() is made
        if n == 0:
            raise KeyError
        down(n - 1)

    with pytest.raises(KeyError):
        down(3)
    assert active_policy() is None


def test_decorated_function_has_its_policy_on_any_thread():
    """R34."""
    made, seen, barrier = policy(segment=2), [], threading.Barrier(3)

    @made
    def step():
        barrier.wait(timeout=10)
        seen.append(active_policy())
        barrier.wait(timeout=10)

    threads = [threading.Thread(target=step) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [made] * 3
    assert active_policy() is None


def test_decorated_coroutine_has_its_policy_and_its_caller_has_not():
    made, other = policy(segment=2), policy(segment=3)

    async def body(expected):
        seen = []
        for _ in range(3):
            await asyncio.sleep(0)
            seen.append(active_policy())
        return seen == [expected] * 3

    async def main():
        results = await asyncio.gather(made(body)(made), other(body)(other), body(None))
        assert results == [True] * 3
        assert await made(body)(made)
        assert active_policy() is None

    asyncio.run(main())


def test_decorated_generator_has_its_policy_only_while_it_runs():
    """R34: a suspended generator does not leak its policy to the caller."""
    made, log = policy(segment=2), []

    @made
    def steps(n):
        try:
            for i in range(n):
                log.append(active_policy())
                try:
                    log.append((yield i))
                except KeyError:
                    log.append("thrown")
            return "end"
        finally:
            log.append(active_policy())

    def outer():
        return (yield from steps(3))

    running = outer()
    assert next(running) == 0
    assert active_policy() is None
    assert running.send("sent") == 1
    assert running.throw(KeyError()) == 2
    assert active_policy() is None
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == "end"
    assert log == [made, "sent", made, "thrown", made, None, made]
    closed = steps(3)
    next(closed)
    closed.close()
    assert log[-1] is made
    assert active_policy() is None


def test_exception_out_of_a_decorated_generator_leaves_no_cycle():
    class Big:
        pass

    @policy()
    def steps():
        big = Big()
        refs.append(weakref.ref(big))
        yield

    refs = []
    gc.collect()
    gc.disable()
    try:
        running = steps()
        next(running)
        with pytest.raises(KeyError):
            running.throw(KeyError())
        del running
    finally:
        gc.enable()
    assert refs[0]() is None


def test_decorated_async_generator_has_its_policy_only_while_it_runs():
    made, log = policy(segment=2), []

    @made
    async def steps(n):
        try:
            for i in range(n):
                log.append(active_policy())
                await asyncio.sleep(0)
                try:
                    log.append((yield i))
                except KeyError:
                    log.append("thrown")
        finally:
            await asyncio.sleep(0)
            log.append(active_policy())

    async def main():
        running = steps(2)
        assert await running.asend(None) == 0
        assert active_policy() is None
        assert await running.athrow(KeyError()) == 1
        assert active_policy() is None
        await running.aclose()
        assert active_policy() is None
        assert log == [made, "thrown", made, made]
        assert [i async for i in steps(2)] == [0, 1]

    asyncio.run(main())


def test_decorated_functions_of_all_kinds_complain_of_a_selector_that_matched_nothing():
    made = policy(only="a")

    @made
    def function():
        see("b")

    @made
    async def coroutine():
        see("b")

    @made
    def generator(*names):
        for name in names:
            see(name, matched="a")
            yield

    @made
    async def async_generator(*names):
        for name in names:
            see(name, matched="a")
            yield

    async def drain(*names):
        async for _ in async_generator(*names):
            pass

    runs = [function, lambda: asyncio.run(coroutine()), lambda: list(generator("b", "c"))]
    for run in [*runs, lambda: asyncio.run(drain("b"))]:
        with pytest.raises(PolicyError, match="decorated calls matched"):
            run()
    list(generator("b", "a"))
    asyncio.run(drain("b", "a"))
