"""Curves of a report: a column over a swept parameter, one line for each value of a third, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pandas as pd

from .report import compared, natural
from .report_rows import column
from .table import VALID

KEYS = ("x", "y", "hue")
STYLES = ("-", "--", ":")  # eight colours in each
MOST_LINES = 8 * len(STYLES)


@dataclass(frozen=True)
class Curve:
    """One line: where, the middle, and the interval around it; `low` and `high` equal `y` where there is none."""

    name: str
    x: list[Any]
    y: list[float]
    low: list[float]
    high: list[float]


def parse_plot(text: str) -> dict[str, str]:
    """{"x": ..., "y": ..., "hue": ...} of "x=patches,y=speedup,hue=dtype". Raises ValueError, one line."""
    found = {"y": "speedup", "hue": "label"}
    for part in text.split(","):
        key, sign, name = (piece.strip() for piece in part.partition("="))
        if key not in KEYS or not sign or not name:
            near = get_close_matches(key, KEYS, n=1, cutoff=0.0)
            raise ValueError(f"--plot {part!r}: expected x=…, y=… or hue=…; nearest: {near[0] if near else 'x'}=…")
        found[key] = name
    if "x" not in found:
        raise ValueError(f"--plot {text!r}: x=… is missing, such as x=case.patches,y=speedup,hue=label")
    return found


def curves(rows: pd.DataFrame, x: str, y: str = "speedup", hue: str = "label") -> tuple[list[Curve], int]:
    """(the lines, how many rows are not drawn because their answer is invalid, they failed, or they lack a value).

    A speed-up has its own interval. Several rows at one place: the geometric mean of the speed-ups, and the interval
    that covers all of theirs; for any other column the median, and the range from the smallest to the largest.
    """
    rows = compared(rows)
    good = rows[rows["verdict"].isin(VALID)].copy()
    good[y] = pd.to_numeric(good[y], errors="coerce")
    good = good.dropna(subset=[x, y])
    for name in {x, hue}:
        good[name] = good[name].map(lambda value: str(value) if isinstance(value, (list, dict)) else value)
    lines = []
    for name, group in good.groupby(good[hue].map(_text), sort=False):
        places = sorted(group.groupby(x, sort=False), key=lambda place: _sortable(place[0]))
        middles, lows, highs = zip(*(_interval(here, y) for _, here in places), strict=True)
        lines.append(Curve(str(name), [place for place, _ in places], list(middles), list(lows), list(highs)))
    return sorted(lines, key=lambda line: natural(line.name)), len(rows) - len(good)


def _interval(here: pd.DataFrame, y: str) -> tuple[float, float, float]:
    values = here[y]
    if y != "speedup":
        return float(values.median()), float(values.min()), float(values.max())
    middle = math.exp(math.fsum(map(math.log, values)) / len(values))
    low = min([middle, *here["ci_low"].dropna()] if "ci_low" in here else [middle])
    high = max([middle, *here["ci_high"].dropna()] if "ci_high" in here else [middle])
    return middle, float(low), float(high)


def _text(value: Any) -> str:
    return "not given" if value is None or value != value else str(value)


def _sortable(value: Any) -> tuple:
    return (0, float(value), "") if _is_number(value) else (1, 0.0, str(value))


def _is_number(value: Any) -> bool:
    return not isinstance(value, (bool, str)) and hasattr(value, "__float__")


def plot(rows: pd.DataFrame, wanted: dict[str, str], file: Path) -> str:
    """Draw the curves into a PNG file. Returns a line that says what is drawn and what is not.

    Raises ValueError, one line: an unknown column, no row that has both, rows of more than one recipe.
    """
    x, y, hue = (column(wanted[key], compared(rows), f"--plot {key}=") for key in KEYS)
    having = compared(rows).dropna(subset=[x])
    recipes = sorted(having["recipe"].unique())
    if len(recipes) != 1:
        raise ValueError(f"--plot: rows of {len(recipes)} recipes have {x}: {', '.join(recipes)}; choose with --recipe")
    if hue == "label" and having["machine"].nunique() > 1:
        having = having.assign(label=having["label"].astype(str) + ", " + having["machine"])
    lines, left_out = curves(having, x, y, hue)
    if not lines:
        raise ValueError(f"--plot: no valid row has both {x} and {y}")
    if len(lines) > MOST_LINES:
        raise ValueError(f"--plot hue={hue}: {len(lines)} lines, at most {MOST_LINES} can be told apart")
    _draw(lines, f"{recipes[0]}: {y} over {x}", x, y, file)
    drawn = f"{len(lines)} line{'s' * (len(lines) != 1)}"
    return f"{file}: {drawn}, {left_out} row{'s' * (left_out != 1)} not drawn (no valid value)"


def _draw(lines: list[Curve], title: str, x: str, y: str, file: Path) -> None:
    from ..figures import axes

    values = [value for line in lines for value in line.x]
    numbers = all(map(_is_number, values))
    names = sorted({_text(value) for value in values})
    scale = (numbers and _wide(values), _wide([value for line in lines for value in line.y]))
    fig, ax = axes(title, x, y, log=scale, size=(8, 4.2))
    for place, line in enumerate(lines):
        at = [float(value) if numbers else names.index(_text(value)) for value in line.x]
        errors = [
            [max(0.0, m - low) for m, low in zip(line.y, line.low, strict=True)],
            [max(0.0, high - m) for m, high in zip(line.y, line.high, strict=True)],
        ]
        ax.errorbar(
            at, line.y, errors, marker="o", capsize=3, elinewidth=1.2, label=line.name, linestyle=STYLES[place // 8]
        )
    if not numbers:
        ax.set_xticks(range(len(names)), names)
    if y == "speedup":
        ax.axhline(1, color="black", linewidth=0.8)
    fig.legend(loc="outside lower center", ncols=2, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(file, dpi=150)


def _wide(values: list) -> bool:
    values = [float(value) for value in values]
    return min(values) > 0 and max(values) / min(values) >= 10
