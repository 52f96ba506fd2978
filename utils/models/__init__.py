"""Baseline models, built offline from configurations, tiny to full size.

Importing this package before transformers keeps a notebook's output to what the notebook says: no progress bars of
loading weights, and no remark that tqdm would like ipywidgets.
"""

import os
import warnings

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported
warnings.filterwarnings("ignore", message="IProgress not found")
