"""The verdicts of all claims, collected from what the `claims` cell of each notebook has stored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from .table import WIDTH, render

VERDICTS = ("confirmed", "refined", "refuted", "not measurable here")
LINE = re.compile(rf"^(?P<id>\S+) +(?P<verdict>{'|'.join(VERDICTS)}) +(?P<evidence>\S.*)$")  # utils.claims.show
UNSETTLED = "not settled yet"


@dataclass(frozen=True)
class Settled:
    """One verdict line of one notebook."""

    id: str
    verdict: str
    evidence: str
    recipe: str


def settled_in(notebook: Path) -> list[Settled]:
    """The verdict lines in the stored output of the notebook's `claims` cell."""
    found = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code" or "claims" not in cell.get("metadata", {}).get("tags", []):
            continue
        for output in cell.get("outputs", []):
            text = output.get("text", []) if output["output_type"] == "stream" else []
            for line in (text if isinstance(text, str) else "".join(text)).splitlines():
                if match := LINE.match(line):
                    found.append(Settled(**match.groupdict(), recipe=notebook.stem))
    return found


def all_claims(notebooks: Iterable[Path], claims: dict | None = None) -> list[tuple[object, list[Settled]]]:
    """Every claim of data/claims.yaml with the verdicts that notebooks give on it: none, one, or more than one.

    Raises ValueError for a verdict on a claim that data/claims.yaml does not have.
    """
    if claims is None:
        from ..claims import load_claims

        claims = load_claims()
    verdicts: dict[str, list[Settled]] = {name: [] for name in claims}
    for notebook in notebooks:
        for settled in settled_in(notebook):
            if settled.id not in verdicts:
                raise ValueError(f"{notebook.name} settles {settled.id!r}, which data/claims.yaml does not have")
            verdicts[settled.id].append(settled)
    return [(claim, verdicts[name]) for name, claim in claims.items()]


def claims_table(notebooks: Iterable[Path], *, markdown: bool = False, claims: dict | None = None) -> str:
    """All claims as text of at most 80 columns, or as Markdown, with a count of the verdicts."""
    found = all_claims(notebooks, claims)
    counts = {name: sum(any(s.verdict == name for s in settled) for _, settled in found) for name in VERDICTS}
    counts[UNSETTLED] = sum(not settled for _, settled in found)
    summary = f"{len(found)} claims: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    if markdown:
        lines = ["| claim | statement | verdict | evidence | recipe |", "|---|---|---|---|---|"]
        for claim, settled in found:
            for one in settled or [Settled(claim.id, UNSETTLED, "", claim.recipe)]:
                cells = (one.id, claim.statement, one.verdict, one.evidence, one.recipe)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join([*lines, "", summary])
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("claim", "verdict", "recipe"):
        table.add_column(Text(name), no_wrap=True)
    table.add_column(Text("statement → evidence"), ratio=1)
    for claim, settled in found:
        for one in settled or [Settled(claim.id, UNSETTLED, "", claim.recipe)]:
            said = claim.statement + (f"\n→ {one.evidence}" if one.evidence else "")
            table.add_row(*map(Text, (one.id, one.verdict, one.recipe[:2], said)))
    return f"{render(table, WIDTH)}\n\n{summary}"
