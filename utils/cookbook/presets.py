"""Presets: a YAML file that gives recipes their parameters for a kind of machine.

    07_conv3d_to_linear:
      patches: 6272

`--preset cpu` and `--preset gpu` are data/presets/*.yaml; any other value is a file of the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .parameters import nearest, validate

PRESETS = Path(__file__).resolve().parents[2] / "data" / "presets"


def find_preset(name: str) -> Path:
    """The file of a preset named by `name` or by path. Raises ValueError naming the presets that there are."""
    shipped = {path.stem: path for path in PRESETS.glob("*.yaml")}
    if name in shipped:
        return shipped[name]
    if Path(name).is_file():
        return Path(name)
    raise ValueError(f"no preset {name!r}, and no such file; {nearest(name, shipped)}")


def load_preset(name: str, resolve: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    """Recipe stem → parameters with real types, everything in the file checked, also for recipes that will not run.

    `resolve` finds a recipe by name. Raises ValueError, one line, naming the file and the key.
    """
    import yaml

    path = find_preset(name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected recipe names with parameters under them, got {type(content).__name__}")
    preset: dict[str, dict[str, Any]] = {}
    for recipe, given in content.items():
        try:
            notebook = resolve(str(recipe))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{path}: {recipe}: expected parameters (name: value), got {given!r}")
        if notebook.stem in preset:
            raise ValueError(f"{path}: {recipe}: {notebook.stem} is there twice")
        preset[notebook.stem] = validate(notebook, given, where=str(path))
    return preset


def shipped_values(recipe: str) -> list[dict[str, Any]]:
    """The parameters that the shipped presets give a recipe, as the files have them; [] when they do not name it."""
    import yaml

    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(PRESETS.glob("*.yaml"))]
    return [file[recipe] for file in files if file and recipe in file]
