"""Sweeps that are killed: start 12 points, SIGKILL the driver at a random moment, start again. Twenty times.

    ./cookbook bench sweep_kills [TIMES] [SEED]

Each time: 12 rows, each once; what was done when the kill came is not run again and not touched; no kernel is left.
Then a start with nothing to do is timed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from toy_recipes import toy  # noqa: E402

SPEC = "recipe: 01_toy\ngrid:\n  seed: [0, 1, 2, 3, 4, 5]\n  fast: [true, false]\ntime_limit: 600\n"
STARTS = "import os\nwith open('starts', 'a') as file:\n    print(seed, fast, os.getpid(), file=file)"


def alive(pid: int) -> bool:
    """Is it a process that still runs? (A zombie does not.)"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def trial(folder: Path, wait: float) -> tuple[list[str], int, float]:
    """(what is wrong, points done at the kill, seconds of the whole second start)."""
    toy(folder, "01_toy", ("", STARTS))
    (folder / "s.yaml").write_text(SPEC)
    (folder / "starts").touch()
    env = os.environ | {"COOKBOOK_NOTEBOOKS": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "utils.cookbook.cli", "sweep", "s.yaml", "--out", "out"]
    quiet = {"cwd": folder, "env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}

    driver = subprocess.Popen(command, **quiet)
    time.sleep(wait)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    time.sleep(0.5)  # kernels may take a moment to end
    wrong = ["a kernel is left"] if any(alive(int(line.split()[2])) for line in starts(folder)) else []
    done = {path: path.read_bytes() for path in folder.glob("out/points/*/row.json")}
    points = [json.loads(text)["parameters"] for text in done.values()]
    before = [" ".join(line.split()[:2]) for line in starts(folder)]

    begin = time.perf_counter()
    again = subprocess.run(command, **quiet)
    took = time.perf_counter() - begin
    wrong += [f"exit status {again.returncode}: {again.stderr.decode()}"] if again.returncode else []
    wrong += ["a finished point was touched" for path, text in done.items() if path.read_bytes() != text]
    after = [" ".join(line.split()[:2]) for line in starts(folder)]
    for point in points:
        name = f"{point['seed']} {point['fast']}"
        wrong += [f"{name} was done and ran again"] if after.count(name) != before.count(name) else []
    rows = [json.loads(line) for line in (folder / "out" / "rows.jsonl").read_text().splitlines()]
    expected = sorted([2.0 + seed for seed in range(6)] * 2)
    if sorted(row["speedup"] for row in rows) != expected or len({row["point"] for row in rows}) != 12:
        wrong.append(f"{len(rows)} rows of {len({row['point'] for row in rows})} points")
    return wrong, len(done), took


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


def nothing_to_do(folder: Path) -> tuple[float, float]:
    """(seconds of imports, seconds of the sweep itself) of a start with nothing to do."""
    code = (
        "import sys, time; begin = time.perf_counter()\n"
        "from utils.cookbook import cli\n"
        "middle = time.perf_counter(); status = cli.main(['sweep', 's.yaml', '--out', 'out'])\n"
        "print(status, middle - begin, time.perf_counter() - middle)"
    )
    env = os.environ | {"COOKBOOK_NOTEBOOKS": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=True)
    status, imports, rest = done.stdout.split()[-3:]
    assert status == "0" and "12 before" in done.stdout, done.stdout
    return float(imports), float(rest)


def main() -> int:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    moment = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    good, shortest = 0, 15.0
    for number in range(1, times + 1):
        with tempfile.TemporaryDirectory(prefix="kills") as name:
            wait = moment.uniform(0.5, shortest)
            wrong, done, took = trial(Path(name), wait)
            good += not wrong
            shortest = max(5.0, min(shortest, took))  # a sweep takes about that here: most kills should fall into it
            said = "; ".join(wrong) or "12 rows, each once"
            print(
                f"{number:>3}: killed after {wait:4.1f} s with {done:2} of 12 done, then {took:4.1f} s: {said}",
                flush=True,
            )
            if number == times:
                imports, rest = nothing_to_do(Path(name))
                print(f"nothing to do: {imports:.2f} s of imports, then {rest:.2f} s")
    print(f"{good} of {times} as they should be")
    return 0 if good == times else 1


if __name__ == "__main__":
    sys.exit(main())
