"""`./cookbook evidence`: everything that needs a card, part by part, each part once.

A rented machine gives minutes at a time and may go away. So each part is a command of its own with what is left of the
time as its limit, its output kept in a log, and its state written before the next part starts. The same command again
goes on with what is left. Rows are written by the recipes and benchmarks themselves: nothing is filled in here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .whole_file import write_whole

ROOT = Path(__file__).resolve().parents[2]
LEAST_SECONDS = 20.0  # no part is worth starting with less
LONGER = 1.3  # how much more time a part must get after it was too long; it had at least 0.8 of a call
DONE, SKIPPED, FAILED, TOO_LONG, PENDING = "done", "skipped", "failed", "too long", "to do"


@dataclass(frozen=True)
class Part:
    """One command, and what it leaves behind."""

    name: str
    command: tuple[str, ...]  # arguments of this environment's Python
    records: str


def cli(*arguments: str) -> tuple[str, ...]:
    return ("-P", "-m", "utils.cookbook.cli", *arguments)


def parts(recipes: list[Path], out: Path, preset: str) -> list[Part]:
    """What is recorded, in order: cheap parts that judge the card first, whole pipelines last."""
    known = [
        Part("machine", cli("machine", "--fresh"), "card, versions, measured limits"),
        Part("bench card", cli("bench", "card", str(out / "card.jsonl")), "clock, L2 flush, limits, A/A"),
    ]
    known += [
        Part(
            f"recipe {path.stem[:2]}",
            cli("run", str(path), "--preset", preset, "--out", str(out)),
            f"rows of {path.stem}",
        )
        for path in recipes
    ]
    return known + [
        Part(
            f"tests {path.stem.removeprefix('test_')}",
            ("-m", "pytest", "-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider", str(path.relative_to(ROOT))),
            "checks on the card",
        )
        for path in gpu_tests()
    ]


def gpu_tests() -> list[Path]:
    """Files with tests marked `gpu` (the marker at the start of a line: not a mention of it)."""
    found = sorted((ROOT / "tests").glob("test_*.py"))
    return [path for path in found if "\n@pytest.mark.gpu" in path.read_text(encoding="utf-8")]


def key_of(part: Part) -> str:
    """What a finished part is kept by: its command and the code that it runs."""
    digest = hashlib.sha256(json.dumps([part.name, part.command]).encode())
    for folder, pattern in (("utils", "**/*.py"), ("tests", "**/*.py"), ("notebooks", "*.ipynb")):
        for path in sorted((ROOT / folder).glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_states(out: Path) -> dict[str, dict]:
    """What earlier calls did, by part; {} where there is nothing (or nothing of ours)."""
    with contextlib.suppress(OSError, ValueError):
        states = json.loads((out / "evidence.json").read_text(encoding="utf-8"))
        if isinstance(states, dict):
            return states
    return {}


def write_states(out: Path, states: dict[str, dict]) -> None:
    write_whole(out / "evidence.json", json.dumps(states, indent=1).encode())


def state_of(part: Part, states: dict[str, dict]) -> str:
    """What became of a part; all of them are still to do where the code has changed since."""
    seen = states.get(part.name, {})
    return seen.get("state", PENDING) if seen.get("key") == key_of(part) else PENDING


def to_do(known: list[Part], states: dict[str, dict], seconds: float) -> list[Part]:
    """Parts for a call of so many seconds: those that never ended first, then those that failed before.

    Last, those that were too long for an earlier call, where this one has more time.
    """
    by_state = {state: [p for p in known if state_of(p, states) == state] for state in (PENDING, FAILED, TOO_LONG)}
    longer = [p for p in by_state[TOO_LONG] if seconds > LONGER * states[p.name]["seconds"]]
    return by_state[PENDING] + by_state[FAILED] + longer


def record(
    todo: list[Part], out: Path, seconds: float, say: Callable[[str], None], clock: Callable[[], float]
) -> Iterator[tuple[Part, str]]:
    """Run parts until the time is over; yields each with its state. A part cut off in the middle is still to do.

    A part that had all the time of a call and did not end is `too long`: a call of the same length does not begin it
    again, since it never would end.
    """
    end = clock() + seconds
    for part in todo:
        left = end - clock()
        if left < LEAST_SECONDS:
            return
        say(f"{part.name} …")
        log = out / "logs" / f"{part.name.replace(' ', '_')}.txt"
        log.parent.mkdir(exist_ok=True)
        start = clock()
        status = run_limited(part.command, log, left)
        took = clock() - start
        if status is None:
            state = TOO_LONG if left > 0.8 * seconds else PENDING
        else:
            state = FAILED if status else SKIPPED if skipped_all(log) else DONE
        states = read_states(out) | {part.name: {"state": state, "key": key_of(part), "seconds": round(took, 1)}}
        write_states(out, states)
        yield part, state


def run_limited(command: tuple[str, ...], log: Path, seconds: float) -> int | None:
    """Exit status of a Python command whose output goes to `log`; None when it had to be stopped at its limit.

    It gets a process group of its own, and the whole group ends with it: nothing keeps the card busy afterwards.
    """
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def skipped_all(log: Path) -> bool:
    """Did pytest skip every test of a part? Then it proved nothing."""
    last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    return bool(last) and "skipped" in last[0] and "passed" not in last[0]


def plan_table(known: list[Part], out: Path) -> str:
    """One line a part: state, seconds it took, what it records."""
    states = read_states(out)
    lines = [f"{'part':<24}{'state':<10}{'s':>6}  records", "-" * 80]
    for part in known:
        state = state_of(part, states)
        took = "" if state == PENDING else f"{states[part.name]['seconds']:.0f}"
        lines.append(f"{part.name:<24}{state:<10}{took:>6}  {part.records}"[:80])
    return "\n".join(lines)
