"""Every chore of the project: `nox -l` lists them, `nox` runs those that a change must pass."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"

nox.options.sessions = ["lint", "types", "tests", "docs"]
nox.options.reuse_existing_virtualenvs = True
nox.needs_version = ">=2024.4"


def install(session: nox.Session, *what: str) -> None:
    """Installs with the tested versions."""
    session.install("-c", str(CONSTRAINTS), *what)


def install_tests(session: nox.Session, constraints: Path = CONSTRAINTS) -> None:
    """Installs the project and all that its tests use; timm without torchvision, see README."""
    session.install("-c", str(constraints), "-e", ".[test]")
    session.install("-c", str(constraints), "--no-deps", "timm")


def lowest_versions() -> list[str]:
    """The project's two dependencies at the lower bounds that pyproject.toml states."""
    declared = re.search(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None, "pyproject.toml: dependencies must be one line"
    return [requirement.replace(">=", "==") for requirement in re.findall(r'"([^"]+)"', declared.group(1))]


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite."""
    install_tests(session)
    session.run("python", "-m", "pytest", *(session.posargs or ["-n", "auto"]), env={"OMP_NUM_THREADS": "1"})


@nox.session
def minimums(session: nox.Session) -> None:
    """The test suite on the lowest versions of torch and wrapt that are promised."""
    lowest = lowest_versions()
    names = {re.split(r"[=<>]", requirement)[0] for requirement in lowest}
    kept = [line for line in CONSTRAINTS.read_text().splitlines() if re.split(r"[=<>]", line)[0] not in names]
    constraints = Path(session.create_tmp()) / "minimums.txt"
    constraints.write_text("\n".join([*kept, *(f"{requirement}.*" for requirement in lowest)]) + "\n")
    install_tests(session, constraints)
    session.run("python", "-m", "pytest", *(session.posargs or ["-n", "auto"]), env={"OMP_NUM_THREADS": "1"})


@nox.session
def torch_tests(session: nox.Session) -> None:
    """PyTorch's own checkpoint tests with `ckptdeco.checkpoint` swapped in.

    They are those of the installed version, from the checkout that CKPTDECO_TORCH_CHECKOUT names, else from a shallow
    and sparse clone of the tag.
    """
    install(session, "-e", ".[test]", "expecttest")
    checkout = Path(os.environ.get("CKPTDECO_TORCH_CHECKOUT") or clone_torch(session)).resolve()
    listed = session.run(
        "python",
        "-c",
        "from tests.dropin.swapped_in import FILES; print(*FILES)",
        silent=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    found = [str(checkout / file) for file in str(listed).split() if (checkout / file).exists()]
    if not found:
        session.error(f"{checkout} has none of {listed}")
    path = os.pathsep.join([str(ROOT), str(checkout / "test")])
    # fmt: off
    session.run(
        "python", "-m", "pytest", "-c", os.devnull, "--rootdir", str(checkout), "-p", "tests.dropin.swapped_in",
        "-p", "no:cacheprovider", "-q", *session.posargs, *found,
        env={"OMP_NUM_THREADS": "1", "PYTORCH_TEST_WITH_SLOW": "1", "PYTHONPATH": path},
    )
    # fmt: on


def clone_torch(session: nox.Session) -> str:
    """PyTorch's tests of the installed version; nothing else of it."""
    printed = session.run("python", "-c", "import torch; print(torch.__version__.split('+')[0])", silent=True)
    tag = f"v{str(printed).strip()}"
    target = Path(session.create_tmp()) / f"pytorch-{tag}"
    if not target.exists():
        options = ("--depth=1", "--filter=blob:none", "--sparse", f"--branch={tag}")
        session.run("git", "clone", *options, "https://github.com/pytorch/pytorch", str(target), external=True)
    folders = ("test/autograd", "test/distributed/fsdp")
    session.run("git", "-C", str(target), "sparse-checkout", "set", *folders, external=True)
    return str(target)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and layout."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types for the package."""
    install(session, "mypy", "-e", ".[demo]")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """The generated pages are fresh, and every code block and docstring example runs."""
    install(session, "-e", ".[test]")
    session.run("python", "docs/build_reference.py", "--check")
    session.run("python", "-m", "pytest", "tests/docs", *session.posargs)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Speed and memory, side by side with torch in one process; takes minutes, wants a quiet machine."""
    install(session, "-e", ".[test]")
    for module in session.posargs or ("benchmarks.overhead", "benchmarks.memory"):
        session.run("python", "-m", module)


@nox.session
def fuzz(session: nox.Session) -> None:
    """10,000 composed programs times random policies; for nights. Prints what became of them."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "tests.fuzz.run", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def faults(session: nox.Session) -> None:
    """An exception at every point of a training step, and long runs of many threads; for nights."""
    install(session, "-e", ".[test]")
    environment = {"CKPTDECO_FAULTS": "all", "OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "pytest", "tests/faults", *(session.posargs or ["-n", "auto"]), env=environment)


if __name__ == "__main__":
    sys.exit("run `nox -l`")
