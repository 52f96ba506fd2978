"""Which fields a measured row of a recipe can have, known without running it: to tell a misspelt name from a new one.

A recipe writes fields of its own with `case={...}`, `measured(..., name=value)` or `row["name"] = value`. So every text
and every keyword in its code counts as a name, and so does every field of its committed rows.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from .parameters import code_cells, declared
from .run import rows_between

# What utils.rows writes of a comparison and of the machine; a test compares.
STANDARD = re.findall(
    r"\w+",
    """
    schema_version provenance recipe run_id code_hash date point headline why
    device device_name driver torch cuda cudnn triton python platform cpu_capability cpu_count num_threads
    tf32_matmul tf32_cudnn git_commit git_dirty tree_hash env_id
    label baseline_label verdict speedup ci_low ci_high median_s baseline_median_s n_rounds n_eff replicates
    within_halfwidth between_sd min_effect needed_rounds warnings error share_of_limit first_call_s calls_per_sample
    mode cache confidence same rule same_reason max_abs max_rel rmse dtype
    peak_bytes output_bytes baseline_peak_bytes baseline_output_bytes break_even_calls
    """,
)


@dataclass(frozen=True)
class Fields:
    """The names that are known, and the patterns of names that the recipe puts together (f"{form}_bytes")."""

    names: frozenset[str]
    written: frozenset[str]  # any text of the code: may be a field, and may be the name of a case
    patterns: tuple[str, ...]

    def __contains__(self, name: str) -> bool:
        if name in self.names:
            return True
        kind, _, rest = name.rpartition(".")
        if kind not in ("", "case"):
            return False
        return rest in self.written or any(re.fullmatch(pattern, rest) for pattern in self.patterns)

    def nearest(self, name: str) -> str:
        """The nearest right name: of its own kind (case., param.), one that rows have before one of the code."""
        kind, dot, rest = name.rpartition(".")
        here = [one.rpartition(".")[2] for one in self.names if one.rpartition(".")[0] == kind]
        code = [one for one in self.written if one.isidentifier() and kind != "param"]
        near = get_close_matches(rest, here, n=1, cutoff=0.6) or get_close_matches(rest, code, n=1, cutoff=0.6)
        if near := near or get_close_matches(rest, here, n=1, cutoff=0.0):
            return f"{kind}{dot}{near[0]}"
        return get_close_matches(name, self.names, n=1, cutoff=0.0)[0]


def fields_of(notebook: Path, results: Path) -> Fields:
    """The fields that rows of the recipe at `notebook` can have; `results` is the folder of committed rows."""
    parameters = {f"param.{name}" for name in declared(notebook) if name != "rows"}
    committed = {name for row in rows_between(results / f"{notebook.stem}.jsonl", 0) for name in row}
    written, patterns = set(), set()
    for source, _ in code_cells(notebook):
        for node in ast.walk(_tree(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                written.add(node.value.removeprefix("case."))
            elif isinstance(node, ast.keyword) and node.arg:
                written.add(node.arg)
            elif isinstance(node, ast.JoinedStr):
                texts = [part.value if isinstance(part, ast.Constant) else "" for part in node.values]
                if re.fullmatch(r"[a-z_]{2,}", "".join(texts)):
                    patterns.add("".join(text or r"\w+" for text in texts))
    return Fields(frozenset({*STANDARD, *parameters, *committed}), frozenset(written), tuple(sorted(patterns)))


def _tree(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except SyntaxError:  # a cell with a magic command
        return ast.Module([], [])
