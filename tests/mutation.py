"""Mutation testing of the measuring layer with mutmut 3.8: `python tests/mutation.py --help`. See CONTRIBUTING.md.

mutmut makes the mutants, chooses the tests that reach each, and forks a process for it; its settings are in
pyproject.toml. This file adds what the measuring layer needs:

- mutmut leaves decorated functions alone. `@decorator` above a function is written as `name = decorator(name)` below it
  in the copy that is mutated, so context managers, properties and the cached function are tested too.
- cold_child.py runs as `__main__` of other processes. There its functions keep their module's name, by which mutmut
  finds them, and all tests of cold_start count as its tests.
- mutmut's time limit counts seconds on the wall, so that a busy machine would kill mutants. Here each test may use
  CPU_SECONDS of CPU; a test that only waits is ended after WAIT_TICKS half seconds in which this process ran as well.

Results are kept in build/mutation/mutants: a run that was ended goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import math
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutation"
CPU_SECONDS = 20  # each test needs less than two
WAIT_TICKS = 600
DECORATORS = ("contextlib.contextmanager", "functools.lru_cache", "property")
MUTATED = ("equivalence.py", "tensor_difference.py", "cost.py", "flop_count.py")  # and all of utils/timing
SKIPPED = 34  # mutmut's exit code of a mutant that is left out
KILLED, SURVIVED, TIMEOUT, UNCOVERED = "killed", "survived", "timeout", "no tests"


# ------------------------------------------------------------------------------------------- the copy


def undecorated(source: str) -> str:
    """Decorators of DECORATORS as assignments below their function."""
    lines = source.splitlines()
    found = [
        (node, node.decorator_list[0])
        for scope in ast.walk(ast.parse(source))
        if isinstance(scope, ast.Module | ast.ClassDef)
        for node in scope.body
        if isinstance(node, ast.FunctionDef) and len(node.decorator_list) == 1
    ]
    for node, decorator in sorted(found, key=lambda pair: -pair[0].lineno):
        text = ast.unparse(decorator)
        if text.startswith(DECORATORS):
            indent = " " * node.col_offset
            lines.insert(node.end_lineno, f"{indent}{node.name} = {text}({node.name})")
            del lines[decorator.lineno - 1]
    return "\n".join(lines) + "\n"


def as_child(source: str) -> str:
    """cold_child.py whose functions belong to utils.timing.cold_child also where it is the program."""
    first = source.index("\n\ndef ")
    head = (
        "\nMAIN = __name__ == '__main__'\n__name__ = 'utils.timing.cold_child'\n"
        "if MAIN and os.environ.get('MUTANT_UNDER_TEST') in ('stats', 'fail'):\n"
        "    os.environ['MUTANT_UNDER_TEST'] = ''\n"
    )
    return source[:first] + head + source[first:].replace("if __name__ ==", "if MAIN or __name__ ==")


def copy_tree() -> None:
    """utils and what its tests need, below build/mutation; files that did not change keep their time of writing."""
    for name in ("pyproject.toml", "conftest.py", "utils", "tests", "data"):
        for path in [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*")):
            if path.is_dir() or "__pycache__" in path.parts:
                continue
            data = path.read_bytes()
            if path.parent == ROOT / "utils" / "timing" or path.name in MUTATED:
                data = undecorated(data.decode()).encode()
            if path.name == "cold_child.py":
                data = as_child(data.decode()).encode()
            target = COPY / path.relative_to(ROOT)
            if not target.exists() or target.read_bytes() != data:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)


# ------------------------------------------------------------------------------------------- mutmut


def limit_by_cpu() -> None:
    """Time limits that a busy or paused machine does not reach."""
    from mutmut.runners.harness import PytestRunner
    from mutmut.state import state
    from mutmut.workers import isolation

    class CpuLimit:
        def pytest_runtest_setup(self, item: object) -> None:
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            used = math.ceil(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, hard))

    plain = PytestRunner.execute_pytest

    def execute_pytest(self: PytestRunner, params: list[str], **kwargs: object) -> int:
        if os.environ.get("MUTANT_UNDER_TEST", "").startswith("utils."):
            kwargs["plugins"] = [*kwargs.get("plugins", ()), CpuLimit()]
        return plain(self, params, **kwargs)

    def end_after_ticks(pid: int, timeout_s: float) -> None:
        def count() -> None:
            for _ in range(WAIT_TICKS):
                time.sleep(0.5)
                try:
                    os.kill(pid, 0)
                except ProcessLookupError:
                    return
            os.kill(pid, signal.SIGXCPU)

        threading.Thread(target=count, daemon=True).start()

    plain_run = PytestRunner.run_tests

    def run_tests(self: PytestRunner, *, mutant_name: str | None, tests: list[str]) -> int:
        """Fast tests first, file by file: each file's fixtures are set up once."""
        seconds = state().duration_by_test
        tests = sorted(tests, key=lambda name: (name.split("::")[0], seconds.get(name, 0.0)))
        return plain_run(self, mutant_name=mutant_name, tests=tests)

    server, clean = isolation.ForkServerRunner, Path("clean.txt")
    plain_stats, plain_clean = server.collect_stats, server.run_clean_tests

    def collect_stats(self: isolation.ForkServerRunner, tests: list[str] | None) -> int:
        code = plain_stats(self, tests)
        if code == 0 and not tests:
            clean.write_text(fingerprint())
        return code

    def run_clean_tests(self: isolation.ForkServerRunner, tests: list[str]) -> int:
        """Once for the same files: the run that found each mutant's tests has shown that they pass without one."""
        if clean.exists() and clean.read_text() == fingerprint():
            return 0
        code = plain_clean(self, tests)
        if code == 0:
            clean.write_text(fingerprint())
        return code

    server.collect_stats, server.run_clean_tests = collect_stats, run_clean_tests
    PytestRunner.execute_pytest, PytestRunner.run_tests = execute_pytest, run_tests
    isolation.register_timeout = end_after_ticks


def fingerprint() -> str:
    """Of everything that a test can depend on."""
    found = hashlib.sha256()
    for path in sorted(
        path for name in ("tests", "utils", "data") for path in (COPY / name).rglob("*") if path.is_file()
    ):
        if "__pycache__" not in path.parts:
            found.update(path.read_bytes())
    return found.hexdigest()


def add_hidden_tests(tests: dict[str, set[str]]) -> None:
    """Tests that mutmut does not see: of the fresh processes, and behind the cache of order_rank."""
    cold = {name for names in tests.values() for name in names if "test_timing_cold_start" in name}
    for name in child_functions():
        tests[name] |= cold
    tests["utils.timing.statistics.x_order_rank"] |= tests["utils.timing.statistics.x_order_interval"]


def child_functions() -> list[str]:
    tree = ast.parse((COPY / "utils" / "timing" / "cold_child.py").read_text())
    return [f"utils.timing.cold_child.x_{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)]


def files() -> list:
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.utils.file_utils import walk_mutatable_files

    found = []
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        found.append(data)
    return sorted(found, key=lambda data: str(data.path))


def choose(size: int, seed: int, again: bool, only: str) -> dict[str, int]:
    """Leave out all mutants but a sample; with `again`, those that were not killed are tested once more.

    Returns each mutant's place in the order of testing. It is random too: whenever a run is ended, the mutants that
    were tested are a random sample.
    """
    every = sorted(name for data in files() for name in data.exit_code_by_key if only in name)
    random.Random(seed).shuffle(every)  # so a larger sample of the same seed holds the smaller one
    sample = set(every[:size] if size else every)
    for data in files():
        for name, code in data.exit_code_by_key.items():
            if name not in sample:
                data.exit_code_by_key[name] = SKIPPED if code is None else code
            elif code == SKIPPED or (again and code != 1):
                data.exit_code_by_key[name] = None
        data.save()
    (COPY / "sample.txt").write_text("\n".join(sorted(sample)))
    return {name: place for place, name in enumerate(every)}


def status(code: int | None) -> str:
    from mutmut.stats import status_by_exit_code

    return "not tested" if code is None else status_by_exit_code[code]


def report() -> None:
    """Mutants of the sample by file, then the share that was killed with its 95 % interval (Wilson)."""
    sample = set((COPY / "sample.txt").read_text().splitlines())
    names = (KILLED, TIMEOUT, SURVIVED, UNCOVERED, "other", "not tested")
    total = dict.fromkeys(names, 0)
    print(f"{'':32}" + "".join(f"{name:>11}" for name in names))
    for data in files():
        counts = dict.fromkeys(names, 0)
        for name, code in data.exit_code_by_key.items():
            if name in sample:
                counts[status(code) if status(code) in names else "other"] += 1
        if any(counts.values()):
            print(f"{data.path!s:32}" + "".join(f"{count:>11}" for count in counts.values()))
        total = {name: total[name] + counts[name] for name in names}
    print(f"{'':32}" + "".join(f"{count:>11}" for count in total.values()))
    n, killed = sum(total.values()) - total["not tested"], total[KILLED] + total[TIMEOUT]
    if n == 0:
        return
    share, z = killed / n, 1.96
    middle, half = (share + z * z / 2 / n) / (1 + z * z / n), z / (1 + z * z / n)
    half *= math.sqrt(share * (1 - share) / n + z * z / 4 / n / n)
    print(f"killed: {killed} of {n}, {share:.1%} ({total[KILLED]} by a test, {total[TIMEOUT]} by the limit of its CPU)")
    print(f"95 % interval, where these are a random sample: {middle - half:.1%} to {middle + half:.1%}")


def show() -> None:
    """What was changed in each mutant of the sample that was not killed."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    sample = set((COPY / "sample.txt").read_text().splitlines())
    for data in files():
        for name, code in data.exit_code_by_key.items():
            if name in sample and code not in (None, 1, 3):
                lines = get_diff_for_mutant(name, path=data.path).splitlines()
                print(f"# {name}: {status(code)}")
                print("\n".join(line for line in lines[2:] if line[:1] in "+-@"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation testing of the measuring layer.")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants, chosen at random (0: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="", help="mutants whose name holds this text")
    parser.add_argument("--again", action="store_true", help="test mutants that were not killed once more")
    parser.add_argument("--children", type=int, default=1, help="processes at a time")
    parser.add_argument("--fresh", action="store_true", help="forget all results first")
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    parser.add_argument("--show", action="store_true", help="only print the mutants that were not killed")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COOKBOOK_DEVICE": "cpu"}
    if given.fresh:
        shutil.rmtree(COPY, ignore_errors=True)
    if not (given.report or given.show):
        copy_tree()
    os.chdir(COPY)
    from mutmut import __main__ as mutmut
    from mutmut.state import state

    if given.report or given.show:
        return report() if given.report else show()
    limit_by_cpu()
    plain = mutmut.collect_or_load_stats

    def with_hidden_tests(*args: object, **kwargs: object) -> None:
        plain(*args, **kwargs)
        add_hidden_tests(state().tests_by_mangled_function_name)

    mutmut.collect_or_load_stats = with_hidden_tests
    with mutmut.CatchOutput():
        Path("mutants").mkdir(exist_ok=True)
        mutmut.copy_src_dir()
        mutmut.copy_also_copy_files()
        mutmut.create_mutants(1)
    order = choose(given.sample, given.seed, given.again, given.only)
    mutmut.estimated_worst_case_time = lambda name: order.get(name, len(order))
    mutmut._run([], given.children)
    report()


if __name__ == "__main__":
    sys.exit(main())
