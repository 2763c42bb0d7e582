"""The plugin that runs PyTorch's tests on ours: it swaps every alias, and can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as wrapper_module
import torch.utils.checkpoint

from tests.dropin import swapped_in

ROOT = Path(__file__).parents[2]


def test_every_alias_is_swapped_and_put_back() -> None:
    theirs = torch.utils.checkpoint.checkpoint
    marker = lambda: None  # noqa: E731
    undo = swapped_in.swap_in(marker)
    try:
        assert torch.utils.checkpoint.checkpoint is marker
        assert wrapper_module.torch_utils_checkpoint is marker
        assert torch.utils.checkpoint.checkpoint_sequential.__globals__["checkpoint"] is marker
        assert sys.modules["ckptdeco.dropin"]._torch_checkpoint is theirs  # type: ignore[attr-defined]
    finally:
        undo()
    assert torch.utils.checkpoint.checkpoint is wrapper_module.torch_utils_checkpoint is theirs


def test_what_is_left_out_has_a_reason_and_is_about_checkpoints() -> None:
    for name, why in swapped_in.DESELECTED.items():
        _, class_name, test = name.split("::")
        assert swapped_in.is_about_checkpoints(class_name, test)
        assert swapped_in.reason_against(f"some/where/{name}_suffix") == why
        assert len(why) > 40
    assert not swapped_in.is_about_checkpoints("TestAutograd", "test_version_counter")
    assert not swapped_in.reason_against("test_autograd.py::TestAutograd::test_version_counter")


UNCALLED = "class TestCheckpoint:\n    def test_nothing(self): pass\n"
CALLED = """
import torch
from torch.utils.checkpoint import checkpoint
class TestCheckpoint:
    def test_it_is_ours(self):
        assert checkpoint(torch.sin, torch.ones(1, requires_grad=True)).grad_fn is not None
        assert checkpoint.__module__.startswith("ckptdeco")
    def test_checkpoint_trigger(self):
        raise AssertionError("left out")
def test_other(): raise AssertionError("not about them")
"""


@pytest.mark.parametrize(
    ("name", "source", "is_right"),
    [("test_utils.py", CALLED, True), ("test_else.py", UNCALLED, False), ("test_utils.py", UNCALLED, False)],
    ids=["right", "never called", "left-out test is gone"],
)
def test_the_plugin_can_fail(tmp_path: Path, name: str, source: str, is_right: bool) -> None:
    (tmp_path / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.dropin.swapped_in", "-p", "no:cacheprovider", "-c"]
    done = subprocess.run(
        [*command, "/dev/null", "--rootdir", str(tmp_path), str(tmp_path / name)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode == 0) is is_right, done.stdout + done.stderr
