"""Baseline models, built offline from configurations, tiny to full size.

Importing this package before transformers keeps a notebook's output to what the notebook says: no progress bars of
loading weights, and no remark that tqdm would like ipywidgets.
"""

import os
import warnings
from collections.abc import Iterable
from difflib import get_close_matches

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported
warnings.filterwarnings("ignore", message="IProgress not found")


def nearest(name: str, names: Iterable[str]) -> str:
    """What to say after a wrong name."""
    return f"nearest: {get_close_matches(str(name).lower(), list(names), n=1, cutoff=0.0)[0]!r}"


def known_size(size: str, sizes: Iterable[str]) -> str:
    """`size`. Raises ValueError, one line with the nearest name, where `sizes` does not have it."""
    if size not in sizes:
        raise ValueError(f"size={size!r}; expected one of {', '.join(sizes)}; {nearest(size, sizes)}")
    return size
