"""The structure check of a recipe."""

from pathlib import Path


def check(path: str | Path) -> list[str]:
    return []
