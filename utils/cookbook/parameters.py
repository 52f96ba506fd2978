"""The parameters that a recipe declares, and values for them checked before anything runs.

Papermill only warns about an unknown parameter and enforces no type: `-p seed three` puts the string "three" into
the notebook. Here every value is checked against the cell tagged `parameters`, and becomes a real Python value.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

TRUE, FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell, such as `seed: int = 0  # seed of the inputs`."""

    name: str
    type: str  # "int", "float", "str", "bool", "list" or "list[int]" …
    default: Any
    help: str


def nearest(name: str, names: Iterable[str]) -> str:
    """What to say after a wrong name: the nearest right one, and all of them."""
    names = sorted(names)
    close = get_close_matches(name, names, n=1, cutoff=0.0)
    return (f"nearest: {close[0]}; " if close else "") + f"there are: {', '.join(names) or 'none'}"


def code_cells(path: Path) -> list[tuple[str, list[str]]]:
    """(source, tags) of every code cell of the notebook at `path`. Raises ValueError where it is not a notebook."""
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        return [
            ("".join(cell["source"]), list(cell.get("metadata", {}).get("tags", [])))
            for cell in cells
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a notebook ({type(error).__name__}: {error})") from None


def declared(path: Path | str) -> dict[str, Parameter]:
    """The parameters of a notebook by name, read from its `parameters` cell without running it.

    Raises ValueError, one line, when there is no such cell or a line of it is not `name: type = literal  # help`.
    """
    path = Path(path)
    sources = [source for source, tags in code_cells(path) if "parameters" in tags]
    if len(sources) != 1:
        raise ValueError(f"{path.name}: {len(sources)} cells tagged 'parameters', expected one")
    try:
        statements = ast.parse(sources[0]).body
    except SyntaxError as error:
        raise ValueError(f"{path.name}: line {error.lineno} of the parameters cell: {error.msg}") from None
    lines = sources[0].splitlines()
    return {p.name: p for p in (_parameter(statement, lines, path.name) for statement in statements)}


def _parameter(statement: ast.stmt, lines: list[str], where: str) -> Parameter:
    text = lines[statement.lineno - 1]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        name, annotation = statement.target.id, ast.unparse(statement.annotation)
    elif (
        isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    ):
        name, annotation = statement.targets[0].id, ""
    else:
        raise ValueError(f"{where}: {text.strip()!r} in the parameters cell: expected name: type = literal  # help")
    try:
        default = ast.literal_eval(statement.value)
    except ValueError:
        raise ValueError(f"{where}: parameter {name!r}: the default is not a literal: {text.strip()!r}") from None
    # The comment starts after the value, so a "#" inside a string is not one.
    tail = lines[statement.value.end_lineno - 1].encode()[statement.value.end_col_offset :].decode()
    return Parameter(name, annotation or type(default).__name__, default, tail.strip().lstrip("#").strip())


def papermill_misses(path: Path | str) -> list[str]:
    """Names that papermill's own line-by-line inspection does not see (a second `=` on the line, an odd annotation).

    Papermill would still set them, but reports them as unknown. Empty: both readings agree.
    """
    from papermill.inspection import _infer_parameters
    from papermill.iorw import load_notebook_node

    seen = {p.name for p in _infer_parameters(load_notebook_node(str(path)), name="python3", language="python")}
    return sorted(set(declared(path)) - seen)


def validate(path: Path | str, given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """`given` (text from a command line, or values from YAML) as real values of the types that the notebook declares.

    `where` names the origin in errors (a preset file). Raises ValueError, one line: the wrong name or value, what
    was expected, the nearest right name.
    """
    path = Path(path)
    parameters, prefix = declared(path), f"{where}: " if where else ""
    values = {}
    for name, value in given.items():
        if name not in parameters:
            raise ValueError(f"{prefix}{path.stem} has no parameter {str(name)!r}; {nearest(str(name), parameters)}")
        try:
            values[name] = convert(value, parameters[name].type)
        except ValueError:
            shown, example = repr(value), repr(parameters[name].default)
            raise ValueError(f"{prefix}{path.stem}: {mismatch(parameters[name], value, shown, example)}") from None
    return values


def mismatch(parameter: Parameter, value: Any, shown: str, example: str) -> str:
    """What to say of a value that `convert` refused."""
    infinite = "" if _finite(value, text="float" in parameter.type) else ", and finite"
    return f"parameter {parameter.name!r} is {parameter.type}{infinite}, got {shown} (for example {example})"


def resolved(path: Path | str, values: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of the notebook: the defaults with `values` on top."""
    return {name: p.default for name, p in declared(path).items()} | dict(values)


def convert(value: Any, kind: str) -> Any:
    """`value` as `kind` ("int", "bool", "list[float]" …). Raises ValueError when it is not one, or not finite."""
    base, _, element = kind.replace(" ", "").partition("[")
    element = element.removesuffix("]")
    if base == "bool":
        return _bool(value)
    if base in ("int", "float") and not isinstance(value, bool) and isinstance(value, (str, int, float)):
        if base == "int" and isinstance(value, float):
            raise ValueError(f"{value!r} is not an int")
        if base == "float" and not _finite(value, text=True):
            raise ValueError(f"{value!r} is not finite")
        return int(value) if base == "int" else float(value)
    if base == "str" and isinstance(value, str):
        return value
    if base in ("list", "tuple", "dict"):
        return _container(value, base, element)
    if base not in ("int", "float", "str") and _finite(value):  # an annotation that we do not know: as it is
        return value
    raise ValueError(f"{value!r} is not {kind}")


def _finite(value: Any, text: bool = False) -> bool:
    """False for NaN and infinity (`text`: also as text), and for a list or dict with one: no row could hold them."""
    if isinstance(value, (dict, list, tuple)):
        return all(_finite(item, text) for item in (value.values() if isinstance(value, dict) else value))
    try:
        return not isinstance(value, (str, float) if text else float) or math.isfinite(float(value))
    except ValueError:  # text that is no number
        return True


def _bool(value: Any) -> bool:
    text = str(value).strip().lower()
    if isinstance(value, float) or text not in TRUE | FALSE:
        raise ValueError(f"{value!r} is not a bool")
    return text in TRUE


def _container(value: Any, base: str, element: str) -> Any:
    if isinstance(value, str):
        import yaml

        try:
            value = yaml.safe_load(value)  # JSON is YAML
        except yaml.YAMLError:
            raise ValueError(f"{value!r} is not a {base}") from None
    if not isinstance(value, dict if base == "dict" else (list, tuple)) or not _finite(value):
        raise ValueError(f"{value!r} is not a {base}")
    if base == "dict" or not element:
        return value
    return [convert(item, element.split(",")[0]) for item in value]
