"""What the code of a recipe may not do: read a clock, import what is not there, hide from the comparison."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache

from .notebooks import ROOT

# Dotted names that read a clock or wait for one; a module stands for all that is in it.
CLOCKS = (
    "time",
    "timeit",
    "cProfile",
    "profile",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
    "pandas.Timestamp.now",
    "pandas.Timestamp.today",
    "asyncio.sleep",
    "torch.utils.benchmark",
    "triton.testing",
)
CLOCK_MAGIC = re.compile(r"^\s*%{1,2}(time|timeit|prun|mprun|lprun)\b", re.MULTILINE)
MAGIC = re.compile(r"^(\s*)([%!].*)$", re.MULTILINE)
OPTIONAL = {"triton", "torchao", "safetensors", "PIL", "IPython"}  # come with a dependency, or are guarded by try
MODULE_OF = {"PyYAML": "yaml"}  # distributions whose module has another name
CLOCK_NAMES = {"elapsed_time", "enable_timing"}  # of CUDA events
UNSEEN = {"clear_output", "update_display", "display_id"}  # nbval does not follow them


def code_problems(source: str, *, compared: bool = True) -> list[str]:
    """Problems of one code cell, each saying what to do."""
    problems = [f"`{match[0].strip()}` reads a clock; use utils.timing" for match in CLOCK_MAGIC.finditer(source)]
    if re.search(r"^\s*#+\s*(NBVAL|PYTEST_VALIDATE)_\w+", source, re.MULTILINE):
        problems.append("an NBVAL comment changes the comparison; only the tag nbval-ignore-output may")
    try:
        tree = parse(source)
    except SyntaxError as error:
        return [*problems, f"line {error.lineno} is not Python: {error.msg}"]
    problems += [f"`{name}` reads a clock; use utils.timing" for name in dict.fromkeys(clock_names(tree))]
    for module in dict.fromkeys(imported(tree)):
        if module.startswith("utils.cookbook"):
            problems.append(f"imports {module}; a notebook uses anything of utils except utils.cookbook")
        elif module.split(".")[0] not in allowed_modules():
            near = "the standard library and the dependencies of pyproject.toml"
            problems.append(f"imports {module}; allowed are utils, {near}")
    if compared:
        unseen = sorted(UNSEEN & names(tree))
        problems += [f"`{name}` is not followed by nbval; print the final value once" for name in unseen]
        if re.search(r";\s*(#.*)?$", source.rstrip()):
            problems.append("ends with `;`, which hides nothing under nbval; write `_ = …`")
    return problems


def parse(source: str) -> ast.Module:
    """The syntax tree of a cell; a line magic or a shell line counts as `pass`. Raises SyntaxError."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.parse(MAGIC.sub(r"\1pass", source))


@cache
def allowed_modules() -> frozenset[str]:
    """Top-level modules that a notebook may import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.match(r"[\w.-]+", line)[0] for line in project["dependencies"]}
    return frozenset({MODULE_OF.get(name, name) for name in names} | OPTIONAL | {"utils"} | sys.stdlib_module_names)


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names of the modules that the code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or '.'}.{alias.name}" for alias in node.names)


def clock_names(tree: ast.Module) -> Iterator[str]:
    """Names of CLOCKS that the code imports or uses, aliases resolved."""
    known: dict[str, str] = {}  # local name -> dotted name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield from matches(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from matches(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            head, _, rest = name.partition(".")
            if head in known and rest:
                yield from matches(f"{known[head]}.{rest}")
    yield from sorted(CLOCK_NAMES & names(tree))


def names(tree: ast.Module) -> set[str]:
    """Every name, attribute and keyword argument in the code."""
    nodes = list(ast.walk(tree))
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return found | {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}


def matches(name: str) -> Iterator[str]:
    """The name itself when it is, or lies in, one of CLOCKS."""
    if any(name == clock or name.startswith(f"{clock}.") for clock in CLOCKS):
        yield name


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of attributes on a name, else ""."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def parameter_problems(source: str) -> list[str]:
    """Lines of the parameters cell that are not `name: type = literal  # help`, and missing standard parameters."""
    problems, found = [], {}
    try:
        body = parse(source).body
    except SyntaxError:
        return []  # said by code_problems
    lines = source.splitlines()
    for node in body:
        line = lines[node.lineno - 1].strip()
        value = getattr(node, "value", None)
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or value is None:
            problems.append(f"`{line}`: write one `name: type = literal  # help` a line")
            continue
        kind = ast.unparse(node.annotation)
        try:
            default = ast.literal_eval(value)
        except ValueError:
            problems.append(f"`{line}`: the default of {node.target.id} must be a literal")
            continue
        found[node.target.id] = default
        base = {"int": int, "float": float, "str": str, "bool": bool, "list": list}.get(kind.partition("[")[0])
        if base is None:
            problems.append(f"`{line}`: type {kind}; expected int, float, str, bool or list")
        elif type(default) is not base:
            problems.append(f"`{line}`: the default is {type(default).__name__}, the type says {kind}")
        after = lines[value.end_lineno - 1].encode()[value.end_col_offset :].decode().strip()
        if node.lineno != value.end_lineno or not after.startswith("#") or not after.strip("# "):
            problems.append(f"`{line}`: one line with a `# help` comment")
    for name, default in {"device": "auto", "seed": 0, "rows": ""}.items():
        if name not in found:
            kind = type(default).__name__
            problems.append(f"`{name}: {kind} = {default!r}` is missing; every recipe declares device, seed and rows")
        elif found[name] != default:
            problems.append(f"{name} is {found[name]!r} by default; expected {default!r}")
    return problems


def control_problems(source: str) -> list[str]:
    """A control shows both: the check fails with the edit, and passes without it."""
    try:
        tree = parse(source)
    except SyntaxError:
        return []
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    failing = [node for node in asserts if says_no(node.test)]
    problems = []
    if not failing:
        problems.append("assert that the check fails with the edit: `assert not …`")
    if len(failing) == len(asserts):
        problems.append("assert that the check passes when the edit is undone: `assert …`")
    calls = {dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    if not calls & {"print", "table", "figures.table", "display"}:
        problems.append("print what failed and what passed")
    return problems


def says_no(test: ast.expr) -> bool:
    """True when an assertion expects a failure: `not`, `!=`, False, or a verdict that means one."""
    return any(
        isinstance(node, ast.Not | ast.NotEq)
        or (isinstance(node, ast.Constant) and (node.value is False or node.value in ("different", "invalid")))
        for node in ast.walk(test)
    )


def claim_ids(source: str) -> list[str]:
    """Texts of the code that look like a claim's id: one capital letter and a number."""
    try:
        tree = parse(source)
    except SyntaxError:
        return []
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return list(dict.fromkeys(text for text in texts if re.fullmatch(r"[A-Z]\d{1,2}", text)))
