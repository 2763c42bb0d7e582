"""A pytest plugin that runs PyTorch's own checkpoint tests on `ckptdeco.checkpoint`; see `nox -s torch_tests`.

It puts ours wherever torch's function is known by some name, and selects the tests that are about checkpoints. It
fails a run in which ours was never called, and one in which a test of the list below no longer exists.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
import torch.utils.checkpoint

import ckptdeco

FILES = (
    "test/test_utils.py",
    "test/test_autograd.py",
    "test/distributed/fsdp/test_checkpoint_wrapper.py",
)
"""Not `test/distributed/_composable/test_checkpoint.py`: that one goes to torch's private generator, not to the
function. Not `test/dynamo/`: in a compiled region ours hands over to torch's."""

CLASSES = ("TestCheckpoint", "TestNestedCheckpoint", "TestSelectiveActivationCheckpoint", "CheckpointWrapperTest")
NAMES = ("checkpoint", "test_access_saved_tensor_twice_without_recomputation_works")

DESELECTED = {
    "test_utils.py::TestCheckpoint::test_checkpoint_trigger": (
        "counts recomputes with an attribute of its module; ckptdeco leaves attributes as the plain run does, so it "
        "stays at one"
    ),
    "test_autograd.py::TestAutograd::test_checkpoint_warns_if_use_reentrant_not_passed_explcitly": (
        "use_reentrant has the default False here, which torch announces for its own function"
    ),
    "test_autograd.py::TestAutograd::test_checkpointing_without_reentrant_custom_function_works": (
        "expects an error where a custom Function reads its saved tensors twice in one backward; ckptdeco serves it, "
        "as plain autograd does"
    ),
    "test_autograd.py::TestSelectiveActivationCheckpoint::test_version_counter": (
        "with allow_cache_entry_mutation=True it accepts another gradient than the plain run's; ckptdeco raises "
        "ValueMismatch. Both halves are tested in tests/dropin/test_contexts.py"
    ),
}

n_calls = 0


@functools.wraps(ckptdeco.checkpoint)
def counted(*args: Any, **kwargs: Any) -> Any:
    """`ckptdeco.checkpoint`, and a count."""
    global n_calls
    n_calls += 1
    return ckptdeco.checkpoint(*args, **kwargs)


def swap_in(ours: Any = counted) -> Callable[[], None]:
    """Put ours in place of torch's function in every loaded module that is not ckptdeco's; returns what undoes it."""
    theirs = torch.utils.checkpoint.checkpoint
    places: list[tuple[Any, str]] = []
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] == "ckptdeco":
            continue
        names = [key for key, value in list(getattr(module, "__dict__", {}).items()) if value is theirs]
        for key in names:
            setattr(module, key, ours)
            places.append((module, key))

    def undo() -> None:
        for module, key in places:
            setattr(module, key, theirs)

    return undo


def is_about_checkpoints(class_name: str, name: str) -> bool:
    """Whether a test of torch's is one of those that are run."""
    return class_name in CLASSES or any(part in name for part in NAMES)


def reason_against(nodeid: str) -> str:
    """Why a test is left out, or ""; parametrised tests have a suffix."""
    return next((why for name, why in DESELECTED.items() if name.split("/")[-1] in nodeid.split("/")[-1]), "")


def pytest_configure(config: pytest.Config) -> None:
    swap_in()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    about = [i for i in items if is_about_checkpoints(getattr(getattr(i, "cls", None), "__name__", ""), i.name)]
    left_out = [item for item in about if reason_against(item.nodeid)]
    files = {item.nodeid.split("::")[0].split("/")[-1] for item in items}
    for name in DESELECTED:
        if name.split("::")[0] in files and not any(name in item.nodeid for item in left_out):
            raise pytest.UsageError(f"{name} is to be left out and does not exist; remove it from {__name__}")
    kept = [item for item in about if not reason_against(item.nodeid)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"ckptdeco.checkpoint was called {n_calls} times; left out:")
    for name, why in DESELECTED.items():
        terminalreporter.write_line(f"  {name}: {why}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == 0 and not n_calls:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
