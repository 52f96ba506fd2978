import json
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from utils import machine


@pytest.fixture
def no_variable(monkeypatch):
    monkeypatch.delenv(machine.DEVICE_VARIABLE, raising=False)


def test_auto_prefers_a_usable_gpu(monkeypatch, no_variable):
    monkeypatch.setattr(machine, "_cuda_problem", lambda: None)
    assert machine.pick_device().type == "cuda"
    monkeypatch.setattr(machine, "_cuda_problem", lambda: "no driver")
    assert machine.pick_device("auto") == torch.device("cpu")


def test_the_variable_decides_what_auto_means_and_nothing_else(monkeypatch):
    monkeypatch.setattr(machine, "_cuda_problem", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(machine.DEVICE_VARIABLE, "cpu")
    assert machine.pick_device("auto") == torch.device("cpu")
    assert machine.pick_device("cuda:0") == torch.device("cuda:0")
    monkeypatch.setenv(machine.DEVICE_VARIABLE, "cpux")
    with pytest.raises(ValueError, match=r"COOKBOOK_DEVICE='cpux' is no device.*nearest: 'cpu'"):
        machine.pick_device()


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("cud", "cuda"), ("gpu", "cuda"), ("CPU", "cpu"), ("cuda:x", "cuda"), ("cuda:", "cuda")]
)
def test_an_unknown_device_names_the_nearest(wrong, nearest):
    with pytest.raises(ValueError) as raised:
        machine.pick_device(wrong)
    text = str(raised.value)
    assert repr(wrong) in text and f"nearest: {nearest!r}" in text and "\n" not in text


def test_an_unusable_device_says_why(monkeypatch):
    monkeypatch.setattr(machine, "_cuda_problem", lambda: "the driver is too old")
    with pytest.raises(ValueError, match="device='cuda' cannot be used: the driver is too old"):
        machine.pick_device("cuda")
    monkeypatch.setattr(machine, "_cuda_problem", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="cuda:2' does not exist: cuda has 2"):
        machine.pick_device("cuda:2")


def test_cuda_that_fails_at_the_first_tensor_is_not_usable(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image is available\nmore lines")

    machine._cuda_problem.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", broken)
    try:
        assert machine._cuda_problem() == "no kernel image is available"
    finally:
        machine._cuda_problem.cache_clear()


def test_describe_is_one_line_with_versions():
    text = machine.describe("cpu")
    assert text.startswith("cpu: ") and "\n" not in text
    assert f"torch {torch.__version__}" in text and platform.python_version() in text


def test_the_record_is_flat_json_without_names_and_paths():
    record = machine.machine_record("cpu")
    assert json.loads(json.dumps(record)) == record
    assert all(value is None or isinstance(value, str | int | bool) for value in record.values())
    text = json.dumps(record)
    assert str(Path(machine.__file__).parent) not in text and str(Path.home()) + "/" not in text
    assert len(socket.gethostname()) < 3 or socket.gethostname() not in record.values()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["date"])
    wanted = "device device_name driver torch cuda cudnn triton python platform num_threads tf32_matmul tf32_cudnn"
    assert set(wanted.split()) | {"git_commit", "tree_hash", "date", "env_id"} <= set(record)


def test_env_id_follows_the_versions_and_not_the_date_or_threads(monkeypatch):
    first = machine.machine_record("cpu")["env_id"]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert machine.machine_record("cpu")["env_id"] == first
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    assert machine.machine_record("cpu")["env_id"] != first


def test_a_record_without_git_has_a_hash_of_the_tree(monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    record = machine.machine_record("cpu")
    assert record["git_commit"] is None and record["git_dirty"] is None
    assert re.fullmatch(r"[0-9a-f]{16}", record["tree_hash"])


def test_git_state_of_a_clean_and_of_a_changed_tree(tmp_path, monkeypatch):
    folder = tmp_path / "utils"
    folder.mkdir()
    copy = folder / "machine.py"
    shutil.copy(machine.__file__, copy)
    monkeypatch.setattr(machine, "__file__", str(copy))
    assert machine._git_state() == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert machine._git_state() == (None, None)  # a repository, but this folder is not in it
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    commit, dirty = machine._git_state()
    assert re.fullmatch(r"[0-9a-f]{40}", commit) and dirty is False
    before = machine._tree_hash()
    copy.write_text("changed = 1\n")
    assert machine._git_state() == (commit, True)
    assert machine._tree_hash() != before


def test_tf32_is_read_where_the_old_flag_is_refused():
    class Old:
        allow_tf32 = True

    class New:
        fp32_precision = "tf32"

        @property
        def allow_tf32(self):
            raise RuntimeError("mix of the old and the new flags")

    assert machine._tf32(Old()) is True and machine._tf32(New()) is True
    New.fp32_precision = "ieee"
    assert machine._tf32(New()) is False


def test_a_compiler_needs_python_headers_too(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "c++-of-nobody")
    assert machine.has_compiler() is False
    tool = tmp_path / "mycxx"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", str(tool))
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert machine.has_compiler() is False
    (tmp_path / "Python.h").touch()
    assert machine.has_compiler() is True


def test_missing_is_one_line_that_does_not_depend_on_the_machine():
    for what in ("cuda", "compiler", "triton"):
        text = machine.missing(what)
        assert "\n" not in text and len(text) <= 110
        assert platform.python_version() not in text and str(torch.__version__) not in text
    with pytest.raises(ValueError, match=r"what='compilr'.*nearest: 'compiler'"):
        machine.missing("compilr")
