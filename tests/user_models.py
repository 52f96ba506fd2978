"""A user's own module of models and inputs, in the folder where a command is started: good ones and broken ones."""

import sys

import pytest

SOURCE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(1), nn.Linear(32, 4)).eval()

def both():
    return model(), torch.randn(2, 3, 8, 8)

def image():
    return torch.randn(2, 3, 8, 8)

def numbered(i):
    return torch.full((2, 3, 8, 8), float(i)) + torch.randn(2, 3, 8, 8)

def named():
    return {"input": torch.randn(2, 3, 8, 8)}  # as nn.Sequential calls its argument

def several():
    return (torch.randn(2, 3, 8, 8),)

def wrong():
    return torch.randn(2, 4, 8, 8)

def nothing():
    return ()

def training():
    return nn.Sequential(nn.Linear(2, 2))

def broken():
    raise OSError("no\\nweights")

def leaves():
    raise SystemExit(3)

def leaves_later():
    import sys
    leaves_later.calls += 1
    if leaves_later.calls > 1:
        sys.exit("no more")
    return model()

leaves_later.calls = 0

def in_a_library():
    import json
    return json.loads("{")

def number():
    return 3

constant = 3
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "their_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("their_models", None)
