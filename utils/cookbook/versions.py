"""Versions and ranges, standard library only: this runs before any package is installed.

It reads the part of PEP 440 and PEP 508 that pyproject.toml and requirements.txt use: a name, and comparisons joined by
commas. No markers, no URLs.
"""

import importlib.metadata
import operator
import re
import tomllib
from pathlib import Path

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "==": operator.eq, "!=": operator.ne}
_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:[-_.]?(a|b|c|rc|alpha|beta|pre|dev))?", re.IGNORECASE)
_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)((?:[<>=!]=?[\d.]+,?)*)")


def _key(version: str) -> tuple[tuple[int, ...], bool]:
    """(release without trailing zeros, final?), so that 2.8.0a0+local < 2.8 == 2.8.0+cpu."""
    match = _VERSION.match(version.strip())
    if match is None:
        raise ValueError(f"version {version!r}: expected one like 2.13.0")
    release = [int(part) for part in match[1].split(".")]
    while release and release[-1] == 0:
        release.pop()
    return tuple(release), match[2] is None


def parse(requirement: str) -> tuple[str, str]:
    """(name, range) of a requirement: `torch>=2.7,<3` gives ("torch", ">=2.7,<3")."""
    match = _REQUIREMENT.fullmatch(requirement.replace(" ", ""))
    if match is None:
        raise ValueError(f"requirement {requirement!r}: expected a name and comparisons, like torch>=2.7,<3")
    return match[1], match[2]


def satisfies(version: str, spec: str) -> bool:
    """Does `version` lie in `spec` (comparisons joined by commas)? A local part such as +cpu does not count."""
    have = _key(version)
    for sign, bound in re.findall(r"([<>=!]=?)([\d.]+)", spec):
        if sign == "<":  # 6.0rc1 is not below 6
            if have[0] >= _key(bound)[0]:
                return False
        elif not _COMPARE[sign](have, _key(bound)):
            return False
    return True


def ranges(root: Path, extras: tuple[str, ...] = ()) -> dict[str, str]:
    """What pyproject.toml asks for, with the named extras: name -> range."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [line for name in extras for line in project["optional-dependencies"][name]]
    return dict(parse(line) for line in wanted)


def pins(root: Path) -> dict[str, str]:
    """The exact versions of requirements.txt: name -> version."""
    lines = (
        line.split("#")[0].strip() for line in (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    )
    return {name: spec.removeprefix("==") for name, spec in map(parse, filter(None, lines))}


def installed(name: str) -> str | None:
    """The version of an installed distribution, read from its metadata without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def lacking(wanted: dict[str, str]) -> dict[str, str]:
    """The part of `wanted` that this Python does not have, or has in a version out of its range."""
    have = {name: installed(name) for name in wanted}
    return {name: spec for name, spec in wanted.items() if have[name] is None or not satisfies(have[name], spec)}


def off_pins(wanted: dict[str, str], pinned: dict[str, str], most: int = 4) -> str:
    """Which of `wanted` differ here from the tested versions, in one line; empty when none does."""
    have = {name: installed(name) for name in wanted if name in pinned}
    other = [f"{name} {v} (tested: {pinned[name]})" for name, v in have.items() if v and _key(v) != _key(pinned[name])]
    return ", ".join(other[:most]) + (f" and {len(other) - most} more" if len(other) > most else "")
