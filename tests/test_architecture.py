"""The layer table, read from the imports, and the rules about torch's private names, extras, module names and sizes.

Each check is a function from source text to a list of complaints, so that it can be shown to fail on made-up sources.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ckptdeco"
MODULES = sorted(PACKAGE.rglob("*.py"))

# part of the package -> the parts that it may import, besides itself and errors
_BELOW_DECORATOR = {"policy", "context", "matching", "save", "schedule", "engine"}
_BELOW_TOP = _BELOW_DECORATOR | {"decorator", "dropin", "placement", "__init__"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "extras": set(),
    "schedule": {"extras"},
    "engine": {"schedule.actions"},
    "context": {"schedule"},
    "matching": set(),
    "save": {"engine"},
    "policy": {"context", "matching", "save", "schedule"},
    "placement": _BELOW_DECORATOR,
    "decorator": _BELOW_DECORATOR | {"placement"},
    "dropin": {"context", "engine", "schedule"},
    "planning": _BELOW_TOP,
    "integrations": _BELOW_TOP | {"extras"},
    "demo": _BELOW_TOP | {"planning", "extras"},
    "cli": _BELOW_TOP | {"planning", "integrations", "demo", "extras"},
    "__main__": {"cli"},
    "__init__": _BELOW_DECORATOR | {"decorator", "dropin", "planning", "integrations"},
}
REQUIRED = {"torch", "wrapt"}  # what an install without extras has
SUBJECTS = {"lightning", "transformers"}  # packages with a module in integrations/
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "core", "manager", "misc"}
MAX_LINES = 400


def part_of(relative: str) -> str:
    """`engine/hooks.py` -> `engine`; `policy.py` -> `policy`."""
    first = relative.split("/")[0]
    return first.removesuffix(".py")


def dotted_name(relative: str) -> list[str]:
    """`engine/hooks.py` -> ["ckptdeco", "engine", "hooks"]."""
    names = ["ckptdeco", *relative.removesuffix(".py").split("/")]
    return names[:-1] if names[-1] == "__init__" else names


def absolute_base(node: ast.ImportFrom, relative: str) -> str:
    """The module that `from <base> import ...` names, with leading dots resolved."""
    if node.level == 0:
        return node.module or ""
    package = dotted_name(relative) if relative.endswith("__init__.py") else dotted_name(relative)[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def imported(tree: ast.AST, relative: str) -> Iterator[tuple[int, str, str]]:
    """Every import as (line, dotted name as deep as it may go, name it is bound to)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{absolute_base(node, relative)}.{alias.name}", alias.asname or alias.name


def layer_complaints(source: str, relative: str) -> list[str]:
    """Imports that go upwards or sideways in the layer table."""
    part = part_of(relative)
    if part not in LAYERS:
        return [f"{relative}: {part!r} has no place in the layer table"]
    complaints = []
    for line, name, _ in imported(ast.parse(source), relative):
        if name != "ckptdeco" and not name.startswith("ckptdeco."):
            continue
        inside = name.split(".")[1:] or ["__init__"]
        target = inside[0] if inside[0] in LAYERS else "__init__"
        allowed = LAYERS[part] | {part, "errors"}
        if target not in allowed and ".".join(inside[:2]) not in allowed:
            complaints.append(f"{relative}:{line}: {part} may not import {name}")
    return complaints


def outside_complaints(source: str, relative: str) -> list[str]:
    """Third-party imports: torch and wrapt except where they are banned, everything else only inside functions.

    A module of `integrations/` that is named after a package is about it, and may import it; no other module may import
    that module.
    """
    complaints = []
    subject = relative.removeprefix("integrations/").removesuffix(".py") if relative.startswith("integrations/") else ""
    for line, name, _ in imported(ast.parse(source), relative):
        top = name.split(".")[0]
        if top == "torch" and part_of(relative) == "schedule":
            complaints.append(f"{relative}:{line}: schedule/ is free of torch")
        if name.startswith("ckptdeco.integrations.") and name.split(".")[2] in SUBJECTS:
            complaints.append(f"{relative}:{line}: {name} imports a package that need not be installed")
        if top == "wrapt" and relative != "decorator.py":
            complaints.append(f"{relative}:{line}: only decorator.py uses wrapt")
    for node in module_level(ast.parse(source)):
        for line, name, _ in imported(node, relative):
            top = name.split(".")[0]
            if subject in SUBJECTS and top.removeprefix("pytorch_") == subject:
                continue
            if top not in REQUIRED | {"ckptdeco"} and top not in sys.stdlib_module_names:
                complaints.append(f"{relative}:{line}: {top} is an extra; import it inside the function that needs it")
    return complaints


def module_level(node: ast.AST) -> Iterator[ast.AST]:
    """The import statements that run when the module is imported: not those in functions or under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for other in child.orelse:
                yield from module_level(ast.Module([other], []))
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        else:
            yield from module_level(child)


def private_torch_complaints(source: str, relative: str) -> list[str]:
    """Names of torch that begin with an underscore, anywhere but in engine/torch_private.py."""
    if relative == "engine/torch_private.py":
        return []
    tree = ast.parse(source)
    bound = {}
    complaints = []
    for line, name, alias in imported(tree, relative):
        if name.split(".")[0] != "torch":
            continue
        bound[alias] = name if alias != "torch" else "torch"
        if is_private(name):
            complaints.append(f"{relative}:{line}: {name} is private to torch")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = attribute_path(node)
            if dotted and dotted[0] in bound:
                name = ".".join([bound[dotted[0]], *dotted[1:]])
                if is_private(node.attr):
                    complaints.append(f"{relative}:{node.lineno}: {name} is private to torch")
    return complaints


def is_private(dotted: str) -> bool:
    return any(name.startswith("_") and not name.endswith("__") for name in dotted.split("."))


def attribute_path(node: ast.expr) -> list[str]:
    """`a.b.c` -> ["a", "b", "c"]; anything that does not begin with a plain name -> []."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        path = attribute_path(node.value)
        return [*path, node.attr] if path else []
    return []


def shape_complaints(source: str, relative: str) -> list[str]:
    """Modules that are too long, or whose name says nothing."""
    complaints = [f"{relative}: a name that says nothing" for name in dotted_name(relative) if name in FORBIDDEN_NAMES]
    n_lines = len(source.splitlines())
    if n_lines > MAX_LINES:
        complaints.append(f"{relative}: {n_lines} lines, more than {MAX_LINES}")
    return complaints


CHECKS = [layer_complaints, outside_complaints, private_torch_complaints, shape_complaints]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_keeps_its_architecture(check):
    assert MODULES, "no modules found"
    complaints = []
    for path in MODULES:
        complaints += check(path.read_text(), path.relative_to(PACKAGE).as_posix())
    assert not complaints, "\n" + "\n".join(complaints)


BAD = [
    (layer_complaints, "engine/call.py", "from ckptdeco.policy import Policy"),
    (layer_complaints, "engine/call.py", "from ckptdeco import context"),
    (layer_complaints, "engine/call.py", "from .. import decorator"),
    (layer_complaints, "engine/call.py", "from ..schedule import simulator"),
    (layer_complaints, "engine/call.py", "def f():\n    import ckptdeco.context"),
    (layer_complaints, "engine/call.py", "import ckptdeco"),
    (layer_complaints, "context.py", "from .policy import Policy"),
    (layer_complaints, "policy.py", "from .engine import call"),
    (layer_complaints, "schedule/classic.py", "from ..context import active"),
    (layer_complaints, "errors.py", "from .schedule import Action"),
    (layer_complaints, "decorator.py", "from .planning import report"),
    (layer_complaints, "planning/report.py", "from ..demo import table"),
    (layer_complaints, "strategies.py", ""),
    (outside_complaints, "schedule/classic.py", "import torch"),
    (outside_complaints, "schedule/classic.py", "def f():\n    from torch import nn"),
    (outside_complaints, "schedule/classic.py", "import numpy as np"),
    (outside_complaints, "policy.py", "import wrapt"),
    (outside_complaints, "demo/table.py", "from rich.table import Table"),
    (outside_complaints, "demo/table.py", "try:\n    import rich\nexcept ImportError:\n    pass"),
    (outside_complaints, "demo/table.py", "class A:\n    import matplotlib.pyplot as plt"),
    (outside_complaints, "integrations/transformers.py", "import lightning"),
    (outside_complaints, "integrations/modules.py", "import transformers"),
    (outside_complaints, "integrations/modules.py", "from ckptdeco.integrations.transformers import x"),
    (private_torch_complaints, "engine/hooks.py", "import torch\ntorch._C._foo()"),
    (private_torch_complaints, "engine/hooks.py", "from torch._C import _autograd"),
    (private_torch_complaints, "engine/hooks.py", "import torch.utils._pytree as pytree"),
    (private_torch_complaints, "engine/hooks.py", "from torch.utils import _pytree as pytree"),
    (private_torch_complaints, "engine/hooks.py", "from torch.autograd import graph as g\ng._engine_run_backward"),
    (shape_complaints, "engine/utils.py", ""),
    (shape_complaints, "core/call.py", ""),
    (shape_complaints, "engine/call.py", "x = 1\n" * (MAX_LINES + 1)),
]


@pytest.mark.parametrize(("check", "relative", "source"), BAD)
def test_check_complains_about_bad_source(check, relative, source):
    assert check(source, relative)


GOOD = [
    (layer_complaints, "engine/call.py", "from ..schedule.actions import Action"),
    (layer_complaints, "engine/call.py", "from ckptdeco.schedule import actions"),
    (layer_complaints, "engine/__init__.py", "from .call import Call\nfrom ..errors import CheckpointError"),
    (layer_complaints, "planning/report.py", "from ckptdeco import policy"),
    (layer_complaints, "cli.py", "from .demo import table"),
    (outside_complaints, "engine/call.py", "import torch\nfrom collections import abc"),
    (outside_complaints, "demo/table.py", "def f():\n    import rich"),
    (outside_complaints, "demo/table.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rich"),
    (outside_complaints, "integrations/transformers.py", "from transformers import TrainerCallback"),
    (outside_complaints, "integrations/lightning.py", "from pytorch_lightning.callbacks import Callback"),
    (private_torch_complaints, "engine/torch_private.py", "import torch\ntorch._C"),
    (private_torch_complaints, "engine/hooks.py", "import torch\ntorch.Tensor.__torch_function__\nself._C"),
    (shape_complaints, "engine/call.py", "x = 1\n" * MAX_LINES),
]


@pytest.mark.parametrize(("check", "relative", "source"), GOOD)
def test_check_is_silent_about_good_source(check, relative, source):
    assert check(source, relative) == []
