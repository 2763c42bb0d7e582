"""Each private name of torch does what the engine needs it for; a release of torch that moves one fails here."""

from __future__ import annotations

import ctypes
import struct
import threading

import pytest
import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

from ckptdeco.engine import torch_private
from ckptdeco.engine.torch_private import (
    HOOK_ATTRIBUTES,
    NUMERICS,
    SETTINGS,
    TorchDispatchMode,
    are_weights_cached,
    at_end_of_backward,
    attention_backends,
    checkpoint_switches,
    disable_dynamo,
    dispatch_mode_again,
    dispatch_modes,
    exec_group,
    fresh_memory_filled,
    function_mode_again,
    function_modes,
    generator_address,
    global_module_hooks,
    grad_mode,
    graph_task_id,
    has_saved_tensor_hooks,
    is_inside_torch_checkpoint,
    is_plain_autograd,
    is_torch_function_on,
    pop_hooks,
    push_hooks,
    refuses_hooks,
    set_grad_mode,
    torch_function_on,
    unseen_by_modes,
)


def in_backward(action, n=1):
    """Run `action` inside a backward, and return what it returned."""
    found = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            found.append(action())
            return grad

    with torch.enable_grad():
        x = torch.randn(2, requires_grad=True)
        for _ in range(n):
            x = Probe.apply(x)
        loss = x.sum()
    loss.backward()
    return found


def test_every_public_name_of_the_module_is_tested_here():
    here = set(globals())
    assert set(torch_private.__all__) <= here


def test_graph_task_id_is_minus_one_outside_of_backward():
    assert graph_task_id() == -1


def test_graph_task_id_is_one_number_per_backward():
    one, other = in_backward(graph_task_id, 3), in_backward(graph_task_id, 3)
    assert len(set(one)) == len(set(other)) == 1
    assert one[0] != other[0]
    assert -1 not in one


def test_nested_backward_has_an_id_of_its_own():
    ids = in_backward(lambda: (graph_task_id(), in_backward(graph_task_id)[0], graph_task_id()))
    outer, inner, after = ids[0]
    assert outer == after != inner


def test_at_end_of_backward_calls_back_when_the_pass_ends():
    events = []

    def action():
        at_end_of_backward(lambda: events.append("end"))
        events.append("node")

    in_backward(action, 2)
    assert events == ["node", "node", "end", "end"]


def test_at_end_of_backward_is_refused_outside_of_one():
    with pytest.raises(RuntimeError):
        at_end_of_backward(lambda: None)


def test_plain_autograd_is_plain():
    assert is_plain_autograd()


@pytest.mark.filterwarnings("ignore")  # forward AD compiles some of its formulas
def test_torch_func_is_not_plain():
    seen = []

    def function(x):
        seen.append(is_plain_autograd())
        return x.sum()

    x = torch.randn(3)
    torch.func.grad(function)(x)
    torch.func.vmap(function)(x.view(3, 1))
    torch.func.jvp(function, (x,), (x,))
    assert seen == [False, False, False]


def test_forward_mode_level_is_not_plain():
    with forward_ad.dual_level():
        assert not is_plain_autograd()
    assert is_plain_autograd()


def test_disabled_hooks_are_not_plain():
    with disable_saved_tensors_hooks("no"):
        assert not is_plain_autograd()
    assert is_plain_autograd()


@pytest.mark.filterwarnings("ignore")
def test_tracing_is_not_plain():
    seen = []

    def function(x):
        seen.append(is_plain_autograd())
        return x + 1

    torch.jit.trace(function, torch.randn(2), check_trace=False)
    assert seen == [False]


def test_function_modes_are_listed_outermost_first():
    class Mode(TorchFunctionMode):
        pass

    outer, inner = Mode(), Mode()
    assert function_modes() == ()
    with outer, inner:
        assert [mode is expected for mode, expected in zip(function_modes(), (outer, inner), strict=True)] == [True] * 2
    assert function_modes() == ()


def test_function_modes_are_those_of_this_thread():
    class Mode(TorchFunctionMode):
        pass

    seen = []
    with Mode():
        thread = threading.Thread(target=lambda: seen.append(function_modes()))
        thread.start()
        thread.join()
    assert seen == [()]


def test_default_device_is_a_function_mode_that_can_be_entered_again():
    with torch.device("meta"):
        (mode,) = function_modes()
    again = function_mode_again(mode)
    assert again is not mode
    assert torch.empty(1).device.type == "cpu"
    with again:
        assert torch.empty(1).device.type == "meta"
    assert torch.empty(1).device.type == "cpu"


def test_other_function_modes_are_entered_again_as_they_are():
    mode = TorchFunctionMode()
    assert function_mode_again(mode) is mode


def test_saved_tensor_hooks_are_seen():
    assert not has_saved_tensor_hooks()
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        assert has_saved_tensor_hooks()
    assert not has_saved_tensor_hooks()


def test_hooks_are_pushed_and_popped_once():
    def pack(tensor):
        return tensor.detach()

    with saved_tensors_hooks(lambda t: t, lambda t: t):
        push_hooks(pack, lambda t: t)
        pop_hooks(lambda t: t)  # not the innermost ones
        assert torch._C._autograd._top_saved_tensors_default_hooks(False)[0] is pack
        pop_hooks(pack)
        pop_hooks(pack)
        assert has_saved_tensor_hooks()
    assert not has_saved_tensor_hooks()


def test_grad_mode_is_read_and_set():
    set_grad_mode(False)
    try:
        assert not grad_mode()
        assert not (torch.ones(1, requires_grad=True) * 2).requires_grad
    finally:
        set_grad_mode(True)
    assert grad_mode()


def test_torchs_own_checkpoint_is_seen_first_and_again():
    seen = []

    def function(x):
        seen.append(is_inside_torch_checkpoint())
        return x.exp()

    x = torch.randn(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert seen == [True, True]
    assert not is_inside_torch_checkpoint()
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not is_inside_torch_checkpoint()


def test_exec_group_is_the_group_that_is_entered():
    group = torch.utils.checkpoint.GraphExecGroup()
    assert exec_group() is None
    with group:
        assert exec_group() is group
        assert in_backward(exec_group) == [group]
    assert exec_group() is None


def test_checkpoint_switches_are_what_torchs_context_managers_say():
    from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

    assert checkpoint_switches() == (None, None)
    with set_checkpoint_early_stop(False), set_checkpoint_debug_enabled(True):
        assert checkpoint_switches() == (False, True)
        with set_checkpoint_early_stop(True), set_checkpoint_debug_enabled(None):
            assert checkpoint_switches() == (True, None)
        assert checkpoint_switches() == (False, True)
    assert checkpoint_switches() == (None, None)


def test_torch_function_can_be_switched_on_again():
    assert is_torch_function_on()
    with torch._C.DisableTorchFunctionSubclass():
        assert not is_torch_function_on()
        with torch_function_on():
            assert is_torch_function_on()
        assert not is_torch_function_on()


def test_unseen_by_modes_hides_operators_from_both_kinds_of_modes():
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append("dispatch")
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append("function")
            return func(*args, **(kwargs or {}))

    x = torch.randn(2)
    with Function(), Dispatch():
        with unseen_by_modes():
            x + 1
        assert seen == []
        x + 1
    assert set(seen) == {"dispatch", "function"}


def test_fresh_memory_filled_fills_and_restores_the_switches():
    with fresh_memory_filled():
        assert torch.empty(100).isnan().all()
        assert (torch.empty(100, dtype=torch.uint8) == 255).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_module_holds_its_forward_hooks_where_we_look():
    module = torch.nn.Linear(2, 2)
    assert all(not module.__dict__[name] for name in HOOK_ATTRIBUTES)
    module.register_forward_hook(lambda m, a, k, out: None, with_kwargs=True, always_call=True)
    module.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True)
    assert [len(module.__dict__[name]) for name in HOOK_ATTRIBUTES] == [1] * len(HOOK_ATTRIBUTES)


def test_hooks_of_all_modules_are_in_these_dictionaries():
    hooks, pre_hooks = global_module_hooks()
    handles = [
        torch.nn.modules.module.register_module_forward_hook(lambda m, a, out: None),
        torch.nn.modules.module.register_module_forward_pre_hook(lambda m, a: None),
    ]
    try:
        assert (len(hooks), len(pre_hooks)) == (1, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert (hooks, pre_hooks) == global_module_hooks()
    assert not hooks


def test_dispatch_modes_are_listed_and_entered_again_without_their_own_enter():
    class Mode(TorchDispatchMode):
        n_entered = 0
        n_seen = 0

        def __enter__(self):
            self.n_entered += 1
            return super().__enter__()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n_seen += 1
            return func(*args, **(kwargs or {}))

    mode = Mode()
    assert dispatch_modes() == ()
    with mode:
        assert dispatch_modes() == (mode,)
    with dispatch_mode_again(mode):
        assert dispatch_modes() == (mode,)
        torch.zeros(2)
    assert dispatch_modes() == ()
    assert (mode.n_entered, mode.n_seen) == (1, 1)


def test_refusal_of_hooks_is_told_from_other_errors():
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        with pytest.raises(RuntimeError) as refused:
            torch.func.grad(torch.sum)(torch.ones(2))
        with pytest.raises(RuntimeError) as refused_by_user, disable_saved_tensors_hooks("none here"):
            pass
        with pytest.raises(RuntimeError) as other:
            torch.ones(2) @ torch.ones(3)
    assert [refuses_hooks(caught.value) for caught in (refused, refused_by_user, other)] == [True, True, False]
    assert not refuses_hooks(RuntimeError())


def test_attention_backends_are_what_torch_says():
    cuda = torch.backends.cuda
    names = ("flash", "mem_efficient", "math")
    try:
        for name in names:
            before = attention_backends()
            getattr(cuda, f"enable_{name}_sdp")(not getattr(cuda, f"{name}_sdp_enabled")())
            now = attention_backends()
            assert now == tuple(getattr(cuda, f"{name}_sdp_enabled")() for name in names)
            assert [one != other for one, other in zip(before, now, strict=True)] == [n == name for n in names]
    finally:
        for name in names:
            getattr(cuda, f"enable_{name}_sdp")(True)


def test_weights_are_cached_within_the_context_only() -> None:
    assert not are_weights_cached()
    with torch.nn.utils.parametrize.cached():
        assert are_weights_cached()
    assert not are_weights_cached()


@pytest.mark.filterwarnings("ignore:TF32")
def test_numerics_read_and_set_what_the_public_switches_do() -> None:
    def read() -> list[object]:
        return [get() for get, _ in NUMERICS]

    before = read()
    torch.set_float32_matmul_precision("medium")
    torch.set_flush_denormal(True)
    try:
        with torch.backends.mkldnn.flags(enabled=False):
            seen = read()
            for (_, turn), value in zip(NUMERICS, before, strict=True):
                turn(value)
            assert torch.get_float32_matmul_precision() == "highest"
            assert float(torch.tensor(1e-40) * 1e38) > 0
            assert torch.backends.mkldnn.enabled
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_flush_denormal(False)
    assert read()[1:] == before[1:]
    assert [a != b for a, b in zip(seen, before, strict=True)] == [True, True, False, True]


@pytest.mark.filterwarnings("ignore")
def test_disabled_function_runs_uncompiled_within_a_compiled_one() -> None:
    seen: list[bool] = []

    @disable_dynamo
    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    out = torch.compile(lambda x: inner(x * 2) * 3, backend=backend)(torch.ones(2))
    assert out.tolist() == [9.0, 9.0]
    assert seen == [False]
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize(
    ("turn", "back"),
    [
        (lambda: torch.set_float32_matmul_precision("medium"), lambda: torch.set_float32_matmul_precision("highest")),
        (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        (lambda: torch.backends.cuda.enable_math_sdp(False), lambda: torch.backends.cuda.enable_math_sdp(True)),
        (lambda: torch.backends.mkldnn.set_flags(False), lambda: torch.backends.mkldnn.set_flags(True)),
        (
            lambda: torch.backends.mkldnn.conv.__setattr__("fp32_precision", "bf16"),
            lambda: torch.backends.mkldnn.conv.__setattr__("fp32_precision", "none"),
        ),
    ],
    ids=["precision", "denormals", "dtype", "determinism", "attention", "mkldnn", "convolutions"],
)
def test_settings_differ_while_one_of_them_is_another(turn, back) -> None:
    before = [read() for read in SETTINGS]
    turn()
    try:
        during = [read() for read in SETTINGS]
    finally:
        back()
    assert during != before
    assert [read() for read in SETTINGS] == before


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu"),
        lambda: torch.device("meta"),
        lambda: set_checkpoint_early_stop(False),
        lambda: set_checkpoint_debug_enabled(True),
        lambda: TorchDispatchMode(),
    ],
    ids=["autocast", "device", "early stop", "debug", "dispatch mode"],
)
def test_settings_differ_in_a_context(context) -> None:
    before = [read() for read in SETTINGS]
    with context():
        assert [read() for read in SETTINGS] != before
    assert [read() for read in SETTINGS] == before


def test_address_of_a_generator_leads_to_the_words_of_its_state():
    generator = torch.Generator().manual_seed(5)
    torch.randint(0, 9, (2,), generator=generator)
    words = generator.get_state()[24 : 24 + 8 * 16].view(torch.int64).tolist()
    assert struct.pack("16I", *words) in ctypes.string_at(generator_address(generator), 512)
