"""What a fork server may import ahead for notebooks: nothing that a notebook would not have imported itself."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from .parameters import code_cells

# Imported by a helper not when it is imported but when it draws, as every recipe has it do.
ALONG = {f"{__package__.partition('.')[0]}.figures": ["matplotlib", "matplotlib.pyplot"]}


def leading_imports(path: Path) -> list[str]:
    """Dotted names that the notebook imports before it does anything else, in order: "torch", "torch.nn", ...

    `from a import b` counts as "a" and "a.b". Parameters and calls of `warnings` may stand between; at any other
    statement the list ends, because it may change what an import does (an environment variable, for example). Names
    that the notebook's own folder has are left out: a kernel looks there first.
    """
    names: list[str] = []
    for source, _ in code_cells(path):
        try:
            statements = ast.parse(source).body
        except SyntaxError:  # a magic: it may do anything
            break
        found = [imported(statement) for statement in statements]
        for more in found:
            if more is None:
                return own_names_out(names, path.parent)
            names += more
    return own_names_out(names, path.parent)


def imported(statement: ast.stmt) -> list[str] | None:
    """The names that a statement imports; [] for one that changes nothing that imports see; None for any other."""
    if isinstance(statement, ast.Import):
        return [part for alias in statement.names for part in prefixes(alias.name)]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        inner = [f"{statement.module}.{alias.name}" for alias in statement.names if alias.name != "*"]
        return [] if statement.module == "__future__" else [*prefixes(statement.module), *inner]
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Expr) and isinstance(value, ast.Call):
        return [] if ast.unparse(value.func).startswith("warnings.") else None
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)) and value is not None:
        try:
            ast.literal_eval(value)
        except ValueError:
            return None
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", ast.Name())]
        return [] if all(isinstance(target, ast.Name) for target in targets) else None
    return None


def prefixes(name: str) -> list[str]:
    """ "a.b.c" as ["a", "a.b", "a.b.c"]."""
    parts = name.split(".")
    return [".".join(parts[: place + 1]) for place in range(len(parts))]


def own_names_out(names: list[str], folder: Path) -> list[str]:
    """`names` and what comes along with them, once each, without what `folder` has itself."""
    names = [part for name in names for part in (name, *ALONG.get(name, []))]
    tops = {name.partition(".")[0] for name in names}
    own = {top for top in tops if (folder / top).is_dir() or (folder / f"{top}.py").exists()}
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] not in own]


def shared_imports(paths: Iterable[Path]) -> list[str]:
    """The leading imports that all of these notebooks have. Those without torch do not count, unless none has it."""
    lists = [leading_imports(path) for path in dict.fromkeys(paths)]
    heavy = [names for names in lists if "torch" in names] or lists
    return [name for name in heavy[0] if all(name in names for names in heavy[1:])] if heavy else []
