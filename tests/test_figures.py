import base64
import io
import itertools
import subprocess
import sys
from unittest.mock import MagicMock

import pytest
from PIL import Image

from utils import figures
from utils.figures import axes, bytes_text, finish, seconds_text, style, table


def drawing(title="a title"):
    fig, ax = axes(title, "length", "bytes", log=(2, True))
    ax.plot([1, 2, 4], [1, 10, 100], label="one")
    ax.plot([1, 2, 4], [3, 3, 3], label="two")
    ax.legend()
    return fig, ax


@pytest.fixture
def shown(monkeypatch):
    """What `finish` hands to the notebook."""
    import IPython
    import matplotlib

    matplotlib.use("Agg")
    seen = []
    monkeypatch.setattr(IPython, "get_ipython", MagicMock)
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: seen.append(data))
    return seen


def test_axes_have_what_was_asked_for():
    fig, ax = drawing()
    assert (ax.get_title("left"), ax.get_xlabel(), ax.get_ylabel()) == ("a title", "length", "bytes")
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.xaxis.get_transform().base == 2 and ax.yaxis.get_transform().base == 10
    assert ax.xaxis.get_major_formatter()(1024) == "1,024"  # and not 2 to the 10th
    assert tuple(fig.get_size_inches()) == (7, 3.6)
    assert axes("t", "x", "y")[1].get_xscale() == "linear"


def test_panels_lie_side_by_side_and_share_one_title():
    fig, (left, right) = axes("t", "x", "y", panels=2)
    assert left.get_title("left") == "t" and right.get_title("left") == "" and len(fig.axes) == 2
    with pytest.raises(ValueError, match="panels=0"):
        axes("t", "x", "y", panels=0)


def test_finish_shows_a_small_png_of_a_fixed_size_and_prints_nothing(shown, capsys):
    assert finish(drawing()[0]) is None
    assert capsys.readouterr() == ("", "")
    (data,) = shown
    assert data["text/plain"] == "figure: a title"
    png = base64.b64decode(data["image/png"])
    image = Image.open(io.BytesIO(png))
    assert image.size == (630, 324) and image.mode == "P" and not image.info.get("Software")
    assert len(png) < 15_000
    assert len(image.convert("RGB").getcolors()) > 5  # something was drawn


def test_the_same_drawing_is_the_same_bytes(shown):
    for title in ("a title", "a title", "another"):
        finish(drawing(title)[0])
    one, same, other = (data["image/png"] for data in shown)
    assert one == same != other


def test_a_figure_of_pyplot_is_shown_once(shown):
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    ax.set_title("centred", loc="center")
    finish(fig)
    assert [data["text/plain"] for data in shown] == ["figure: centred"]
    assert fig.number not in plt.get_fignums()


def test_outside_a_notebook_and_without_a_display_nothing_happens():
    code = "from utils.figures import *; f, a = axes('t', 'x', 'y'); a.plot([1, 2]); finish(f); print('end')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": "", "HOME": "/tmp"}
    )
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)


def test_colours_can_be_told_apart_without_seeing_hue():
    style()
    import matplotlib

    assert matplotlib.rcParams["axes.prop_cycle"].by_key()["color"] == list(figures.COLOURS.values())
    values = [tuple(int(code[i : i + 2], 16) for i in (1, 3, 5)) for code in figures.COLOURS.values()]
    light = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in values]
    assert all(abs(a - b) > 15 for a, b in itertools.pairwise(light))  # neighbours differ in grey too


def test_table_is_aligned_and_says_what_is_missing(capsys):
    table([{"name": "conv", "flops": 1234567, "share": 0.123456, "ok": True}, {"name": "linear layer", "flops": None}])
    lines = [
        "name              flops  share  ok",
        "------------  ---------  -----  ---",
        "conv          1,234,567  0.1235  yes",
        "linear layer          -       -  -",
    ]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == lines[0].split() and printed[3].split() == lines[3].split()
    assert printed[2] == "conv          1,234,567  0.1235  yes"
    assert printed[3] == "linear layer          -       -  -"
    assert all(line == line.rstrip() for line in printed)


def test_columns_are_chosen_ordered_and_renamed(capsys):
    rows = [{"a": 1, "b": 2, "c": 3}]
    table(rows, ["c", "a"])
    table(rows, {"b": "bee"})
    table([(1, "x")], ["n", "text"])
    table([], ["n"])
    table([])
    assert capsys.readouterr().out.split("\n") == [
        "c  a", "-  -", "3  1", "bee", "---", "  2", "n  text", "-  ----", "1  x", "n", "-", "no rows", "no rows", "",
    ]  # fmt: skip


def test_a_wrong_column_names_the_nearest():
    with pytest.raises(ValueError, match="column 'speedupp' is in no row; nearest: 'speedup'"):
        table([{"speedup": 1}], ["speedupp"])
    with pytest.raises(ValueError, match="columns=None"):
        table([(1, 2)])
    with pytest.raises(ValueError):
        table([(1, 2)], ["only one"])


@pytest.mark.parametrize(
    ("n", "text"),
    [
        *[(0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.50 KiB"), (192 * 2**20, "192 MiB")],
        *[(1023.7 * 1024, "1.00 MiB"), (80e9, "74.5 GiB"), (-2048, "-2 KiB"), (2**70, "1048576 PiB"), (12.5, "12.5 B")],
    ],
)
def test_bytes(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("s", "text"),
    [
        *[(0, "0 ns"), (4e-5, "40.0 µs"), (9.996e-4, "1.00 ms"), (0.1, "100 ms"), (31.60543, "31.6 s"), (118, "118 s")],
        *[(611.35, "10.2 min"), (1e4, "2.78 h"), (1e6, "278 h"), (0.0021, "2.10 ms"), (-0.0021, "-2.10 ms")],
    ],
)
def test_seconds(s, text):
    assert seconds_text(s) == text
