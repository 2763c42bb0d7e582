"""The command line's own part: what it accepts, what it says, and its exit codes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ckptdeco import cli
from ckptdeco.demo import command

ROOT = Path(__file__).parent.parent.parent


def test_without_a_command_help_is_shown(capsys):
    assert cli.main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("ckptdeco ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["demo", "--steps", "0"], "0 is not positive"),
        (["demo", "--steps", "many"], "'many' is not a whole number"),
        (["demo", "--fast"], "--fast"),
    ],
)
def test_wrong_usage_is_explained_and_exits_with_two(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_picture_in_a_missing_folder_is_refused_before_the_work(tmp_path, capsys):
    assert cli.main(["demo", "--png", str(tmp_path / "none" / "a.png")]) == 2
    assert "Fix: create it first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "named"), [({"rich"}, "needs rich."), ({"rich", "matplotlib"}, "needs rich and matplotlib.")]
)
def test_a_missing_extra_is_named(missing, named, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    assert cli.main(["demo", "--quick"]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "pip install 'ckptdeco[demo]'" in error


def test_the_exit_code_is_the_demos(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "demo", lambda png, *, n_steps, is_quick: 1 if (n_steps, is_quick) == (3, True) else 0)
    assert cli.main(["demo", "--quick", "--steps", "3", "--png", str(tmp_path / "a.png")]) == 1


def test_importing_the_command_line_imports_no_extra():
    program = "import sys, ckptdeco.cli; print([m for m in ('rich', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
