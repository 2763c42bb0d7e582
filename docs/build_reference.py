"""Writes what the docs say about the code from the code itself; `--check` only says which pages are stale.

* `reference/api.md`: every public name, with its signature and docstring, read with `ast`: torch is not needed.
* `explanation/semantics.md`: under each rule, the modules that cite it and the tests that cite it. The rest of that
  page is written by hand.

Run `python docs/build_reference.py` after a change of a docstring or of a rule's citation.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ckptdeco"
API_PAGE = ROOT / "docs" / "reference" / "api.md"
SEMANTICS_PAGE = ROOT / "docs" / "explanation" / "semantics.md"

RULE = re.compile(r"\bR(\d{1,2})\b")
RULE_HEADING = re.compile(r"^### R(\d+)\b.*$", re.MULTILINE)
NOT_CITED = "nothing yet"
MAX_TESTS_NAMED = 5

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


# --------------------------------------------------------------------------------------------------- public names


def public_names() -> list[str]:
    """`ckptdeco.__all__`, as written."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return list(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    raise LookupError("ckptdeco/__init__.py has no __all__")


def find_definition(name: str, module: Path) -> tuple[Path, list[Definition]]:
    """The statements that define `name` (several with overloads), following re-exports inside the package."""
    tree = ast.parse(module.read_text())
    found = [node for node in walk_statements(tree) if defines(node, name)]
    if found:
        return module, found
    for node in walk_statements(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and (source := module_file(node, module)) is not None:
                    return find_definition(alias.name, source)
    raise LookupError(f"{name} is not defined in {module.relative_to(ROOT)}, nor imported from the package")


def walk_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Module-level statements, those under `if` and `try` included."""
    for node in tree.body:
        yield node
        for block in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                for child in getattr(node, block, []):
                    yield from child.body if isinstance(child, ast.ExceptHandler) else [child]


def defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name


def module_file(node: ast.ImportFrom, importer: Path) -> Path | None:
    """The file of the module that an import inside the package names; None for other packages."""
    if node.level:
        folder = importer.parent
        for _ in range(node.level - 1):
            folder = folder.parent
        parts = node.module.split(".") if node.module else []
    else:
        top, *parts = (node.module or "").split(".")
        if top != "ckptdeco":
            return None
        folder = PACKAGE
    target = folder.joinpath(*parts)
    return target.with_suffix(".py") if target.with_suffix(".py").exists() and parts else target / "__init__.py"


# ------------------------------------------------------------------------------------------------------- api.md


def api_page() -> str:
    """The text of reference/api.md."""
    errors, others = [], []
    for name in public_names():
        if name.startswith("__"):
            continue
        module, nodes = find_definition(name, PACKAGE / "__init__.py")
        (errors if module.name == "errors.py" else others).append((name, module, nodes))
    lines = [
        "<!-- Made by docs/build_reference.py from the docstrings. Change those, then run it. -->",
        "# API",
        "",
        "Everything here is importable from `ckptdeco`. Errors have [a page of their own](errors.md).",
        "",
    ]
    lines += [f"* [`{name}`](#{anchor})" for name, anchor in anchors([name for name, _, _ in others])]
    lines += [f"* [`{name}`](errors.md#{name.lower()})" for name, _, _ in errors]
    for name, module, nodes in others:
        lines += ["", f"## {name}", "", *describe(name, nodes, module)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def anchors(names: list[str]) -> Iterator[tuple[str, str]]:
    """Each name with the anchor of its heading: `Policy` and `policy` would be the same, so the later gets a number."""
    n_seen: dict[str, int] = {}
    for name in names:
        lower = name.lower()
        yield name, f"{lower}-{n_seen[lower]}" if lower in n_seen else lower
        n_seen[lower] = n_seen.get(lower, 0) + 1


def describe(name: str, nodes: list[Definition], module: Path) -> Iterator[str]:
    """One public name: signature, docstring, and for a class its fields and public methods."""
    yield "```text"
    shown = [node for node in nodes if is_overload(node)] or nodes[-1:]
    for node in shown:
        yield signature(node)
    yield "```"
    yield ""
    node = nodes[-1]
    yield f"Defined in `{module.relative_to(ROOT).as_posix()}`."
    yield ""
    yield from markdown(documentation(node, module))
    if isinstance(node, ast.ClassDef):
        yield from describe_members(name, node)


def describe_members(owner: str, node: ast.ClassDef) -> Iterator[str]:
    methods: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_"):
            methods.setdefault(child.name, []).append(child)
    for name, nodes in methods.items():
        text = ast.get_docstring(nodes[-1])
        if not text:
            continue
        yield ""
        yield f"### {owner}.{name}"
        yield ""
        yield "```text"
        for child in [child for child in nodes if is_overload(child)] or nodes[-1:]:
            yield signature(child)
        yield "```"
        yield ""
        yield from markdown(text)


def is_overload(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(decorator) in {"overload", "typing.overload"} for decorator in decorators)


def signature(node: Definition) -> str:
    """The definition's head as one would write it, one parameter a line when it is long."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        fields = [
            f"    {ast.unparse(without_field_call(child))}"
            for child in node.body
            if isinstance(child, (ast.AnnAssign, ast.Assign)) and not is_private_field(child)
        ]
        return "\n".join([f"class {node.name}({bases})" if bases else f"class {node.name}", *fields])
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return ast.unparse(node)
    parameters = split_arguments(ast.unparse(node.args))
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    head = f"{kind}{node.name}({', '.join(parameters)}){result}"
    if len(head) > 100:
        head = "\n".join([f"{kind}{node.name}(", *(f"    {parameter}," for parameter in parameters), f"){result}"])
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    return "\n".join(
        [*(f"@{name}" for name in ("property", "classmethod", "staticmethod") if name in decorators), head]
    )


def without_field_call(node: ast.Assign | ast.AnnAssign) -> ast.Assign | ast.AnnAssign:
    """`x: int = dataclasses.field(default=0, ...)` as `x: int = 0`."""
    value = node.value
    if isinstance(node, ast.AnnAssign) and isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        default = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
        return ast.AnnAssign(node.target, node.annotation, default, node.simple)
    return node


def is_private_field(node: ast.Assign | ast.AnnAssign) -> bool:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return not isinstance(target, ast.Name) or target.id.startswith("_")


def split_arguments(arguments: str) -> list[str]:
    """Splits at the commas that are not inside brackets, and sets the default of an annotated parameter off."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        elif character == "=" and depth == 0 and ":" in parts[-1]:
            parts[-1] += " = "
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def documentation(node: Definition, module: Path) -> str:
    """The docstring; for an assignment, the string that follows it."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        body = list(walk_statements(ast.parse(module.read_text())))
        for before, after in itertools.pairwise(body):
            is_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if before.lineno == node.lineno and is_string:
                return inspect.cleandoc(str(after.value.value))  # type: ignore[attr-defined]
        return ""
    return ast.get_docstring(node) or ""


SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Cost", "Example", "Examples", "References", "Note")


def markdown(docstring: str) -> Iterator[str]:
    """A Google docstring as Markdown: bold headings for sections, list items for entries, code blocks for doctests."""
    section, block = "", []
    for line in [*docstring.splitlines(), "End:"]:
        heading = line[:-1] if line.endswith(":") and line[:-1] in (*SECTIONS, "End") else None
        if heading is None:
            block.append(line)
            continue
        yield from markdown_section(section, block)
        section, block = heading, []


def markdown_section(section: str, block: list[str]) -> Iterator[str]:
    lines = inspect.cleandoc("\n" + "\n".join(block)).splitlines()
    if not lines:
        return
    if section:
        yield f"**{section}**"
        yield ""
    if section in {"Args", "Attributes", "Raises"}:
        for line in lines:
            entry = re.match(r"(\*{0,2}[\w.]+(?: \([^)]*\))?): ?(.*)", line)
            if entry and not line.startswith(" "):
                yield f"* `{entry[1]}`: {entry[2]}".rstrip()
            else:
                yield f"  {line.strip()}" if line.strip() else ""
    else:
        yield from fenced(lines)
    yield ""


def fenced(lines: list[str]) -> Iterator[str]:
    """Puts doctests into code blocks and leaves the rest as it is."""
    inside = False
    for line in lines:
        if not inside and line.lstrip().startswith(">>>"):
            yield "```pycon"
            inside = True
        elif inside and not line.strip():
            yield "```"
            inside = False
        yield line
    if inside:
        yield "```"


# ------------------------------------------------------------------------------------------------ semantics.md


def citations_in(source: str) -> set[int]:
    """The numbers of the rules that comments and strings of a source cite."""
    cited = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if (
            token.type == tokenize.COMMENT
            or token.type == tokenize.STRING
            or "FSTRING" in tokenize.tok_name[token.type]
        ):
            cited |= {int(number) for number in RULE.findall(token.string)}
    return cited


def citing_modules() -> dict[int, list[str]]:
    """Rule -> modules of the package that cite it."""
    cited: dict[int, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for rule in citations_in(path.read_text()):
            cited.setdefault(rule, []).append(f"`{path.relative_to(PACKAGE).as_posix()}`")
    return cited


def citing_tests() -> dict[int, list[str]]:
    """Rule -> tests whose body, docstring or comments cite it; files of tests that cite it elsewhere."""
    cited: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "docs" in path.relative_to(ROOT / "tests").parts:
            continue  # the tests of this page cite made-up rules
        source = path.read_text()
        place = path.relative_to(ROOT).as_posix()
        named: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                text = ast.get_source_segment(source, node) or ""
                for rule in sorted({int(number) for number in RULE.findall(text)}):
                    cited.setdefault(rule, []).append(f"`{place}::{node.name}`")
                    named.add(rule)
        for rule in sorted(citations_in(source) - named):
            cited.setdefault(rule, []).append(f"`{place}`")
    return cited


def semantics_page(text: str) -> str:
    """The page with the two lines under each rule made anew."""
    modules, tests = citing_modules(), citing_tests()
    text = re.sub(r"\n\n\* Cited by: [^\n]*\n\* Tested by: [^\n]*", "", text)
    headings = list(RULE_HEADING.finditer(text))
    parts = [text[: headings[0].start()]] if headings else [text]
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        rule = int(heading[1])
        body = text[heading.start() : following.start() if following else len(text)]
        paragraph, rest = split_section(body)
        named = tests.get(rule, [])
        more = f", and {len(named) - MAX_TESTS_NAMED} more" if len(named) > MAX_TESTS_NAMED else ""
        parts.append(
            f"{paragraph}\n\n* Cited by: {', '.join(modules.get(rule, [NOT_CITED]))}.\n"
            f"* Tested by: {', '.join(named[:MAX_TESTS_NAMED] or [NOT_CITED])}{more}.\n\n{rest}"
        )
    return "".join(parts).rstrip() + "\n"


def split_section(body: str) -> tuple[str, str]:
    """A rule's own text, and the heading of the next group of rules if one follows."""
    following = re.search(r"^## ", body, re.MULTILINE)
    cut = following.start() if following else len(body)
    return body[:cut].rstrip(), body[cut:]


# ------------------------------------------------------------------------------------------------------- command


def stale_pages() -> dict[Path, str]:
    """Pages that differ from what they should be, with their right text."""
    wanted = {API_PAGE: api_page()}
    if SEMANTICS_PAGE.exists():
        wanted[SEMANTICS_PAGE] = semantics_page(SEMANTICS_PAGE.read_text())
    return {page: text for page, text in wanted.items() if not page.exists() or page.read_text() != text}


def main() -> int:
    """Writes stale pages, or with --check names them and returns 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    arguments = parser.parse_args()
    stale = stale_pages()
    for page, text in stale.items():
        print(f"{page.relative_to(ROOT)} is stale" if arguments.check else f"wrote {page.relative_to(ROOT)}")
        if not arguments.check:
            page.write_text(text)
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
