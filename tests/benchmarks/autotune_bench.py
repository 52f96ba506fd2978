"""The winners behind the figure of recipe 05: which of its own algorithms is fastest, by channels and map size.

    ./cookbook bench autotune        prints the grid and appends its rows to build/bench/autotune.jsonl

The algorithms and the tuner are those of the notebook: its cells up to `technique` are executed here.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
import torch

from utils import figures
from utils.rows import append_rows, measured
from utils.timing import measure

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "build" / "bench" / "autotune.jsonl"
CHANNELS, SIZES = (4, 16, 64, 128), (18, 34, 66, 130)
LARGEST = {3: 128 * 34, 15: 16 * 130}  # channels x size: beyond it one call of the slowest takes seconds


def notebook_names() -> dict:
    """Everything that the notebook defines up to its technique."""
    names: dict = {}
    for cell in nbformat.read(ROOT / "notebooks" / "05_cudnn_benchmark.ipynb", as_version=4).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "code" and not {"machine", "figure"} & set(tags):
            exec(cell.source, names)
        if "technique" in tags:
            return names
    raise ValueError("notebook 05 has no cell tagged technique")


def seconds(algorithm, x, w) -> float:
    return measure(
        algorithm, x, w, min_run_time=0.02, max_run_time=0.5, warmup_time=0.005, min_samples=6, num_threads=1
    ).median_s


def main() -> int:
    torch.set_num_threads(1)
    names = notebook_names()
    rows, table = [], []
    for k, largest in LARGEST.items():
        for c in CHANNELS:
            line = {"filter": k, "channels": c}
            for size in SIZES:
                if c * size > largest:
                    continue
                tuner = names["Autotuner"](names["ALGORITHMS"], seconds)
                x, w = names["draw"](c, size, k)
                tuner(x, w)
                line[str(size)] = winner = tuner.winners[tuner.key(x, w)]
                case = {"c": c, "size": size, "k": k}
                rows.append(measured("05_cudnn_benchmark", case=case, label="winner", winner=winner))
            table.append(line)
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    append_rows(ROWS, rows)
    figures.table(table, ["filter", "channels", *map(str, SIZES)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
