"""The spec of a sweep: read whole and checked before anything runs. Every error names the line of the file.

recipe: 07_conv3d_to_linear
preset: gpu               # optional: cpu, gpu or a file
parameters: {threads: 2}  # optional: the same for every point
grid:                     # every combination; the last parameter varies fastest
  patches: [64, 256]
  dtype: [float32, bfloat16]
points:                   # optional: points beside the grid
  - {patches: 50176, dtype: bfloat16}
retries: 1                # how often a failed point is tried again (0)
time_limit: 600           # seconds that one try may take (3600)
disk_gb: 2                # free space that caches and temporary files need
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .notebooks import shown_path
from .parameters import Parameter, convert, declared, mismatch, nearest
from .presets import find_preset, load_preset

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
SWEEPS = RESULTS.parent / "sweeps"
KEYS = ("recipe", "preset", "parameters", "grid", "points", "retries", "time_limit", "disk_gb", "show")
TIME_LIMIT = 3600.0  # seconds: a point that hangs on a rented machine costs an hour, not a night


@dataclass(frozen=True)
class Spec:
    """A checked spec. `points` are the values given for each point (preset, parameters, the point's own)."""

    path: Path
    recipe: Path  # the notebook
    points: list[dict[str, Any]]
    varying: list[str]  # the parameters that grid and points name
    retries: int
    time_limit: float  # seconds
    preset: str | None
    disk_gb: float | None
    show: dict[str, Any]  # fields that a row must have to stand for its point

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass
class _File:
    """The YAML file while it is read: builds values, and errors that name a line."""

    shown: str
    loader: yaml.SafeLoader
    recipe: str = ""  # known once the key `recipe` has been read
    parameters: dict[str, Parameter] = field(default_factory=dict)

    def at(self, node: yaml.Node) -> str:
        return f"{self.shown}, line {node.start_mark.line + 1}"

    def error(self, node: yaml.Node, text: str) -> ValueError:
        return ValueError(f"{self.at(node)}: {text}")

    def value(self, node: yaml.Node) -> Any:
        try:
            return self.loader.construct_object(node, deep=True)
        except yaml.YAMLError as error:  # a tag such as !!python/name, an unhashable key
            raise self.error(node, f"not a plain value: {getattr(error, 'problem', error)}") from None

    def pairs(self, node: yaml.Node, what: str, expected: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """name → (key node, value node) of a mapping that is not empty and names nothing twice."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{what}: expected {expected}, got {_short(self.value(node))}")
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else str(self.value(key))
            if name in found:
                raise self.error(key, f"{what}: {name!r} is there twice, first in line {_line(found[name][0])}")
            found[name] = key, value
        if not found:
            raise self.error(node, f"{what} is empty: expected {expected}")
        return found


def find_spec(name: str) -> Path:
    """The file of a spec: a path, or the name of one in data/sweeps. Raises ValueError with the nearest name."""
    shipped = {path.stem: path for path in SWEEPS.glob("*.yaml") if not path.name.endswith(".sky.yaml")}
    if name.endswith(".sky.yaml"):
        raise ValueError(f"{name}: a SkyPilot task, not a sweep; start it with: sky launch {name}")
    if Path(name).is_file():
        return Path(name)
    if name in shipped:
        return shipped[name]
    if Path(name).is_dir():
        inside = sorted(path.name for path in Path(name).glob("*.yaml"))
        raise ValueError(f"{name} is a folder, not a sweep; expected {_one_of(inside)}")
    raise ValueError(f"no sweep {name!r}, and no such file; {nearest(Path(name).stem, shipped)}")


def _one_of(files: list[str]) -> str:
    return f"a file in it, such as {', '.join(files[:3])}" if files else "a .yaml file, or a name of data/sweeps"


def load_spec(name: str, resolve: Callable[[str], Path], preset: str | None = None) -> Spec:
    """The spec named by path or name, checked whole. `preset` replaces the spec's own.

    `resolve` finds a recipe by name. Raises ValueError, one line: file, line, what is wrong, the nearest right name.
    """
    path = find_spec(name)
    file, root = _compose(path)
    top = file.pairs(root, "the sweep", "recipe, grid, points …")
    for key, (node, _) in top.items():
        if key not in KEYS:
            raise file.error(node, f"no key {key!r}; {nearest(key, KEYS)}")
    if "recipe" not in top:
        raise file.error(root, "no recipe: expected a line such as recipe: 07_conv3d_to_linear")
    node = top["recipe"][1]
    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise file.error(node, "recipe: expected its number, name or path")
    try:
        recipe = resolve(node.value)  # the text: YAML reads 010 as eight
        file.recipe, file.parameters = recipe.stem, declared(recipe)
    except ValueError as error:
        raise file.error(node, str(error)) from None
    if not ("grid" in top or "points" in top):
        raise file.error(root, "nothing to run: expected a grid, or a list of points")

    base, preset = _preset(file, top, path, recipe, preset, resolve)
    fixed = _values(file, top["parameters"][1], "parameters") if "parameters" in top else {}
    grid = _grid(file, top["grid"][1], fixed) if "grid" in top else {}
    own = [({n: v for n, (v, _) in c.items()}, _line_of(c)) for c in _combinations(grid)] if grid else []
    own += _points(file, top["points"][1]) if "points" in top else []
    points = [{n: v for n, v in (base | fixed | values).items() if n != "rows"} for values, _ in own]
    _refuse_twins(file, points, [line for _, line in own])

    return Spec(
        path=path,
        recipe=recipe,
        points=points,
        varying=list(dict.fromkeys(name for values, _ in own for name in values)),
        retries=int(_number(file, top, "retries", 0, whole=True)),
        time_limit=_number(file, top, "time_limit", TIME_LIMIT, above=0),
        preset=preset,
        disk_gb=_number(file, top, "disk_gb", None),
        show=_show(file, top["show"][1], recipe) if "show" in top else {},
    )


def _compose(path: Path) -> tuple[_File, yaml.Node]:
    shown = shown_path(path)
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{shown}{line}: not YAML: {error.problem or error}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{shown}: cannot be read: {' '.join(str(error).split())}") from None
    if root is None:
        raise ValueError(f"{shown}, line 1: the file is empty: expected recipe, grid, points …")
    return _File(shown, loader), root


def _preset(file: _File, top: dict, path: Path, recipe: Path, given: str | None, resolve) -> tuple[dict, str | None]:
    """(the preset's values for this recipe, its name): the command line's, else the spec's."""
    if given is not None:
        return load_preset(given, resolve).get(recipe.stem, {}), given
    if "preset" not in top or (name := file.value(top["preset"][1])) is None:
        return {}, None
    node = top["preset"][1]
    if not isinstance(name, str):
        raise file.error(node, f"preset: expected cpu, gpu or a file, got {_short(name)}")
    beside = path.parent / name  # a preset that lies beside the spec
    try:
        chosen = str(beside) if beside.is_file() else str(find_preset(name))
        return load_preset(chosen, resolve).get(recipe.stem, {}), name
    except ValueError as error:
        raise file.error(node, str(error)) from None


def _known(file: _File, key: yaml.Node, name: str) -> Parameter:
    """The declared parameter that a key of the spec names."""
    if name == "rows":
        raise file.error(key, "rows is not for a spec: the sweep itself collects the rows of every point")
    if name not in file.parameters:
        raise file.error(key, f"{file.recipe} has no parameter {name!r}; {nearest(name, file.parameters)}")
    return file.parameters[name]


def _checked(file: _File, node: yaml.Node, parameter: Parameter, hint: str = "") -> Any:
    """The value at a node, with the type that the recipe declares. `hint` ends the error."""
    value = file.value(node)
    try:
        return convert(value, parameter.type)
    except ValueError:
        wrong = mismatch(parameter, value, _short(value), _short(parameter.default))
        raise file.error(node, f"{file.recipe}: {wrong}{hint}") from None


def _values(file: _File, node: yaml.Node, what: str) -> dict[str, Any]:
    pairs = file.pairs(node, what, "parameters of the recipe (name: value)")
    return {name: _checked(file, value, _known(file, key, name)) for name, (key, value) in pairs.items()}


def _grid(file: _File, node: yaml.Node, fixed: dict) -> dict[str, list[tuple[Any, int]]]:
    """name → [(value, line)]."""
    grid: dict[str, list[tuple[Any, int]]] = {}
    for name, (key, values) in file.pairs(node, "grid", "parameters with lists of values").items():
        parameter = _known(file, key, name)
        if name in fixed:
            raise file.error(key, f"grid: {name!r} is in parameters as well; take one of them away")
        if not isinstance(values, yaml.SequenceNode):
            raise file.error(values, f"grid: {name}: expected a list of values, got {_short(file.value(values))}")
        if not values.value:
            raise file.error(values, f"grid: {name} has no values: the grid is empty")
        lists = parameter.type.startswith(("list", "tuple"))
        hint = "; a grid of lists is a list of lists, such as [[1], [2, 3]]" if lists else ""
        grid[name] = []
        for item in values.value:
            value = _checked(file, item, parameter, hint)
            if any(_identity(value) == _identity(other) for other, _ in grid[name]):
                raise file.error(item, f"grid: {name}: {_short(value)} is there twice")
            grid[name].append((value, _line(item)))
    return grid


def _combinations(grid: dict[str, list[tuple[Any, int]]]) -> list[dict[str, tuple[Any, int]]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _line_of(combination: dict[str, tuple[Any, int]]) -> int:
    return max(line for _, line in combination.values())


def _points(file: _File, node: yaml.Node) -> list[tuple[dict[str, Any], int]]:
    """[(values, line)] of the list of points."""
    if not isinstance(node, yaml.SequenceNode):
        raise file.error(node, f"points: expected a list of points, got {_short(file.value(node))}")
    if not node.value:
        raise file.error(node, "points is empty: expected a list such as - {seed: 1}")
    return [(_values(file, item, "points"), _line(item)) for item in node.value]


def _show(file: _File, node: yaml.Node, recipe: Path) -> dict[str, Any]:
    from .report_fields import fields_of

    pairs = file.pairs(node, "show", "fields of a row (such as case.kind: step)")
    known = fields_of(recipe, RESULTS)
    for name, (key, value) in pairs.items():
        if name not in known:
            raise file.error(key, f"show: no row of {file.recipe} has a field {name!r}; nearest: {known.nearest(name)}")
        if not isinstance(value, yaml.ScalarNode):
            raise file.error(value, f"show: {name}: expected one value, got {_short(file.value(value))}")
    return {name: file.value(value) for name, (_, value) in pairs.items()}


def _refuse_twins(file: _File, points: list[dict], lines: list[int]) -> None:
    """Two points that would run the same, defaults included."""
    defaults, seen = {name: p.default for name, p in file.parameters.items()}, {}
    for values, line in zip(points, lines, strict=True):
        identity = _identity(defaults | values)
        if identity in seen:
            raise ValueError(f"{file.shown}, line {line}: the same point as in line {seen[identity]}; take one away")
        seen[identity] = line


def _number(file: _File, top: dict, key: str, default: Any, *, whole: bool = False, above: float | None = None) -> Any:
    if key not in top:
        return default
    node = top[key][1]
    value = file.value(node)
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        least = f"above {above}" if above is not None else "0 or more"
        raise file.error(node, f"{key}: expected a {'whole ' if whole else ''}number, {least}, got {_short(value)}")
    return value


def _identity(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
