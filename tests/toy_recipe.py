"""A recipe without torch that is in order, for the tests of the notebook machinery."""

import json
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from utils.cookbook.notebooks import UNCOMPARED, code_cells, compared, prefix_hash

NAME = "42_toy"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

TITLE = """# Adding once

**Claim** Adding a list once is enough (Q2).

**Cost** At most 60 s on two cores.

**Needs** Python.

**Source** A toy.
"""
TRY = """### Try it

1. Predict the sum for `n = 4`.

<details><summary>Answer</summary>

6
</details>

2. Change the size:

```
papermill notebooks/42_toy.ipynb out.ipynb -p n 5
```

<details><summary>Answer</summary>

10
</details>

3. Repair this cell:

```python
total = sum(range(n)
```

<details><summary>Answer</summary>

A bracket is missing.
</details>
"""
# (tag or "md", source, what it shows)
CELLS = [
    ("md", TITLE, ""),
    ("md", "## Learn", ""),
    (
        "parameters",
        'n: int = 3  # how many numbers\ndevice: str = "auto"  # cpu, cuda or auto\n'
        'seed: int = 0  # seed of the inputs\nrows: str = ""  # file for result rows, none when empty',
        "",
    ),
    ("", "numbers = list(range(n))", ""),
    ("machine", 'print("cpu")', "cpu\n"),
    ("figure", "show(numbers)", "png"),
    ("baseline", "slow = sum(numbers) + sum(numbers) - sum(numbers)", ""),
    ("technique", "fast = sum(numbers)", ""),
    ("check", "assert fast == slow\nprint('same', fast)", "same 3\n"),
    (
        "control",
        "wrong = sum(numbers[1:]) + 1\nassert not wrong == slow\nassert fast == slow\nprint('edited: fails')",
        "edited: fails\n",
    ),
    ("cost", "print('additions', n)", "additions 3\n"),
    ("measure", "print('fast')", "fast\n"),
    ("limits", "print('nothing to gain for n = 1')", "nothing to gain for n = 1\n"),
    ("md", TRY, ""),
    ("md", "## Evidence", ""),
    ("recorded", "print('none')", "none\n"),
    ("claims", "print('Q2')", "Q2\n"),
    ("md", "## Next\n\nRead [this](42_toy.ipynb).", ""),
]


def recipe(cells=CELLS, hashes=True):
    """A notebook from (tag, source, text shown) triples, with stored outputs and counts."""
    nb = new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})
    number = 0
    for place, (name, source, shown) in enumerate(cells):
        if name == "md":
            nb.cells.append(new_markdown_cell(source, id=f"cell-{place}"))
            continue
        number += 1
        tags = [name] if name else []
        if name in ("machine", "measure"):
            tags.append(UNCOMPARED)
        outputs = []
        if shown == "png":
            outputs = [new_output("display_data", data={"text/plain": "figure: toy", "image/png": PIXEL})]
        elif shown:
            outputs = [new_output("stream", name="stdout", text=shown)]
        metadata = {"tags": tags} if tags else {}
        nb.cells.append(
            new_code_cell(source, id=f"cell-{place}", metadata=metadata, execution_count=number, outputs=outputs)
        )
    if hashes:
        add_hashes(nb)
    return nb


def add_hashes(nb):
    for number, cell in enumerate(code_cells(nb), start=1):
        if not compared(cell):
            cell.metadata["cookbook"] = {"hash": prefix_hash(nb, number)}


def save(nb, folder: Path, name: str = NAME) -> Path:
    path = Path(folder) / f"{name}.ipynb"
    path.write_text(nbformat.writes(nb) + "\n")
    return path


def code_notebook(folder: Path, name: str, *cells: str | tuple) -> Path:
    """A plain notebook: sources, or (source, printed text stored), or (source, printed text stored, tags)."""
    nb = new_notebook()
    for number, cell in enumerate(cells, start=1):
        source, text, tags = (*((cell,) if isinstance(cell, str) else cell), "", [])[:3]
        outputs = [new_output("stream", name="stdout", text=text)] if text else []
        metadata = {"tags": tags} if tags else {}
        nb.cells.append(
            new_code_cell(source, id=f"cell-{number}", metadata=metadata, execution_count=number, outputs=outputs)
        )
    return save(nb, folder, name)


def edit(path: Path, change) -> None:
    """Change a notebook's JSON in place."""
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw, indent=1) + "\n")
