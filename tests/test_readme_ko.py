"""README.ko.md says what README.md says: the same sections, commands, code and recipes."""

import re

import pytest

from utils.cookbook.notebooks import ROOT
from utils.cookbook.start import COMMANDS

ENGLISH, KOREAN = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))
HINT = "README.md has changed: bring README.ko.md up to date"


def headings(text: str) -> list[int]:
    return [len(line.split()[0]) for line in without_code(text).splitlines() if line.startswith("#")]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def code(text: str) -> list[list[str]]:
    """The blocks of code without their comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [[re.sub(r"\s*# .*", "", line).rstrip() for line in block.splitlines()] for block in blocks]


def links(text: str) -> set[str]:
    table = re.search(r"<!-- results.*<!-- /results -->", text, re.DOTALL)
    text = text.replace(table.group(), "") if table else text
    return {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)} - {
        "README.md",
        "README.ko.md",
        "GLOSSARY.md",
    }


def test_both_have_the_same_sections():
    assert headings(ENGLISH) == headings(KOREAN), HINT


def test_both_have_the_same_code_and_commands():
    assert code(ENGLISH) == code(KOREAN), HINT
    for text in (ENGLISH, KOREAN):
        assert set(re.findall(r"\./cookbook ([a-z]+)", text)) <= set(COMMANDS)
    assert sorted(set(re.findall(r"\./cookbook [a-z]+", ENGLISH))) == sorted(
        set(re.findall(r"\./cookbook [a-z]+", KOREAN))
    )


def test_both_lead_to_the_same_places():
    assert links(ENGLISH) == links(KOREAN), HINT
    assert "(README.ko.md)" in ENGLISH and "(README.md)" in KOREAN
    assert all((ROOT / link).exists() for link in links(KOREAN) if not link.startswith("http"))


@pytest.mark.parametrize(
    "word", ["속도 향상", "신뢰 구간", "동등성", "합성곱", "어텐션", "메모리 형식", "커널 실행 요청"]
)
def test_the_words_are_those_of_the_glossary(word):
    assert f"| {word} |" in (ROOT / "GLOSSARY.md").read_text(encoding="utf-8") and word in KOREAN
