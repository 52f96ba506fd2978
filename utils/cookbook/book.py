"""The book: a static site of the recipes with their stored outputs, made by Sphinx without a network.

The pages come from what the repository has: README.md, the notebooks, data/results, data/claims.yaml, GLOSSARY.md. The
source tree has the shape of the repository, so links between pages hold; a link to a file that is no page becomes its
name.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .notebooks import ROOT
from .parameters import declared
from .presets import load_preset
from .readme import claims_text, results_markdown
from .verdicts import VERDICTS, all_claims

ASSETS = ROOT / "data" / "book"
MARK = "book.json"  # in a folder that this command wrote, and may write again
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
PAGES = {"GLOSSARY.md": "Glossary", "README.ko.md": "한국어"}  # pages of the repository that are pages of the book


class BookError(Exception):
    """Sphinx found something wrong; the text names page and reason."""


def build(out: Path, notebooks: Iterable[Path], root: Path = ROOT) -> int:
    """Write the book to `out` (checked by `check_out`). Returns the number of pages.

    Raises BookError with Sphinx's warnings; `out` is then as it was.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "source"), Path(folder, "html")
        write_source(source, list(notebooks), root)
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
        done = subprocess.run(
            [*command, "-d", f"{folder}/doctrees", str(source), str(made)], capture_output=True, text=True, cwd=root
        )
        if done.returncode:
            raise BookError((done.stderr or done.stdout).replace(f"{source}/", "").strip())
        for template in (made / "_static").glob("*.html"):  # the themes leave sources of theirs there
            template.unlink()
        pages = len(list(made.rglob("*.html")))
        (made / MARK).write_text(json.dumps({"written_by": "cookbook book", "pages": pages}), encoding="utf-8")
        _replace(made, out)
    return pages


def check_out(out: Path) -> None:
    """Raises ValueError, one line, when `out` holds something that is not a book, or cannot be written."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: not a folder; give a new folder or one of an earlier book")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file():
        raise ValueError(f"--out {out}: holds something else than a book; give a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"--out {out}: cannot write there ({error.strerror}); give another folder") from None


def _replace(made: Path, out: Path) -> None:
    """Put the new book beside the old one, then swap: a reader never sees half of one."""
    new = out.with_name(f".{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(made, new)
    shutil.rmtree(out)
    new.rename(out)


# ---------------------------------------------------------------------------------------------------- the pages


def write_source(source: Path, notebooks: list[Path], root: Path) -> None:
    """The source tree of the book: conf.py, pages, notebooks."""
    (source / "notebooks").mkdir(parents=True)
    (source / "_static").mkdir()
    shutil.copy(ASSETS / "conf.py", source)
    shutil.copy(ASSETS / "book.css", source / "_static")
    readme = sections((root / "README.md").read_text(encoding="utf-8"))
    pages = {f"notebooks/{path.name}" for path in notebooks} | {page for page in PAGES if (root / page).exists()}
    texts = {
        "index.md": index(readme, notebooks, pages),
        "guide.md": guide(readme),
        "claims.md": claims_page(notebooks),
        **{page: (root / page).read_text(encoding="utf-8") for page in PAGES if page in pages},
    }
    for name, text in texts.items():
        (source / name).write_text(local_links(text, "", pages | set(texts)), encoding="utf-8")
    for path in notebooks:
        nb = recipe_page(path, pages | set(texts))
        (source / "notebooks" / path.name).write_text(json.dumps(nb), encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """The parts of a Markdown page by their second-level heading; the part before the first one is "". No fences."""
    found, heading, fenced = {"": ""}, "", False
    for line in text.splitlines(keepends=True):
        fenced ^= line.startswith("```")
        if line.startswith("## ") and not fenced:
            heading = line[3:].strip()
            found[heading] = ""
        else:
            found[heading] += line
    return found


def local_links(text: str, folder: str, pages: set[str]) -> str:
    """Links to pages stay; a link to any other file of the repository becomes its text."""

    def mend(found: re.Match) -> str:
        target = (Path(folder) / found[2]).as_posix()
        target = re.sub(r"(^|/)[^/.][^/]*/\.\./", r"\1", target)
        if target in pages:
            return found[0]
        if target == "README.md":
            return f"[{found[1]}]({'../' if folder else ''}index.md)"
        return found[1] if "`" in found[1] else f"`{found[1]}`"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)  # code stays as it is
    return "".join(part if part.startswith("```") else LINK.sub(mend, part) for part in parts)


def index(readme: dict[str, str], notebooks: list[Path], pages: set[str]) -> str:
    """The landing page: what it is, the reading path, the results, the claims in numbers."""
    toctree = ["```{toctree}", ":hidden:", ":caption: Recipes", "", *(f"notebooks/{path.stem}" for path in notebooks)]
    more = ["```{toctree}", ":hidden:", ":caption: More", "", "claims", "guide"]
    more += [f"{name} <{page.removesuffix('.md')}>" for page, name in PAGES.items() if page in pages]
    results = results_markdown(notebooks)
    return "\n".join(
        [
            readme[""].rstrip(),
            "",
            "## Reading path",
            readme["Reading path"].rstrip(),
            "",
            "## Results",
            "",
            "From the rows that are committed, and from the verdicts stored in the recipes. How to read them: "
            "[using the cookbook](guide.md).",
            "",
            results,
            "",
            "## Claims",
            "",
            claims_overview(notebooks),
            "",
            *toctree,
            "```",
            "",
            *more,
            "```",
            "",
        ]
    )


def guide(readme: dict[str, str]) -> str:
    """Everything else that the README says."""
    left = {name: text for name, text in readme.items() if name not in ("", "Reading path", "Results", "More")}
    return "# Using the cookbook\n\n" + "\n".join(f"## {name}\n{text}" for name, text in left.items())


def claims_overview(notebooks: list[Path]) -> str:
    """How many claims have which verdict, and which."""
    found = all_claims(notebooks)
    lines = [
        f"The recipes settle {len(found)} claims of other people, each by a rule written down before the result was "
        "seen: [all claims](claims.md).",
        "",
        "| verdict | claims | which |",
        "|---|---|---|",
    ]
    for verdict in VERDICTS:
        ids = [claim.id for claim, settled in found if any(one.verdict == verdict for one in settled)]
        lines.append(f"| {verdict} | {len(ids)} | {' '.join(ids) or '—'} |")
    if left := [claim.id for claim, settled in found if not settled]:
        lines.append(f"| not settled yet | {len(left)} | {' '.join(left)} |")
    return "\n".join(lines)


def claims_page(notebooks: list[Path]) -> str:
    """Every claim with its verdict and its evidence, a table for each recipe."""
    titles = {path.stem: title(path) for path in notebooks}
    parts = [
        "# Claims",
        "",
        "What the sources say, and what became of it. Nothing that somebody reported confirms itself.",
        "",
    ]
    by_recipe: dict[str, list] = {}
    for claim, settled in all_claims(notebooks):
        by_recipe.setdefault(claim.recipe, []).append((claim, settled))
    for recipe, found in sorted(by_recipe.items()):
        page = f" ([open the recipe](notebooks/{recipe}.ipynb))" if recipe in titles else ""
        parts += [f"## {titles.get(recipe, recipe)}", "", claims_text_of(recipe, notebooks) + page, ""]
        parts += [":::{table}", ":class: wide", "", "| claim | verdict | statement and evidence |", "|---|---|---|"]
        for claim, settled in found:
            for verdict, evidence in [(one.verdict, one.evidence) for one in settled] or [("not settled yet", "")]:
                said = _cell(claim.statement) + (f"<br>→ {_cell(evidence)}" if evidence else "")
                parts.append(f"| {claim.id} | {verdict} | {said} |")
        parts += [":::", ""]
    return "\n".join(parts)


def claims_text_of(recipe: str, notebooks: list[Path]) -> str:
    return next((claims_text(path) for path in notebooks if path.stem == recipe), "") or "Not settled yet."


def _cell(text: str) -> str:
    """Text of a claim inside a Markdown table: nothing in it is markup."""
    return re.sub(r"([\\`*_\[\]|$])", r"\\\1", html.escape(text, quote=False))


def title(path: Path) -> str:
    """The first heading of a notebook."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for line in "".join(cell["source"]).splitlines() if cell["cell_type"] == "markdown" else ():
            if line.startswith("# "):
                return line[2:].strip()
    return path.stem


# ---------------------------------------------------------------------------------------------------- a recipe


def recipe_page(path: Path, pages: set[str]) -> dict:
    """The notebook as a page: links mended, and after its parameters cell a table of them with a command."""
    nb = json.loads(path.read_text(encoding="utf-8"))
    cells = []
    for cell in nb["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = local_links("".join(cell["source"]), "notebooks", pages)
        cells.append(cell)
        if "parameters" in cell.get("metadata", {}).get("tags", []):
            cells.append(
                {"cell_type": "markdown", "id": "parameters-table", "metadata": {}, "source": parameters(path)}
            )
    nb["cells"] = cells
    return nb


def parameters(path: Path) -> str:
    """The parameters of a recipe as a table, and a papermill command with all of them to copy and change."""
    known = {name: one for name, one in declared(path).items() if name != "rows"}
    lines = ["Its parameters:", "", "| parameter | type | default | |", "|---|---|---|---|"]
    for name, one in known.items():
        lines.append(f"| `{name}` | {_cell(one.type)} | `{one.default!r}` | {_cell(one.help)} |")
    given = _preset(path).get(path.stem, {})
    values = {name: given.get(name, one.default) for name, one in known.items()}
    arguments = [_argument(name, value) for name, value in values.items()]
    command = " \\\n    ".join([f"papermill notebooks/{path.name} out.ipynb", *arguments])
    what = "with the values for a laptop" if given else "with its defaults"
    return "\n".join([*lines, "", f"A command {what}, to copy and change:", "", "```bash", command, "```"])


def _preset(path: Path) -> dict:
    from .notebooks import resolve

    try:
        return load_preset("cpu", resolve)
    except ValueError:  # a team's own recipes
        return {}


def _argument(name: str, value: object) -> str:
    """`-p` is enough for numbers and words; lists and truth values keep their type only as YAML (`-y`)."""
    if isinstance(value, (bool, list, tuple, dict)):
        return f"-y '{name}: {json.dumps(value)}'"
    return f"-p {name} {value}" if re.fullmatch(r"[\w.+-]+", str(value)) else f"-p {name} '{value}'"
