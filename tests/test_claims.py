from pathlib import Path

import pytest

from utils import claims
from utils.claims import Verdict, from_rows, load_claims, per_place, settle, show

IDS = (
    [f"P{i}" for i in range(1, 11)]
    + [f"C{i}" for i in range(1, 5)]
    + [f"S{i}" for i in range(1, 10)]
    + [f"L{i}" for i in range(1, 9)]
    + [f"B{i}" for i in range(1, 7)]
    + [f"G{i}" for i in range(1, 6)]
    + ["X1"]
    + [f"Q{i}" for i in range(1, 10)]
    + [f"K{i}" for i in range(1, 11)]
)
RECIPES = {"P": "01_bf16_fp16", "C": "02_torch_compile", "S": "03_sdpa", "L": "04_channels_last"}
RECIPES |= {"B": "05_cudnn_benchmark", "G": "06_cuda_graph", "X": "21_flux_kontext", "Q": "07_conv3d_to_linear"}
RECIPES |= {"K": "08_kv_cache", "Q5": "20_qwen3_vl_captioning", "Q6": "20_qwen3_vl_captioning"}
RECIPES |= {"Q7": "20_qwen3_vl_captioning", "K1": "03_sdpa"} | dict.fromkeys(("K8", "K9", "K10"), "11_reading_notes")
SOURCES = {"Q": "000_3cf81397441141ed.txt", "K": "003_d1bfa8a9c4385dfc.txt"}


def test_every_claim_of_the_sources_is_there():
    known = load_claims()
    assert list(known) == IDS
    for name, claim in known.items():
        assert claim.id == name
        assert claim.recipe == RECIPES.get(name, RECIPES[name[0]])
        assert claim.source == SOURCES.get(name[0], "004_99f43b31eac67a00.txt")
        assert claim.statement.endswith(".") and len(claim.rule) > 60
        assert any(word in claim.rule for word in ("onfirm", "refine", "refute", "settle")), name


def test_figures_of_the_sources_may_be_quoted():
    known = load_claims()
    assert {"31,605 ms", "0.04 ms"} <= set(known["Q2"].quotes)
    assert {"17.47 s", "2.52 s"} <= set(known["K4"].quotes) and "611.35 s" in known["K5"].quotes
    assert all(
        any(letter.isdigit() for letter in quote) or quote == "a few MB" for c in known.values() for quote in c.quotes
    )


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / f"claims{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(text)
        return path

    return write


GOOD = "- {id: A1, statement: s, source: f, recipe: r, rule: w}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + GOOD, r"entry 2 \(A1\) is there twice"),
        (GOOD.replace("rule: w", "rule: ''"), r"entry 1 \(A1\) has rule=''"),
        (GOOD.replace(", source: f", ""), "has source=None"),
        (GOOD.replace("rule: w", "rule: w, qoutes: []"), "has the field 'qoutes'; nearest: 'quotes'"),
        (GOOD.replace("rule: w", "rule: w, quotes: [1.5]"), r"has quotes=\[1.5\]"),
        ("- text\n", "entry 1 is 'text'"),
    ],
)
def test_a_malformed_file_names_its_entry(file, text, message):
    assert load_claims(file(GOOD))["A1"].quotes == ()
    with pytest.raises(ValueError, match=message):
        load_claims(file(text))
    with pytest.raises(ValueError, match="is not beside the helpers"):
        load_claims(Path("nowhere.yaml"))


def test_what_load_returns_may_be_changed_without_harm():
    load_claims().clear()
    assert list(load_claims()) == IDS


def test_settle_refuses_what_it_does_not_know():
    assert settle("Q1", "confirmed", "equal") == Verdict("Q1", "confirmed", "equal")
    with pytest.raises(ValueError, match="claim 'Q11' is unknown; nearest: 'Q1'"):
        settle("Q11", "confirmed", "x")
    with pytest.raises(ValueError, match=r"verdict='confirm' of Q1.*nearest: 'confirmed'"):
        settle("Q1", "confirm", "x")
    for evidence in ("", " ", "two\nlines", None):
        with pytest.raises(ValueError, match="evidence of Q1"):
            settle("Q1", "refuted", evidence)


def test_only_measured_rows_reach_the_rule():
    seen = []

    def rule(rows):
        seen.extend(rows)
        return "confirmed", f"{len(rows)} row"

    rows = [{"provenance": "reported", "x": 1}, {"provenance": "measured", "x": 2}, {"x": 3}]
    assert from_rows("Q2", rows, rule, needs="a row of an H200").evidence == "1 row"
    assert [row["x"] for row in seen] == [2]


def test_without_a_measured_row_nothing_is_settled():
    def rule(rows):
        raise AssertionError("must not be asked")

    found = from_rows("Q2", [{"provenance": "reported"}], rule, needs="a row of an H200")
    assert found == Verdict("Q2", "not measurable here", "a row of an H200")
    with pytest.raises(ValueError, match="claim 'Q99'"):
        from_rows("Q99", [], rule, needs="x")


@pytest.mark.parametrize("wrong", ["confirmed", ("confirmed",), None])
def test_a_rule_returns_verdict_and_evidence(wrong):
    with pytest.raises(ValueError, match=r"the rule of Q2 returned"):
        from_rows("Q2", [{"provenance": "measured"}], lambda rows: wrong, needs="x")


def test_show_prints_a_line_each_that_can_be_read_back(capsys):
    show(settle("Q1", "confirmed", "equal"), settle("K10", "not measurable here", "no GPU"))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["Q1  confirmed            equal", "K10 not measurable here  no GPU"]
    assert [(line[:4].strip(), line[4:25].strip(), line[25:]) for line in lines][1][2] == "no GPU"
    with pytest.raises(ValueError, match="claim 'Q1' is settled twice"):
        show(settle("Q1", "confirmed", "x"), settle("Q1", "refuted", "y"))
    assert capsys.readouterr().out == ""


def test_verdicts_are_wide_enough_for_their_column():
    assert max(len(verdict) for verdict in claims.VERDICTS) < 21 and max(map(len, IDS)) < 4


def test_places_are_judged_alone_and_disagreement_refines():
    def rule(rows):  # the sign of the newest row
        x = rows[-1]["x"]
        return ("confirmed" if x > 0 else "refuted" if x < 0 else "not measurable here"), f"x = {x}"

    def row(name, x, threads=1):
        return {"device_name": name, "threads": threads, "x": x}

    judge = per_place(rule)
    assert judge([row("a", 1)]) == ("confirmed", "x = 1")
    assert judge([row("a", -1), row("b", 3), row("a", 1)]) == ("confirmed", "x = 1; x = 3")
    assert judge([row("a", 1), row("b", 0)]) == ("confirmed", "x = 1"), "a place that says nothing is left out"
    assert judge([row("a", 0), row("b", 0)]) == ("not measurable here", "x = 0")
    verdict, text = judge([row("a", 1), row("b", -1)])
    assert verdict == "refined" and "a confirmed: x = 1; b refuted: x = -1" in text
    verdict, text = per_place(rule, "device_name", "threads")([row("a", 1), row("a", -1, 2)])
    assert verdict == "refined" and "a, threads 1 confirmed: x = 1; a, threads 2 refuted: x = -1" in text
