"""`./cookbook book`: the pages, and how they behave in a real browser without a window."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from toy_recipes import toy

from utils.cookbook import cli
from utils.cookbook.notebooks import ROOT, find_recipes

needs_extra = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("sphinx", "myst_nb", "sphinx_book_theme", "latex2mathml"))),
    reason="needs the extra: pip install -e '.[book]'",
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
PHONE = (390, 844)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The book of this repository."""
    out = tmp_path_factory.mktemp("book") / "html"
    assert cli.main(["book", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


def pages(site: Path) -> list[Path]:
    found = sorted(site.rglob("*.html"))
    assert len(found) >= len(find_recipes()) + 4  # landing, claims, guide, search
    return found


# ---------------------------------------------------------------------------------------------------- in a browser


@needs_extra
@needs_browser
def test_every_page_loads_fits_a_phone_and_asks_nobody(site, browser):
    browser.size(*PHONE)
    faults = []
    for page in pages(site):
        browser.open(page.as_uri())
        name = page.relative_to(site).as_posix()
        faults += [f"{name}: {text}" for text in browser.complaints()]
        faults += [f"{name} asks {url}" for url in browser.requested() if not url.startswith(("file:", "data:"))]
        if (width := browser.run("document.scrollingElement.scrollWidth")) > PHONE[0]:
            faults.append(f"{name} is {width} wide")
        if empty := browser.run("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"):
            faults.append(f"{name}: no picture at {empty}")
    assert not faults


@needs_extra
@needs_browser
def test_what_is_cut_off_at_the_edge_of_a_phone_shows_it(site, browser):
    browser.size(*PHONE)
    seen = set()
    for page in ("index", "claims", "guide", "notebooks/07_conv3d_to_linear", "notebooks/10_weight_only_int8"):
        browser.open((site / f"{page}.html").as_uri())
        seen |= set(
            browser.run(
                """[...document.querySelectorAll(".bd-article *")]
                .filter(box => ["auto", "scroll"].includes(getComputedStyle(box).overflowX))
                .filter(box => box.scrollWidth > box.clientWidth + 1)
                .map(box => box.tagName + " " + getComputedStyle(box).backgroundAttachment)"""
            )
        )
    assert {kind.split()[0] for kind in seen} >= {"PRE", "DIV"}  # code, and tables
    assert {kind.partition(" ")[2] for kind in seen} == {"local, local, scroll, scroll, scroll"}, seen  # the shadows
    cells = "[...document.querySelectorAll('.pst-scrollable-table-container :is(td, th)')]"
    browser.open((site / "index.html").as_uri())
    assert browser.run(f"{cells}.every(cell => getComputedStyle(cell).backgroundColor == 'rgba(0, 0, 0, 0)')")


@needs_extra
@needs_browser
def test_recipes_show_their_figures_and_formulas(site, browser):
    for path in find_recipes():
        stored = sum(
            "image/png" in output.get("data", {})
            for cell in json.loads(path.read_text())["cells"]
            for output in cell.get("outputs", [])
        )
        browser.open((site / "notebooks" / f"{path.stem}.html").as_uri())
        assert browser.run("document.querySelectorAll('.cell_output img').length") == stored, path.stem
    browser.open((site / "notebooks" / "10_weight_only_int8.html").as_uri())
    assert browser.run("document.querySelector('div.math math').getBoundingClientRect().height") > 20
    assert browser.run("document.querySelectorAll('math msub').length") > 3


@needs_extra
@needs_browser
def test_search_finds_a_word_of_a_recipe(site, browser):
    browser.open((site / "search.html").as_uri() + "?q=blockwise")
    found = """new Promise((resolve, reject) => {
        const look = () => {
            const links = [...document.querySelectorAll("#search-results li a")].map(a => a.href);
            links.length ? resolve(links) : requestAnimationFrame(look);
        };
        setTimeout(() => reject("nothing was found"), 30000);
        look();
    })"""
    assert any("notebooks/03_sdpa.html" in link for link in browser.run(found))
    assert browser.complaints() == []


@needs_extra
@needs_browser
def test_light_and_dark_are_different_and_readable(site, browser):
    browser.open((site / "index.html").as_uri())
    colours = {}
    for mode in ("light", "dark"):
        browser.run(f"document.documentElement.dataset.theme = {mode!r}")
        text, ground = (
            browser.run(f"getComputedStyle(document.{what}).{style}")
            for what, style in (("querySelector('.bd-article p')", "color"), ("body", "backgroundColor"))
        )
        colours[mode] = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in (text, ground)]
    assert colours["light"][1] - colours["light"][0] > 120 and colours["dark"][0] - colours["dark"][1] > 120, colours


@needs_extra
@needs_browser
def test_the_papermill_command_can_be_copied(site, browser):
    browser.open((site / "notebooks" / "07_conv3d_to_linear.html").as_uri())
    copied = browser.run(
        """(() => {
        const block = [...document.querySelectorAll("div.highlight")].find(b => b.innerText.startsWith("papermill"));
        return [block.querySelectorAll("button.copybtn").length, block.querySelector("pre").innerText];
    })()"""
    )
    assert copied[0] == 1
    assert copied[1].startswith("papermill notebooks/07_conv3d_to_linear.ipynb out.ipynb") and "-p seed 0" in copied[1]


# ---------------------------------------------------------------------------------------------------- the pages


@needs_extra
def test_the_landing_page_has_reading_path_results_and_claims(site):
    text = (site / "index.html").read_text()
    for path in find_recipes():
        assert text.count(f'href="notebooks/{path.stem}.html"') >= 2, path.stem  # in the reading path and the results
    assert re.findall(r"<section [^>]*>\n<h2>([^<]+)<", text) == ["Reading path", "Results", "Claims"]
    assert "not measurable here" in text and 'href="claims.html"' in text


@needs_extra
def test_every_claim_is_on_the_page_of_claims(site):
    from utils.claims import load_claims

    text = (site / "claims.html").read_text()
    for name in load_claims():
        assert f"<p>{name}</p>" in text or f"<td>{name}</td>" in text, name


@needs_extra
def test_no_page_loads_anything_from_elsewhere(site):
    for page in pages(site):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*", text)
        loaded += re.findall(r"<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^>]*", text)
        assert not loaded, page.name
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style.name


@needs_extra
def test_a_warning_is_an_error_and_the_old_book_stays(site, tmp_path, monkeypatch, capsys):
    toy(tmp_path / "nb", "01_toy")
    monkeypatch.setenv("COOKBOOK_NOTEBOOKS", str(tmp_path / "nb"))
    notebook = json.loads((tmp_path / "nb" / "01_toy.ipynb").read_text())
    notebook["cells"].insert(
        0, {"cell_type": "markdown", "id": "m", "metadata": {}, "source": "# Toy\n\n$\\nonsense x$"}
    )
    (tmp_path / "nb" / "01_toy.ipynb").write_text(json.dumps(notebook))
    monkeypatch.setattr("utils.cookbook.book.claims_page", lambda notebooks: "# Claims\n")
    monkeypatch.setattr(
        "utils.cookbook.book.index",
        lambda *args: "# Top\n\n```{toctree}\nnotebooks/01_toy\nclaims\nguide\nGLOSSARY\nREADME.ko\n```\n",
    )
    out = tmp_path / "book"
    out.mkdir()
    (out / "book.json").write_text("{}")
    assert cli.main(["book", "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert "the book was not written" in said and "\\nonsense is not known to latex2mathml" in said
    assert [path.name for path in out.iterdir()] == ["book.json"]


def test_other_folders_are_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("utils.cookbook.versions.lacking", lambda wanted: {})
    (tmp_path / "thesis.txt").write_text("mine")
    assert cli.main(["book", "--out", str(tmp_path)]) == 2
    assert "holds something else than a book" in capsys.readouterr().err
    assert cli.main(["book", "--out", str(tmp_path / "thesis.txt")]) == 2
    assert "not a folder" in capsys.readouterr().err and (tmp_path / "thesis.txt").read_text() == "mine"


def test_without_the_extra_it_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("utils.cookbook.versions.installed", lambda name: None if name == "myst-nb" else "9.0")
    assert cli.main(["book", "--out", str(tmp_path / "b")]) == 2
    said = capsys.readouterr().err
    assert "myst-nb" in said and "-m pip install -e '.[book]'" in said and said.count("\n") == 1
    assert not (tmp_path / "b").exists()


def test_links_to_what_is_no_page_become_names():
    from utils.cookbook.book import local_links

    pages = {"GLOSSARY.md", "notebooks/08_kv_cache.ipynb"}
    text = (
        "[g](../GLOSSARY.md) [next](08_kv_cache.ipynb) [`x`](../utils/x.py) [data/results](../data/results) "
        "[web](https://a.b) [there](#part) [readme](../README.md)\n```\n[code](../utils/y.py)\n```\n"
    )
    assert local_links(text, "notebooks", pages) == (
        "[g](../GLOSSARY.md) [next](08_kv_cache.ipynb) `x` `data/results` "
        "[web](https://a.b) [there](#part) [readme](../index.md)\n```\n[code](../utils/y.py)\n```\n"
    )


def test_parameters_of_every_recipe_are_a_command_that_keeps_their_types():
    import shlex

    import yaml

    from utils.cookbook.book import parameters
    from utils.cookbook.parameters import declared, validate

    for path in find_recipes():
        text = parameters(path)
        words = shlex.split(text.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " "))
        assert words[:3] == ["papermill", f"notebooks/{path.name}", "out.ipynb"] and (ROOT / words[1]).exists()
        given, rest = {}, words[3:]
        while rest:
            if (option := rest.pop(0)) == "-y":
                given |= yaml.safe_load(rest.pop(0))
            else:
                assert option == "-p"
                name = rest.pop(0)
                given[name] = rest.pop(0)
        assert set(given) == set(declared(path)) - {"rows"}
        validate(path, given)
        for name, one in declared(path).items():
            if isinstance(one.default, (bool, list)):  # papermill makes text of a list after -p
                assert isinstance(given[name], type(one.default)), name
        for name in given:
            assert f"| `{name}` |" in text
