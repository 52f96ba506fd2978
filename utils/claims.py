"""What the sources claim, and the verdict of what was measured here.

    show(
        settle("S3", "refined", "exact only with the running maximum; without it scores of 100 give nan"),
        from_rows("S2", recorded_rows("03_sdpa"), rule, needs="a recorded row of a CUDA device"),
    )

`data/claims.yaml` holds the statements; nothing a run does writes it. Only checks that need no clock and rows that were
measured settle a claim: a reported number never confirms itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import yaml

CLAIMS_FILE = Path(__file__).resolve().parent.parent / "data" / "claims.yaml"
VERDICTS = ("confirmed", "refined", "refuted", "not measurable here")
_REQUIRED = ("id", "statement", "source", "recipe", "rule")


@dataclass(frozen=True)
class Claim:
    """One statement of a source; `quotes` are its figures, as text that prose may repeat."""

    id: str
    statement: str
    source: str
    recipe: str
    rule: str
    quotes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """A settled claim. Its text is the line that `./cookbook claims` collects from a notebook."""

    id: str
    verdict: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.id:<4}{self.verdict:<21}{self.evidence}"


def load_claims(path: str | Path | None = None) -> dict[str, Claim]:
    """All claims by id, in the order of the file. Raises ValueError naming the entry that is not well formed."""
    return dict(_read(Path(path) if path else CLAIMS_FILE))


def settle(claim_id: str, verdict: str, evidence: str) -> Verdict:
    """The verdict on a claim, from evidence of this run: one line of text."""
    known = load_claims()
    if claim_id not in known:
        near = get_close_matches(str(claim_id).upper(), known, n=1, cutoff=0.0)
        raise ValueError(f"claim {claim_id!r} is unknown; nearest: {near[0]!r}")
    if verdict not in VERDICTS:
        near = get_close_matches(str(verdict), VERDICTS, n=1, cutoff=0.0)
        raise ValueError(f"verdict={verdict!r} of {claim_id}; expected one of {VERDICTS}; nearest: {near[0]!r}")
    if not isinstance(evidence, str) or not evidence.strip() or "\n" in evidence:
        raise ValueError(f"evidence of {claim_id} is {evidence!r}; expected one line of text")
    return Verdict(claim_id, verdict, evidence)


def from_rows(
    claim_id: str, rows: Iterable[Mapping], rule: Callable[[list[dict]], tuple[str, str]], needs: str
) -> Verdict:
    """The verdict that `rule(measured rows) -> (verdict, evidence)` gives.

    Reported rows never reach the rule. When none is left the claim is "not measurable here" and `needs` says which row
    is missing.
    """
    measured = [dict(row) for row in rows if row.get("provenance") == "measured"]
    if not measured:
        return settle(claim_id, "not measurable here", needs)
    found = rule(measured)
    if not (isinstance(found, tuple) and len(found) == 2):
        raise ValueError(f"the rule of {claim_id} returned {found!r}; expected (verdict, evidence)")
    return settle(claim_id, *found)


def per_place(rule: Callable[[list[dict]], tuple[str, str]], *fields: str) -> Callable[[list[dict]], tuple[str, str]]:
    """A rule for rows of several places: `rule` for the rows of each, told apart by `fields` (default: device_name).

    Rows of a place keep their order, so the newest is the last. Places without a verdict of their own say nothing.
    Places that disagree make a claim refined: it depends on them.
    """
    fields = fields or ("device_name",)

    def over_places(rows: list[dict]) -> tuple[str, str]:
        groups: dict[tuple, list[dict]] = {}
        for row in rows:
            groups.setdefault(tuple(row.get(field) for field in fields), []).append(row)
        found = {place: rule(group) for place, group in groups.items()}
        decided = {place: said for place, said in found.items() if said[0] != "not measurable here"}
        texts = list(dict.fromkeys(evidence for _, evidence in (decided or found).values()))
        verdicts = {verdict for verdict, _ in decided.values()}
        if len(verdicts) > 1:
            texts = [f"{_named(place, fields)} {verdict}: {evidence}" for place, (verdict, evidence) in decided.items()]
            return "refined", "not the same everywhere; " + "; ".join(texts)
        return (verdicts or {"not measurable here"}).pop(), "; ".join(texts)

    return over_places


def _named(place: tuple, fields: tuple[str, ...]) -> str:
    """The device, and what else tells a place apart: "AMD EPYC, threads 2"."""
    more = [f"{field.removeprefix('param.')} {value}" for field, value in zip(fields[1:], place[1:], strict=True)]
    return ", ".join([str(place[0]), *more])


def show(*verdicts: Verdict) -> None:
    """Print one line for each verdict: id, verdict, evidence."""
    seen = set()
    for verdict in verdicts:
        if verdict.id in seen:
            raise ValueError(f"claim {verdict.id!r} is settled twice; expected one verdict each")
        seen.add(verdict.id)
    for verdict in verdicts:
        print(verdict)


@cache
def _read(path: Path) -> tuple[tuple[str, Claim], ...]:
    if not path.is_file():
        raise ValueError(f"{path.name} is not beside the helpers; expected it in the folder data")
    claims: dict[str, Claim] = {}
    for number, entry in enumerate(yaml.safe_load(path.read_text(encoding="utf-8")) or [], start=1):
        name = f"{path.name}, entry {number}" + (
            f" ({entry['id']})" if isinstance(entry, dict) and "id" in entry else ""
        )
        if not isinstance(entry, dict):
            raise ValueError(f"{name} is {entry!r}; expected id, statement, source, recipe, rule")
        for field in _REQUIRED:
            if not isinstance(entry.get(field), str) or not entry[field].strip():
                raise ValueError(f"{name} has {field}={entry.get(field)!r}; expected text")
        unknown = [field for field in entry if field not in (*_REQUIRED, "quotes")]
        if unknown:
            near = get_close_matches(unknown[0], (*_REQUIRED, "quotes"), n=1, cutoff=0.0)
            raise ValueError(f"{name} has the field {unknown[0]!r}; nearest: {near[0]!r}")
        quotes = entry.get("quotes") or []
        if not isinstance(quotes, list) or not all(isinstance(quote, str) for quote in quotes):
            raise ValueError(f"{name} has quotes={quotes!r}; expected a list of texts (put numbers in quotation marks)")
        if entry["id"] in claims:
            raise ValueError(f"{name} is there twice; expected every id once")
        claims[entry["id"]] = Claim(**{field: entry[field] for field in _REQUIRED}, quotes=tuple(quotes))
    return tuple(claims.items())
