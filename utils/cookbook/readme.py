"""The results table of README.md, from what is committed: data/results, and the verdicts stored in the notebooks.

Nothing of this machine gets into it, so it is the same everywhere, and a test fails where it is stale.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .run import rows_between
from .table import NONE, RESULTS, card, headline, same_answer, speedup_text, usual_rows, verdict_text, why_of
from .verdicts import VERDICTS, settled_in

BEGIN, END = "<!-- results: written by ./cookbook readme -->", "<!-- /results -->"


def renew(readme: Path, notebooks: Iterable[Path], *, write: bool = True, results: Path | None = None) -> bool:
    """Bring the table between the two marks up to date. Returns whether it was stale; `write=False` only looks.

    Raises ValueError, one line, when the README lacks the marks.
    """
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme.name} has no results table: expected the lines {BEGIN} and {END}")
    fresh = f"{before}{BEGIN}\n\n{results_markdown(notebooks, results)}\n\n{END}{after}"
    if write and fresh != text:
        readme.write_text(fresh, encoding="utf-8")
    return fresh != text


def results_markdown(notebooks: Iterable[Path], results: Path | None = None) -> str:
    """A Markdown table: one line per recipe; every recorded device in it, and the verdicts on the claims it settles."""
    lines = ["| recipe | why | recorded | same answer? | verdict | claims |", "|---|---|---|---|---|---|"]
    for notebook in notebooks:
        rows = rows_between((results or RESULTS) / f"{notebook.stem}.jsonl", 0)
        measured = [row for row in rows if row.get("provenance") == "measured"]
        devices = dict.fromkeys(row.get("device_name") for row in measured)
        groups = [[row for row in measured if row.get("device_name") == name] for name in devices]
        heads = [headline(usual_rows(group, notebook))[0] for group in groups]
        cells = [
            f"[{notebook.stem}](notebooks/{notebook.name})",
            why_of(notebook, heads[-1] if heads else None) or NONE,
            *(
                "<br>".join(cell(head) for head in heads) or NONE
                for cell in (
                    lambda head: f"{speedup_text(head)} on {short_device(head.get('device_name'))}",
                    same_answer,
                    verdict_text,
                )
            ),
            claims_text(notebook) or NONE,
        ]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    return "\n".join(lines)


def short_device(name: str | None) -> str:
    """A GPU's usual name, or "CPU": the models of CPUs say little to a reader of the README."""
    return card(name) if name and "nvidia" in name.lower() else "CPU"


def claims_text(notebook: Path) -> str:
    """Such as "confirmed: Q1 Q2; refuted: Q4"."""
    settled = settled_in(notebook)
    groups = [(verdict, [one.id for one in settled if one.verdict == verdict]) for verdict in VERDICTS]
    return "; ".join(f"{verdict}: {' '.join(ids)}" for verdict, ids in groups if ids)
