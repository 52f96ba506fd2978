"""--scratch: where caches go, and that their disk is looked at before work."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from utils.cookbook import scratch
from utils.cookbook.scratch import CACHES, use_scratch

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """The variables and tempfile's memory come back after each test."""
    for name in (*CACHES, "TMPDIR"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())


def test_every_cache_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert use_scratch(Path("big"), needed_gb=0) == ""
    for name in (*CACHES, "TMPDIR"):
        folder = Path(os.environ[name])
        assert folder.is_dir() and folder.is_relative_to(tmp_path / "big"), name
    assert Path(tempfile.mkdtemp()).parent == tmp_path / "big" / "tmp"
    # What the libraries make of it, in a process of their own.
    code = """
from huggingface_hub import constants
from torch import hub
from torch._inductor.runtime import cache_dir_utils
print(constants.HF_HUB_CACHE, cache_dir_utils.cache_dir(), hub.get_dir(), sep="\\n")
"""
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(seen) == 3 and all(Path(path).is_relative_to(tmp_path / "big") for path in seen), seen


def test_without_it_nothing_moves():
    before = dict(os.environ)
    assert use_scratch(None, needed_gb=0) == "" and dict(os.environ) == before


def test_what_cannot_be_used_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for folder, said in ((tmp_path / "file", "not a folder"), (Path("/proc/x"), "cannot write there")):
        with pytest.raises(ValueError, match=rf"^--scratch .*: {said}"):
            use_scratch(folder)


def test_a_full_disk_is_said_before_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(1, 1, 1.2e9))
    assert use_scratch(None) == ""
    with pytest.raises(ValueError, match=r"1.2 GB free, 3 GB needed .*; --scratch DIR moves them to another disk"):
        use_scratch(None, "gpu")
    with pytest.raises(ValueError, match=r"1.2 GB free, 2 GB needed .*; give another folder"):
        use_scratch(tmp_path / "new", "gpu", needed_gb=2)


def test_temporary_files_stay_where_sockets_can_be(tmp_path, monkeypatch):
    class NoSockets(socket.socket):
        def bind(self, address):
            raise OSError("Operation not supported")

    monkeypatch.setattr(scratch.socket, "socket", NoSockets)
    note = use_scratch(tmp_path / "network", needed_gb=0)
    assert "holds no sockets" in note and "TMPDIR" not in os.environ
    assert os.environ["HF_HOME"].startswith(str(tmp_path / "network"))
    assert list((tmp_path / "network" / "tmp").iterdir()) == []
