import errno
import functools
import json
import math
import multiprocessing
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from utils import rows as module
from utils.equivalence import Equivalence
from utils.rows import (
    SCHEMA_VERSION,
    append_rows,
    code_hash,
    from_comparison,
    measured,
    read_rows,
    recorded_rows,
    reported,
    verdict_summary,
)


@functools.cache
def base():
    return measured("x", {"device": "cpu"})


def row(**fields):
    return base() | fields


# ------------------------------------------------------------------------------------------------ files


def test_rows_survive_writing_and_reading(tmp_path):
    path = tmp_path / "new folder" / "rows.jsonl"
    written = [row(value=1.5, label="naïve"), reported("x", "a source", median_s=31.6)]
    append_rows(path, written[:1])
    append_rows(str(path), written[1:])
    assert read_rows(path) == written
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("path", ["", None])
def test_without_a_path_nothing_is_written_but_rows_are_checked(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    append_rows(path, [row()])
    with pytest.raises(ValueError, match="flat"):
        append_rows(path, [row() | {"deep": {"a": 1}}])
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_finite_or_null(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(
        path, [row(a=float("nan"), b=float("-inf"), c=[1.0, float("inf")], d=np.float32(0.5), e=torch.tensor(3))]
    )
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    (found,) = read_rows(path)
    assert [found[name] for name in "abcde"] == [None, None, [1.0, None], 0.5, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deep": {"a": 1}}, "field 'deep' of a row is a dict; rows are flat"),
        ({"deep": [[1]]}, "field 'deep' of a row is a list"),
        ({"tensor": torch.ones(3)}, "field 'tensor' of a row is a Tensor"),
        ({3: "x"}, "field name 3"),
        ({"provenance": "guessed"}, "provenance='guessed'"),
        ({"run_id": None}, "a measured row has no run_id"),
        ({"recipe": ""}, "a measured row has no recipe"),
        ({"provenance": "reported"}, "a reported row has no source"),
        ({"verdict": "fast"}, "verdict='fast' of a row; expected one of faster"),
        ({"schema_version": 99}, "schema_version=99"),
    ],
)
def test_a_wrong_row_is_refused_before_anything_is_written(tmp_path, change, message):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match=message):
        append_rows(path, [row(), row() | change])
    assert not path.exists()


def writer(path, number, barrier):
    barrier.wait()
    for i in range(20):
        append_rows(path, [row(writer=number, i=i, padding="x" * 3000), row(writer=number, i=i, second=True)])


def test_many_writers_lose_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    writers = [context.Process(target=writer, args=(path, n, barrier)) for n in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
        assert process.exitcode == 0
    found = read_rows(path)
    assert len(found) == 160
    for n in range(4):
        mine = [r for r in found if r["writer"] == n]
        assert [r["i"] for r in mine] == [i for i in range(20) for _ in range(2)]
    pairs = [(r["writer"], r["i"]) for r in found]
    assert pairs[0::2] == pairs[1::2]  # what one call appends stays together


def test_an_append_is_one_write_under_a_lock_and_synced(tmp_path, monkeypatch):
    calls = []
    for name in ("write", "fsync"):
        original = getattr(os, name)
        monkeypatch.setattr(
            module.os, name, lambda *a, original=original, name=name: (calls.append(name), original(*a))[1]
        )
    lock = module.fcntl.flock
    monkeypatch.setattr(module.fcntl, "flock", lambda *a: (calls.append("lock"), lock(*a))[1])
    append_rows(tmp_path / "rows.jsonl", [row(), row(), row()])
    assert calls == ["lock", "write", "fsync"]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row(i=1)])
    before, write = path.read_bytes(), os.write
    monkeypatch.setattr(module.os, "write", lambda handle, data: write(handle, data[:50]))
    with pytest.raises(OSError, match=r"rows.jsonl: only 50 of \d+ bytes fit"):
        append_rows(path, [row(i=2)])
    assert path.read_bytes() == before

    def full(handle, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        append_rows(path, [row(i=2)])
    assert path.read_bytes() == before


def test_a_damaged_last_line_is_named_and_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row(i=1), row(i=2)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(UserWarning, match=r"rows.jsonl, line 2 is damaged and was skipped"):
        assert [r["i"] for r in read_rows(path)] == [1]


def test_appending_after_a_killed_writer_does_not_spoil_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row(i=1), row(i=2)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(UserWarning, match=r"rows.jsonl: the unfinished last line was dropped"):
        append_rows(path, [row(i=3)])
    assert [r["i"] for r in read_rows(path)] == [1, 3]
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # whole, only its line end is missing
    append_rows(path, [row(i=4)])
    assert [r["i"] for r in read_rows(path)] == [1, 3, 4]


@pytest.mark.parametrize("damage", ["{", '{"a": NaN}', "[1]", "\xff\xfe"])
def test_other_damage_is_an_error_naming_file_and_line(tmp_path, damage):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row(i=1)])
    with open(path, "ab") as file:
        file.write(damage.encode("latin-1") + b"\n")
    append_rows(path, [row(i=3)])
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2 is damaged"):
        read_rows(path)


@pytest.mark.parametrize("version", [99, None, "1", True])
def test_rows_of_another_version_are_not_guessed_at(tmp_path, version):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"schema_version": version}) + "\n")
    with pytest.raises(ValueError, match=rf"line 1 has schema_version={version!r}; expected 1 to {SCHEMA_VERSION}"):
        read_rows(path)


def test_patterns_and_missing_files(tmp_path):
    for name in ("b", "a"):
        append_rows(tmp_path / f"{name}.jsonl", [row(name=name)])
    append_rows(tmp_path / "odd[1].jsonl", [row(name="odd")])
    assert [r["name"] for r in read_rows(tmp_path / "?.jsonl")] == ["a", "b"]
    assert [r["name"] for r in read_rows(tmp_path / "b.jsonl", tmp_path / "a.jsonl")] == ["b", "a"]
    assert [r["name"] for r in read_rows(tmp_path / "odd[1].jsonl")] == ["odd"]
    assert read_rows(tmp_path / "*.json") == [] == read_rows()
    with pytest.raises(FileNotFoundError, match="is no file of rows"):
        read_rows(tmp_path / "absent.jsonl")


def test_recorded_rows_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    assert recorded_rows("07_conv3d_to_linear") == []
    append_rows(tmp_path / "data" / "results" / "07_conv3d_to_linear.jsonl", [row(i=1)])
    assert [r["i"] for r in recorded_rows("07_conv3d_to_linear")] == [1]


# ------------------------------------------------------------------------------------------------ what a row holds


def test_places_are_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17-of-lab")
    path = tmp_path / "rows.jsonl"
    text = "File '/home/someone/demo/x.py', line 3, on node-17-of-lab; see ~/notes.txt"
    kept = "3 B/s at https://example.org/a/b, owner/name#5, 1/2 and a / b"
    append_rows(path, [row(error=text, note=kept, where=Path("/data/me/model.bin"), many=["/tmp/a/b.txt"])])
    (found,) = read_rows(path)
    assert found["error"] == "File 'x.py', line 3, on HOST; see notes.txt"
    assert found["note"] == kept and found["where"] == "model.bin" and found["many"] == ["b.txt"]


def notebook(*cells):
    made = []
    for tags, source in cells:
        made.append({"cell_type": "code" if tags != ["prose"] else "markdown", "metadata": {"tags": tags}})
        made[-1]["source"] = source
    return {"cells": made, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}


PARAMETERS = (
    'device: str = "auto"  # where\nseed: int = 0\nrows: str = ""  # row file\nsizes: list = [1, 2]\nplain = 3\n'
)
CELLS = [
    (["prose"], "# Title"),
    (["parameters"], PARAMETERS),
    ([], "import torch"),
    (["measure"], "compare()"),
    ([], "after"),
]


def test_the_code_hash_follows_the_code_up_to_measure_and_nothing_else(tmp_path):
    base = code_hash(notebook(*CELLS))
    assert len(base) == 16 and int(base, 16) >= 0

    def changed(index, tags, source):
        return code_hash(notebook(*[*CELLS[:index], (tags, source), *CELLS[index + 1 :]]))

    assert changed(0, ["prose"], "# Other") == base
    assert changed(1, ["parameters"], "seed: int = 5") == base
    assert changed(1, ["injected-parameters"], "seed = 5") == base
    assert changed(4, [], "other") == base
    assert changed(2, [], "import numpy") != base
    assert changed(3, ["measure"], "compare(1)") != base
    assert code_hash(notebook(*CELLS[2:], *CELLS[:2])) == base
    assert code_hash(notebook(([], "import torchcompare()"), (["measure"], ""))) != base
    file = tmp_path / "n.ipynb"
    lines = notebook(*CELLS)
    for cell in lines["cells"]:
        cell["source"] = cell["source"].splitlines(keepends=True)  # as Jupyter writes it
    file.write_text(json.dumps(lines))
    assert code_hash(file) == code_hash(str(file)) == base


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "42_toy.ipynb").write_text(json.dumps(notebook(*CELLS)))
    return "42_toy"


@dataclass(frozen=True)
class Row:
    """As a ComparisonRow of utils.timing."""

    label: str
    baseline_label: str = "conv3d"
    verdict: str = "faster"
    speedup: float | None = 2.0
    equivalence: Equivalence | None = None
    warnings: tuple = ()
    error: str | None = None
    num_threads: int = 1
    samples: tuple = field(default=(1.0, 2.0), repr=False)


SAME = Equivalence(True, "close", "largest difference 1e-07", 1e-7, 1e-6, 1e-8, "float32")
NAMESPACE = {
    "device": torch.device("cpu"),
    "seed": 7,
    "rows": "/home/me/rows.jsonl",
    "sizes": [1, 2],
    "plain": 3,
    "x": 1,
}


def test_rows_of_a_comparison(recipe):
    comparison = SimpleNamespace(
        rows=[
            Row("linear", equivalence=SAME, warnings=("not_rebuilt", "noise")),
            Row("broken", verdict="error", speedup=None, error="boom"),
        ]
    )
    memory = {
        "linear": SimpleNamespace(peak_bytes=10, output_bytes=4),
        "conv3d": SimpleNamespace(peak_bytes=30, output_bytes=4),
    }
    linear, broken = from_comparison(
        comparison, recipe=recipe, namespace=NAMESPACE, case={"patches": 784, "dtype": torch.bfloat16}, memory=memory
    )
    assert linear["provenance"] == "measured" and linear["schema_version"] == SCHEMA_VERSION
    assert (linear["recipe"], linear["code_hash"]) == (recipe, code_hash(notebook(*CELLS)))
    assert {name: linear[name] for name in linear if name.startswith("param.")} == {
        "param.device": "cpu",
        "param.seed": 7,
        "param.sizes": [1, 2],
        "param.plain": 3,
    }
    assert (linear["case.patches"], linear["case.dtype"]) == (784, "bfloat16")
    assert (linear["label"], linear["baseline_label"], linear["verdict"], linear["speedup"]) == (
        "linear",
        "conv3d",
        "faster",
        2,
    )
    assert (linear["same"], linear["rule"], linear["max_abs"], linear["dtype"]) == (True, "close", 1e-7, "float32")
    assert linear["same_reason"] == "largest difference 1e-07"
    assert linear["warnings"] == "not_rebuilt; noise" and linear["num_threads"] == 1
    assert (linear["peak_bytes"], linear["baseline_peak_bytes"], linear["output_bytes"]) == (10, 30, 4)
    assert "samples" not in linear and "equivalence" not in linear
    assert {"device", "device_name", "torch", "git_commit", "date", "env_id", "run_id"} <= set(linear)
    assert (broken["speedup"], broken["error"], broken["same"], broken["warnings"]) == (None, "boom", None, None)
    assert "peak_bytes" not in broken and broken["baseline_peak_bytes"] == 30
    assert linear["run_id"] == broken["run_id"]
    assert json.loads(json.dumps(linear, allow_nan=False)) == linear


def test_a_real_comparison_row_is_flattened(recipe):
    from utils.timing.results import ComparisonRow

    real = ComparisonRow(label="linear", baseline_label="conv3d", verdict="faster", speedup=3.0, equivalence=SAME)
    (found,) = from_comparison(SimpleNamespace(rows=[real]), recipe=recipe, namespace=NAMESPACE)
    assert (
        found["ci_low"] is None and found["speedup"] == 3.0 and found["rule"] == "close" and found["mode"] == "latency"
    )


def test_memory_of_something_else_is_refused(recipe):
    with pytest.raises(
        ValueError, match=r"memory has 'liner', which was not compared; expected one of \['conv3d', 'linear'\]"
    ):
        from_comparison(
            SimpleNamespace(rows=[Row("linear")]), recipe=recipe, namespace=NAMESPACE, memory={"liner": None}
        )


def test_without_the_notebook_there_is_no_hash_and_no_parameter(recipe):
    found = measured("43_other", NAMESPACE, {"n": 1}, compilations=2)
    assert found["code_hash"] is None and found["case.n"] == 1 and found["compilations"] == 2
    assert not [name for name in found if name.startswith("param.")]


def test_the_run_id_can_be_given(recipe, monkeypatch):
    assert measured(recipe)["run_id"] == measured(recipe)["run_id"]
    monkeypatch.setenv("COOKBOOK_RUN_ID", "abc")
    assert measured(recipe)["run_id"] == "abc"


def test_provenance_cannot_be_overwritten():
    with pytest.raises(ValueError, match="field 'date' is already part"):
        measured("x", date="yesterday")
    with pytest.raises(ValueError, match="field 'provenance' of a reported row is fixed"):
        reported("x", "s", provenance="measured")


def test_a_reported_row_carries_its_source_and_no_machine():
    found = reported("x", "000.txt", device_name="NVIDIA H200", median_s=31.605)
    assert found == {
        "schema_version": SCHEMA_VERSION, "provenance": "reported", "recipe": "x", "source": "000.txt",
        "device_name": "NVIDIA H200", "median_s": 31.605,
    }  # fmt: skip
    with pytest.raises(ValueError, match="a reported row has no source"):
        reported("x", "")


def test_the_summary_counts_invalid_rows_and_never_averages_them():
    given = [
        {"verdict": "faster", "speedup": 4.0},
        {"verdict": "slower", "speedup": 0.5},
        {"verdict": "equivalent", "speedup": 1.0},
        {"verdict": "inconclusive", "speedup": None},
        {"verdict": "invalid", "speedup": 1000.0},
        {"verdict": "error"},
        {"provenance": "reported", "speedup": 790000.0},
    ]
    found = verdict_summary(given)
    assert math.isclose(found.pop("geomean"), 2 ** (1 / 3))
    assert found == {"averaged": 3} | dict.fromkeys(module.VERDICTS, 1)
    assert verdict_summary([])["geomean"] is None
    with pytest.raises(ValueError, match="verdict='fast' in a row"):
        verdict_summary([{"verdict": "fast"}])
