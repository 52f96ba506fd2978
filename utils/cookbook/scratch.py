"""`--scratch DIR`: model, compile and temporary caches go to a disk of the user's choice. Small root disks fill.

The variables are set in this process, before anything that reads them is imported; kernels inherit them.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

from .notebooks import shown_path

# Variable → folder under the scratch folder.
CACHES = {
    "XDG_CACHE_HOME": "cache",  # what has no variable of its own
    "HF_HOME": "huggingface",
    "HF_HUB_CACHE": "huggingface/hub",  # would win over HF_HOME where the user has set it
    "TORCH_HOME": "torch",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
}
# Free space that a run is likely to need. No recipe downloads a model; compiling for a GPU writes the most.
NEEDED_GB = {"gpu": 3.0}
NEEDED_GB_ELSE = 0.5


def use_scratch(folder: Path | None, preset: str | None = None, needed_gb: float | None = None) -> str:
    """Move the caches under `folder` (None: leave them) and check that their disks have the space a run needs.

    Returns a note for the user, or "". Raises ValueError, one line: not a folder, not writable, not enough space.
    """
    note = move(folder) if folder is not None else ""
    needed = NEEDED_GB.get(preset or "", NEEDED_GB_ELSE) if needed_gb is None else needed_gb
    places = [folder] if folder is not None else [Path(tempfile.gettempdir()), cache_home()]
    for place in places:
        free = free_gb(place)
        if free < needed:
            advice = "give another folder" if folder is not None else "--scratch DIR moves them to another disk"
            raise ValueError(
                f"{shown_path(place)}: {free:.1f} GB free, {needed:g} GB needed for caches and temporary files; "
                f"{advice}"
            )
    return note


def move(folder: Path) -> str:
    """Set the variables, make the folders. Returns a note where temporary files must stay where they are."""
    folder = folder.absolute()
    try:
        for name in (*CACHES.values(), "tmp"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder / "tmp"):
            pass
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--scratch {shown_path(folder)}: not a folder") from None
    except OSError as error:
        raise ValueError(f"--scratch {shown_path(folder)}: cannot write there ({error.strerror})") from None
    for variable, name in CACHES.items():
        os.environ[variable] = str(folder / name)
    if not holds_sockets(folder / "tmp"):
        return f"--scratch {shown_path(folder)} holds no sockets (a network disk?): temporary files stay where they are"
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None  # it was looked up above
    return ""


def holds_sockets(folder: Path) -> bool:
    """Can a Unix socket be made there? Kernels talk over sockets among their temporary files."""
    name = Path(tempfile.mkdtemp(dir=folder)) / "s"
    try:
        here = os.open(name.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/s" if os.path.isdir(f"/proc/self/fd/{here}") else str(name))
        return True
    except OSError:
        return False
    finally:
        os.close(here)
        shutil.rmtree(name.parent, ignore_errors=True)


def cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def free_gb(place: Path) -> float:
    """Free space of the disk that `place` is on, or will be."""
    place = place.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free / 1e9
