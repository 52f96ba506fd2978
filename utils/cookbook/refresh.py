"""Make the stored outputs of a notebook: a fresh kernel, its defaults, the CPU, and only what nbval will compare."""

import base64
import copy
import io
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from .kernels import environment, manager, scratch_folder
from .notebooks import code_cells, compared, label, load, plain, prefix_hash, shown_path, tags

CELL_TIMEOUT = 600  # seconds
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


class RefreshError(ValueError):
    """A cell failed, or showed what cannot be stored. The notebook is as it was."""


@dataclass
class Refreshed:
    """What a refresh did to one notebook."""

    path: Path
    changed: bool
    kept: list[str] = field(default_factory=list)  # uncompared cells whose stored output stayed
    renewed: list[str] = field(default_factory=list)  # uncompared cells with a new output

    def __str__(self) -> str:
        text = f"{shown_path(self.path)}: {'rewritten' if self.changed else 'unchanged'}"
        if self.renewed:
            text += f"; new output of {', '.join(self.renewed)}"
        return text


def refresh(path: str | Path, measure: bool = False) -> Refreshed:
    """Run a notebook and store its outputs; a second time changes no byte.

    The stored output of an uncompared cell stays, unless `measure` or a code cell up to it changed.
    Raises RefreshError, with notebook, cell and reason, when a cell fails or shows what is not to be stored;
    ValueError when the file is no notebook. The file is then untouched; it is written at once or not at all.
    """
    path = Path(path).resolve()
    before = path.read_text(encoding="utf-8")
    stored = load(path)
    nb = execute(stored, path)
    done = Refreshed(path, changed=False)
    for number, (old, new) in enumerate(zip(code_cells(stored), code_cells(nb), strict=True), start=1):
        digest = prefix_hash(nb, number)
        keep = (
            not compared(new) and not measure and old.outputs and old.metadata.get("cookbook", {}).get("hash") == digest
        )
        new.outputs = (
            copy.deepcopy(old.outputs)
            if keep
            else normalised(new.outputs, old.outputs, f"{shown_path(path)}, {label(nb, number)}")
        )
        new.execution_count = number
        for output in new.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
        if not compared(new):
            new.metadata.cookbook = {"hash": digest}
            (done.kept if keep else done.renewed).append(label(nb, number))
    clean(nb)
    after = nbformat.writes(nb).rstrip("\n") + "\n"
    done.changed = after != before
    if done.changed:
        write(path, after)
    return done


def execute(stored: NotebookNode, path: Path) -> NotebookNode:
    """A copy of the notebook, run from top to bottom as nbval runs it. Raises RefreshError at a failing cell."""
    nb = copy.deepcopy(stored)
    scratch = scratch_folder()
    number = 0
    try:
        client = NotebookClient(
            nb,
            km=manager(AsyncKernelManager, scratch),
            timeout=CELL_TIMEOUT,
            record_timing=False,
            shutdown_kernel="immediate",
            resources={"metadata": {"path": str(path.parent)}},
        )
        with client.setup_kernel(env=environment(scratch), cleanup_kc=True):
            for place, cell in enumerate(nb.cells):
                if cell.cell_type == "code":
                    number += 1
                    client.execute_cell(cell, place, store_history=False)  # as nbval: `;` hides nothing
    except (CellExecutionError, CellTimeoutError, DeadKernelError, RuntimeError) as error:
        raise RefreshError(failure(error, stored, number, path)) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return nb


def failure(error: Exception, nb: NotebookNode, number: int, path: Path) -> str:
    """Where and why a run stopped; the first line says it all."""
    if not number:
        return f"{shown_path(path)}: the kernel did not start: {error}"
    where = f"{shown_path(path)}, {label(nb, number)}"
    if isinstance(error, CellExecutionError):
        trace = re.sub(r"Cell In\[\d+\], ", "", plain(error.traceback).split("-" * 75)[-1])  # always [1] here
        trace = trace.strip().splitlines()[-25:]
        return "\n".join([f"{where}: {error.ename}: {error.evalue}", *trace])
    if isinstance(error, CellTimeoutError):
        return f"{where}: took more than {CELL_TIMEOUT} s"
    return f"{where}: {str(error).splitlines()[0]}"


def normalised(outputs: list[NotebookNode], before: list[NotebookNode], where: str) -> list[NotebookNode]:
    """Outputs as they are stored: one stdout, first where it first came. Raises RefreshError for what must not be."""
    kept: list[NotebookNode] = []
    stdout = None
    for output in outputs:
        if reason := refused(output):
            raise RefreshError(f"{where}: {reason}")
        if output.output_type != "stream":
            kept.append(output)
        elif stdout is None:
            stdout = output
            kept.append(output)
        else:
            stdout.text += output.text
    images = [old for old in before if "data" in old and "image/png" in old.data]
    for output in kept:
        if "data" in output and "image/png" in output.data and images:
            old = images.pop(0).data["image/png"]
            if same_picture(old, output.data["image/png"]):
                output.data["image/png"] = old
    return kept


def refused(output: NotebookNode) -> str:
    """Why an output cannot be stored, and what to do; "" when it can."""
    if output.output_type == "stream":
        if "\r" in output.text or "\b" in output.text:
            return "draws a progress bar; switch it off"
        if output.name == "stderr":
            first = plain(output.text).strip().splitlines()[:1]
            return f"writes to stderr; remove the cause or filter that one warning: {''.join(first)[:200]}"
        return ""
    data = output.get("data", {})
    if "application/vnd.jupyter.widget-view+json" in data:
        return "shows a widget (a progress bar?); switch it off, print what matters"
    if "image/svg+xml" in data:
        return "shows an SVG, which differs each time; show a PNG"
    return ""


def same_picture(old: str, new: str) -> bool:
    """True when two PNG files (base64) hold the same pixels; their metadata may differ."""
    if old == new:
        return True
    from PIL import Image

    try:
        first, second = (Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA") for data in (old, new))
    except (OSError, ValueError):  # what is stored is no picture: take the new one
        return False
    return first.size == second.size and first.tobytes() == second.tobytes()


def clean(nb: NotebookNode) -> None:
    """Leave no metadata but tags, our own (`cookbook`), and a kernel that every machine has."""
    ours = {"cookbook": nb.metadata.cookbook} if nb.metadata.get("cookbook") else {}
    nb.metadata = nbformat.from_dict({**ours, "kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    nb.nbformat, nb.nbformat_minor = 4, 5
    for cell in nb.cells:
        kept = {"tags": tags(cell)} if tags(cell) else {}
        if cell.cell_type == "code" and not compared(cell):
            kept["cookbook"] = cell.metadata.cookbook
        cell.metadata = nbformat.from_dict(kept)


def write(path: Path, text: str) -> None:
    """Replace a file at once, keeping its mode."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
