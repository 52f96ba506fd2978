"""Curves of a report: a column over a swept parameter, one line for each value of a third, with intervals."""

from __future__ import annotations

import math
import statistics
import textwrap
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pandas as pd

from .report import compared, natural, pooled_text, with_ratios
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


def drawable(rows: pd.DataFrame, x: str, y: str) -> tuple[pd.DataFrame, dict[str, int]]:
    """(the rows that a curve of y over x can show, and how many measured rows it cannot, by the reason)."""
    measured = rows[rows["provenance"] == "measured"]
    found = with_ratios(compared(measured))
    placed = found.dropna(subset=[x])
    good = placed[placed["verdict"].isin(VALID)].copy()
    good[y] = pd.to_numeric(good[y], errors="coerce")
    good = good.dropna(subset=[y])
    reasons = {
        "without a comparison": len(measured) - len(found),
        f"without {x}": len(found) - len(placed),
        f"without a valid {y}": len(placed) - len(good),
    }
    return good, {reason: count for reason, count in reasons.items() if count}


def curves(good: pd.DataFrame, x: str, y: str = "speedup", hue: str = "label") -> tuple[list[Curve], list[str]]:
    """(the lines through drawable rows; over what their points are taken, as texts of `pooled_text`).

    A speed-up has its own interval. Several rows at one place: the geometric mean of the speed-ups, and the interval
    that covers all of theirs; for any other column the median, and the range from the smallest to the largest.
    """
    lines: dict[str, dict[Any, list[dict]]] = {}
    wanted = dict.fromkeys(name for name in (x, y, hue, "spot", "ci_low", "ci_high") if name in good)
    for row in good[list(wanted)].to_dict("records"):  # thousands of small groups: faster without pandas
        places = lines.setdefault(_text(row[hue]), {})
        places.setdefault(str(row[x]) if isinstance(row[x], (list, dict)) else row[x], []).append(row)
    made, over = [], []
    for name, places in lines.items():
        at = sorted(places, key=_sortable)
        middles, lows, highs = zip(*(_interval(places[place], y) for place in at), strict=True)
        made.append(Curve(name, at, list(middles), list(lows), list(highs)))
        over += [pooled_text(row["spot"] for row in places[place]) for place in at]
    return sorted(made, key=lambda line: natural(line.name)), list(dict.fromkeys(filter(None, over)))


def _interval(here: list[dict], y: str) -> tuple[float, float, float]:
    values = [float(row[y]) for row in here]
    if y != "speedup":
        return statistics.median(values), min(values), max(values)
    middle = math.exp(math.fsum(map(math.log, values)) / len(values))
    low, high = ([row[name] for row in here if row.get(name) == row.get(name)] for name in ("ci_low", "ci_high"))
    return middle, float(min([middle, *low])), float(max([middle, *high]))


def _text(value: Any) -> str:
    return "not given" if value is None or value != value else str(value)


def _sortable(value: Any) -> tuple:
    return (0, float(value), "") if _is_number(value) else (1, 0.0, str(value))


def _is_number(value: Any) -> bool:
    return not isinstance(value, (bool, str)) and hasattr(value, "__float__")


def plot(rows: pd.DataFrame, wanted: dict[str, str], file: Path) -> list[str]:
    """Draw the curves into a PNG file. Returns lines that say what is drawn, what is not, and over what is averaged.

    Raises ValueError, one line: an unknown column, no row that has both, rows of more than one recipe.
    """
    x, y, hue = (column(wanted[key], compared(rows), f"--plot {key}=") for key in KEYS)
    having = compared(rows).dropna(subset=[x])
    recipes = sorted(having["recipe"].unique())
    if len(recipes) != 1:
        raise ValueError(f"--plot: rows of {len(recipes)} recipes have {x}: {', '.join(recipes)}; choose with --recipe")
    good, reasons = drawable(rows, x, y)
    if hue == "label" and having["machine"].nunique() > 1:
        good = good.assign(label=good["label"].astype(str) + ", " + good["machine"])
    lines, over = curves(good, x, y, hue)
    if not lines:
        raise ValueError(f"--plot: no valid row has both {x} and {y}")
    if len(lines) > MOST_LINES:
        raise ValueError(f"--plot hue={hue}: {len(lines)} lines, at most {MOST_LINES} can be told apart")
    texts = "; over ".join(over)
    taken = f"points taken over {texts}" if texts else ""
    _draw(lines, "\n".join([f"{recipes[0]}: {y} over {x}", *textwrap.wrap(taken, 90)]), x, y, file)
    left_out = sum(reasons.values())
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    drawn = f"{file}: {len(lines)} line{'s' * (len(lines) != 1)}, {left_out} row{'s' * (left_out != 1)} not drawn"
    pooling = [f"{taken}. --plot hue=… splits them"] if taken else []
    return [f"{drawn} ({why})" if why else drawn, *pooling]


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
    fig.savefig(file, dpi=150)


def _wide(values: list) -> bool:
    values = [float(value) for value in values]
    return min(values) > 0 and max(values) / min(values) >= 10
