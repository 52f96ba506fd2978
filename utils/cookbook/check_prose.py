"""What the text of a recipe must have, and may not: headings, exercises, links that lead on, no clock numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

OPENING = ("Claim", "Cost", "Needs", "Source")
HEADINGS = ("Learn", "Evidence", "Next")  # in this order; *Try it* closes either half

_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_RANGE = rf"(?<![\w.,])(?P<first>{_NUMBER})(?:\s?(?:[-–—/]|to|or|and)\s?(?P<second>{_NUMBER}))?"
_DURATION = r"(?:milli|micro|nano)?seconds?|secs?|[mµμnu]?s|minutes?|mins?|hours?"
_RATE = (
    r"[kKMGTP]?i?B(?:ytes)?/s|[kKMGTP]?FLOPS?/s|[kKMGTP]FLOPS|fps"
    r"|(?:[\w-]+\s){0,2}?per\s(?:second|minute|hour|ms)\b|[A-Za-z]+/(?:s|sec|second|min|minute)"
)
_CLOCK = re.compile(rf"{_RANGE}(?P<gap>[\s\u00a0\u202f]?)(?P<unit>{_DURATION}|{_RATE})(?![\w/])")
_OTHER = r"(?!\s(?:fewer|more|less|smaller|larger|bigger|wider|as (?:many|much|large)|the\s))"  # counts, not times
_FACTOR = re.compile(
    rf"{_RANGE}(?P<gap>\s?)(?P<unit>(?:[x×](?!\s?\d)|times)(?!\w){_OTHER}|(?:%|percent)(?=\s(?:faster|slower|quicker)))"
)
_SPEED = re.compile(r"\b(fast|slow|quick|speed|latenc|throughput|wall.?clock|runtime|run time|in time)", re.IGNORECASE)
_SENTENCE = re.compile(
    r"(?<=[.!?])[\"')\]]*\s+(?=[^a-z])|\n\s*\n|\n(?=\s*(?:[-*|>]|\d+\.)\s|(?:Claim|Cost|Needs|Source)\b)"
)


def prose(markdown: str) -> str:
    """The text of a Markdown cell without code, formulas, comments, tags and the targets of links."""
    text = re.sub(r"^( *)(```|~~~).*?^ *\2", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|\$\$.*?\$\$", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`|\$[^$\n]+\$|</?[a-zA-Z][^>\n]*>|\]\([^)\s]*\)", " ", text)
    text = re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text)
    return re.sub(r"^(\W*Cost)[.:]", r"\1", text, flags=re.MULTILINE)


def headings(markdown: str) -> list[tuple[int, str]]:
    """(level, text) of each heading, code blocks left out."""
    text = re.sub(r"^( *)(```|~~~).*?^ *\2", "", markdown, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^(#{1,6}) +(.+?)\s*#*\s*$", text, re.MULTILINE)
    return [(len(marks), re.sub(r"[*_`]", "", title)) for marks, title in found]


def clock_numbers(markdown: str, claims: Mapping[str, object]) -> list[str]:
    """Times, rates and speed-ups in the text that no claim of the same sentence quotes."""
    problems = []
    for sentence in _SENTENCE.split(prose(markdown)):
        if "data sheet" in sentence or "datasheet" in sentence:  # a maker's figure is not a measurement
            continue
        cited = [claims[name] for name in re.findall(r"\b[A-Z]\d{1,2}\b", sentence) if name in claims]
        known = {_plain(number) for claim in cited for number in quoted(claim)}
        for match in clock_matches(sentence):
            numbers = [number for number in (match["first"], match["second"]) if number]
            if match.re is _CLOCK and _is_limit(sentence, match):
                continue
            if not cited:
                advice = "a number of ours is computed in a cell; a quotation names its claim, as (Q2), in its sentence"
                problems.append(f'clock number "{match[0].strip()}" in the text: {advice}')
            for number in numbers:
                if cited and _plain(number) not in known:
                    ids = ", ".join(claim.id for claim in cited)
                    problems.append(f'"{match[0].strip()}" is not a figure of {ids} in data/claims.yaml (quotes)')
    return problems


def clock_matches(sentence: str) -> list[re.Match]:
    found = [match for match in _CLOCK.finditer(sentence) if not _bits(match)]
    if _SPEED.search(sentence):
        found += list(_FACTOR.finditer(sentence))
    return found


def _bits(match: re.Match) -> bool:
    """True for "0s" and "1s", which are bits."""
    return match["unit"] == "s" and not match["gap"] and len(match["first"]) == 1


def _is_limit(sentence: str, match: re.Match) -> bool:
    """True for "at most 60 s" in the Cost line: a promise, not a measurement."""
    before = sentence[: match.start()].rstrip()
    return bool(re.match(r"\W*Cost\b", sentence)) and bool(
        re.search(r"(at most|under|below|less than)$", before, re.IGNORECASE)
    )


def quoted(claim: object) -> list[str]:
    """The numbers that prose may repeat of a claim: those of its statement and of `quotes`."""
    return re.findall(_NUMBER, " ".join([claim.statement, *(str(quote) for quote in claim.quotes)]))


def _plain(number: str) -> str:
    return f"{float(number.replace(',', '')):g}"


def opening_problems(markdown: str) -> list[str]:
    """The title cell: `# Title`, then one line each of Claim, Cost, Needs and Source."""
    if not re.match(r"# \S", markdown):
        return ["the first cell must start with `# Title`"]
    found = re.findall(rf"^(?:[-*] )?\*\*({'|'.join(OPENING)})[.:]?\*\*[.:]? *\S", markdown, re.MULTILINE)
    missing = [name for name in OPENING if name not in found]
    if missing:
        return [f"the first cell lacks a line `**{name}** …`" for name in missing]
    return (
        [] if tuple(found) == OPENING else [f"the first cell needs the lines {', '.join(OPENING)} once, in this order"]
    )


def heading_problems(cells: list[str]) -> list[str]:
    """One `#`, no level left out, and the halves of the anatomy."""
    found = [heading for cell in cells for heading in headings(cell)]
    problems = []
    if sum(level == 1 for level, _ in found) != 1:
        problems.append(f"{sum(level == 1 for level, _ in found)} headings of level 1; expected the title only")
    for (before, _), (level, text) in pairwise(found):
        if level > before + 1:
            problems.append(f'heading "{text}" jumps from level {before} to {level}')
    places = [next((i for i, (_, text) in enumerate(found) if text.startswith(name)), -1) for name in HEADINGS]
    problems += [f'no heading starts with "{name}"' for name, at in zip(HEADINGS, places, strict=True) if at < 0]
    if not problems and places != sorted(places):
        problems.append(f"headings {', '.join(HEADINGS)} are out of order")
    if found and places[-1] >= 0 and places[-1] != len(found) - 1:
        problems.append('"Next" must be the last heading')
    return problems


def exercise_problems(cells: list[str], recipe: str, parameters: list[str]) -> list[str]:
    """*Try it*: three exercises with folded answers; one of them a papermill command, one a cell to repair."""
    text = "\n\n".join(cells)
    start = re.search(r"^#+ +Try it.*$", text, re.MULTILINE)
    if not start:
        return ['no heading starts with "Try it"']
    level = len(start[0]) - len(start[0].lstrip("#"))
    end = re.search(rf"^#{{1,{level}}} ", text[start.end() :], re.MULTILINE)
    section = text[start.end() :][: end.start() if end else None]
    problems = []
    folded = len(re.findall(r"<details>\s*<summary>.*?</summary>.*?</details>", section, re.DOTALL))
    if folded != 3 or section.count("<details") != 3:
        problems.append(f"*Try it* has {folded} folded answers (<details><summary>…); expected three exercises")
    if not re.search(rf"papermill \S*{recipe}\.ipynb", section):
        problems.append(f"*Try it* lacks the command `papermill notebooks/{recipe}.ipynb out.ipynb -p NAME VALUE`")
    for name in re.findall(r"\s-[pr] (\w+)", section):
        if name not in parameters:
            problems.append(f"*Try it* sets `-p {name}`, which the notebook does not declare")
    if not re.search(r"^ *```python", section, re.MULTILINE):
        problems.append("*Try it* lacks a broken cell to repair (a ```python block)")
    return problems


def link_problems(cell: Mapping, folder: Path) -> list[str]:
    """Relative links and pictures of a Markdown cell that lead nowhere."""
    text = re.sub(r"^( *)(```|~~~).*?^ *\2|`[^`\n]*`", "", cell["source"], flags=re.MULTILINE | re.DOTALL)
    problems = []
    for target in re.findall(r"\]\(<?([^)\s>]+)>?[^)]*\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text):
        if target.startswith("attachment:"):
            found = target.removeprefix("attachment:") in cell.get("attachments", {})
        elif re.match(r"[a-z][a-z0-9+.-]*:|#|//", target):
            found = True
        else:
            found = not target.startswith("/") and (folder / unquote(target.partition("#")[0])).exists()
        if not found:
            problems.append(f"link to {target}: there is no such file beside the notebook")
    return problems
