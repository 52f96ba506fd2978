"""Plots and tables that look alike in every notebook and print the same on every machine.

    fig, ax = axes("the wall of L squared", "sequence length", "bytes", log=(2, 10))
    ax.plot(lengths, sizes, label="naive")
    ax.legend()
    finish(fig)

Figures are small PNGs. Their text form, which a notebook test compares, is `figure: ` and the title.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

DPI = 90
_PALETTE = 96  # colours kept in a PNG: a third of the bytes and no visible difference

# Okabe and Ito's colours, distinct for colour-blind readers. They are the colours of the lines in this order, in which
# neighbours also differ in brightness.
COLOURS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "vermilion": "#D55E00",
    "sky": "#56B4E9",
    "black": "#000000",
    "grey": "#8C8C8C",
}


def style() -> None:
    """Set matplotlib's defaults to the look of this book. `axes` calls it."""
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update(
        {
            "figure.dpi": DPI,
            "savefig.dpi": DPI,
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "axes.prop_cycle": cycler(color=list(COLOURS.values())),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#E0E0E0",
            "grid.linewidth": 0.6,
            "lines.linewidth": 1.8,
            "lines.markersize": 5,
            "legend.frameon": False,
            "image.cmap": "cividis",
            "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine has it
        }
    )


def axes(
    title: str,
    xlabel: str,
    ylabel: str,
    *,
    log: tuple[bool | int, bool | int] = (False, False),
    size: tuple[float, float] = (7, 3.6),
    panels: int = 1,
):
    """A new figure: (fig, ax), or (fig, array of axes side by side) when panels > 1.

    `size` is in inches at 90 dots. `log` is per axis: False, True (base 10) or the base. With base 2,
    the ticks are plain numbers (1,024 and not 2 to the 10th): sizes are known by them.
    """
    from matplotlib.figure import Figure

    if panels < 1:
        raise ValueError(f"panels={panels}; expected at least 1")
    style()
    fig = Figure(figsize=size, layout="constrained")  # no pyplot: nothing is shown twice or left open
    found = fig.subplots(1, panels, squeeze=False)[0]
    for ax in found:
        ax.set_xlabel(xlabel)
        for base, scale, axis in zip(log, (ax.set_xscale, ax.set_yscale), (ax.xaxis, ax.yaxis), strict=True):
            if base:
                scale("log", base=10 if base is True else base)
            if base == 2:
                axis.set_major_formatter("{x:,g}")
    found[0].set_ylabel(ylabel)
    found[0].set_title(title)
    return fig, (found[0] if panels == 1 else found)


def finish(fig) -> None:
    """Show the figure in the notebook; outside a notebook do nothing. Prints nothing and returns nothing."""
    titles = [text for ax in fig.axes if (text := ax.get_title("left") or ax.get_title())]
    data = {"text/plain": f"figure: {', '.join(titles) or 'untitled'}", "image/png": _png(fig)}
    if "IPython" in sys.modules:
        from IPython import display, get_ipython

        if get_ipython() is not None:
            display.display(data, raw=True)
    if "matplotlib.pyplot" in sys.modules:  # a figure made with pyplot would be shown a second time
        sys.modules["matplotlib.pyplot"].close(fig)


def table(rows: Iterable, columns: Sequence[str] | Mapping[str, str] | None = None) -> None:
    """Print rows as aligned plain text.

    `rows` are mappings, or sequences in the order of `columns`. `columns` chooses and orders the columns; a mapping
    also gives their headings. Floats print with 4 significant digits, integers with thousands separators, None as "-".
    Raises ValueError for a column that no row has.
    """
    listed = list(rows)
    if listed and not isinstance(listed[0], Mapping):
        if columns is None:
            raise ValueError("columns=None; expected the names of the columns, because the rows are not mappings")
        listed = [dict(zip(columns, row, strict=True)) for row in listed]
    known = list(dict.fromkeys(key for row in listed for key in row))
    headings = dict(columns) if isinstance(columns, Mapping) else {key: key for key in columns or known}
    for key in headings:
        if listed and key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.0)
            raise ValueError(f"column {key!r} is in no row; nearest: {near[0] if near else 'none'!r}")
    if not headings:
        print("no rows")
        return
    cells = [[str(heading) for heading in headings.values()]]
    cells += [[_cell(row.get(key)) for key in headings] for row in listed]
    widths = [max(len(line[i]) for line in cells) for i in range(len(headings))]
    right = [bool(listed) and all(_is_number(row.get(key)) for row in listed) for key in headings]
    lines = ["  ".join(_pad(line[i], widths[i], right[i]) for i in range(len(headings))).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    print("\n".join(lines if listed else [*lines, "no rows"]))


def bytes_text(n: float) -> str:
    """1536 -> "1.50 KiB": binary units, three digits, whole numbers without a point."""
    if abs(n) < 1024:
        return f"{n:.0f} B" if n == int(n) else f"{n:.1f} B"
    value, units = float(n), ["KiB", "MiB", "GiB", "TiB", "PiB"]
    for unit in units:
        value /= 1024
        if abs(value) < 1023.5 or unit == units[-1]:
            break
    return f"{_three_digits(value)} {unit}"


def seconds_text(s: float) -> str:
    """0.0021 -> "2.10 ms": ns, µs, ms, s, min or h, three digits."""
    for unit, size in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3)):
        if abs(s) < 999.5 * size:
            return f"{_three_digits(s / size)} {unit}"
    for unit, size, limit in (("s", 1.0, 119.5), ("min", 60.0, 119.5 * 60)):
        if abs(s) < limit:
            return f"{_three_digits(s / size)} {unit}"
    return f"{_three_digits(s / 3600)} h"


def _three_digits(value: float) -> str:
    if value == int(value):
        return f"{value:.0f}"
    for digits, limit in ((2, 9.995), (1, 99.95)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def _cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _is_number(value) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _pad(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def _png(fig) -> str:
    """The figure as base64 PNG: few colours and no metadata, so that the same drawing is the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
    out = io.BytesIO()
    image.convert("RGB").quantize(_PALETTE, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()
