"""What torch.compile built is kept for the next process, and a hit is proven; a bad file costs time, never a crash.

The functions here are matrix products: Inductor calls the library for them, so no C++ compiler is needed.
"""

import hashlib
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from utils import cache_use, compile_cache, private_file
from utils.compile_cache import CacheUse, hits, load, save

ROOT = Path(__file__).resolve().parents[1]


def products(x, a, b):
    return x @ a @ b


def tensors(rows=4):
    return tuple(torch.ones(n, 8) for n in (rows, 8, 8))


def run(rows=4, fn=products, **options):
    """Compile anew and call once: what the caches answered."""
    torch.compiler.reset()
    with hits() as use, torch.inference_mode():
        torch.compile(fn, **options)(*tensors(rows))
    return use.use


@pytest.fixture
def empty_folder(monkeypatch, tmp_path):
    """Inductor's cache in an empty folder of its own, and nothing kept of earlier tests. Call it for another one."""
    from torch.compiler._cache import CacheArtifactManager

    number = iter(range(100))

    def another():
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"cache{next(number)}"))
        torch.compiler.reset()

    monkeypatch.setattr(cache_use, "loaded", set())
    CacheArtifactManager.clear()
    another()
    yield another
    torch.compiler.reset()
    CacheArtifactManager.clear()


@pytest.fixture(scope="module")
def good_file(tmp_path_factory):
    """A file with the artifacts of one graph."""
    from torch.compiler._cache import CacheArtifactManager

    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
        CacheArtifactManager.clear()
        run()
        report = save(folder / "own" / "model.bin", device="cpu", dtype=torch.float32, config={"batch": 4})
    assert report.artifacts == {"aot_autograd": 1, "inductor": 1} and "2 artifacts" in str(report)
    return Path(report.path)


@pytest.fixture
def saved(good_file, empty_folder, tmp_path):
    """A copy of the good file, and an empty cache folder."""
    (tmp_path / "own").mkdir(mode=0o700)
    shutil.copy(good_file, tmp_path / "own" / "model.bin")  # with its mode
    return tmp_path / "own" / "model.bin"


# ---------------------------------------------------------------------------------------------------- hits and misses


def test_what_was_saved_is_hit_after_loading(saved):
    report = load(saved, device="cpu", dtype="float32", config={"batch": 4})
    assert report and report.artifacts == {"aot_autograd": 1, "inductor": 1}
    assert report.already_here == 0 and not report.notes
    assert report.proof().verdict == "nothing compiled" and "loaded but not hit" in str(report.proof())
    use = run()
    assert use and use == CacheUse(fx_hits=1, aot_hits=1, graphs=1, loaded=True)
    assert report.proof() == use


def test_without_loading_it_misses(saved):
    use = run()
    assert not use and use.verdict == "miss" and (use.fx_misses, use.aot_misses, use.fx_hits) == (1, 1, 0)
    assert "not hit" not in str(use)


def test_loading_without_hitting_is_said(saved):
    load(saved)
    use = run(rows=5)  # another shape is another graph
    assert use.verdict == "miss" and str(use).startswith("miss, artifacts loaded but not hit:")


def test_a_part_may_hit(saved):
    load(saved)
    torch.compiler.reset()
    with hits() as use, torch.inference_mode():
        torch.compile(products, dynamic=False)(*tensors(4))
        torch.compile(products, dynamic=False)(*tensors(6))
    assert use.verdict == "partial" and (use.fx_hits, use.fx_misses) == (1, 1)


def test_a_bypass_is_no_miss_and_has_its_reason(empty_folder):
    with torch._inductor.config.patch(post_grad_custom_post_pass=lambda graph: None):
        use = run()
    assert use.verdict == "bypass" and use.fx_bypasses == 1
    assert any("custom pass" in reason for reason in use.reasons) and "custom pass" in str(use)


def test_caches_that_are_off_are_not_asked(saved):
    with torch._inductor.config.patch(force_disable_caches=True):
        assert "nothing can hit" in str(load(saved))
        assert run().verdict == "not asked"
    assert run(backend="eager").verdict == "not asked"


def test_counters_that_somebody_clears(empty_folder):
    with hits() as use:
        run()
        torch._dynamo.utils.counters.clear()
        assert use.fx_misses == 0
        run(rows=7)
    assert use.fx_misses == 1


def test_listening_for_reasons_leaves_the_loggers_alone(empty_folder):
    import logging

    loggers = [logging.getLogger(name) for name in cache_use._LOGGERS]
    before = [(logger.level, list(logger.filters)) for logger in loggers]
    with pytest.raises(ZeroDivisionError), hits() as use:
        raise ZeroDivisionError
    assert [(logger.level, list(logger.filters)) for logger in loggers] == before
    assert use.verdict == "nothing compiled"


def test_a_warm_folder_is_named_because_it_would_hit_anyway(saved):
    run()
    report = load(saved)
    assert report.already_here == 2 and "proves nothing" in str(report)


def test_in_a_fresh_process(tmp_path):
    """Both ends are processes of their own, as in use: this one holds whatever earlier tests left in torch."""

    def fresh(first: str, last: str) -> str:
        code = f"""
import torch
from utils.compile_cache import load, save
path = {str(tmp_path / "model.bin")!r}
{first}
with torch.inference_mode():
    torch.compile(lambda x, a, b: x @ a @ b)(torch.ones(4, 8), torch.ones(8, 8), torch.ones(8, 8))
{last}
"""
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / first[:4]), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
        )
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    assert fresh("made = None", "print(bool(save(path, device='cpu')))") == "True"
    proof = "print(bool(report), report.proof().verdict, len(report.notes), *report.notes)"
    assert fresh("report = load(path, device='cpu')", proof) == "True hit 0"


# ---------------------------------------------------------------------------------------------------- saving


def test_nothing_compiled_yet_saves_nothing(empty_folder, tmp_path):
    assert save(tmp_path / "new" / "model.bin") is None
    assert not (tmp_path / "new").exists()


def test_loaded_and_not_run_saves_nothing(saved, tmp_path):
    from torch.compiler._cache import CacheArtifactManager

    CacheArtifactManager.clear()  # as in a fresh process
    assert load(saved) and save(tmp_path / "again.bin") is None


def test_a_save_after_a_partial_run_says_what_is_lost(empty_folder, tmp_path):
    from torch.compiler._cache import CacheArtifactManager

    run(rows=4), run(rows=5)
    assert save(tmp_path / "both.bin").artifacts["inductor"] == 2
    CacheArtifactManager.clear()
    empty_folder()
    load(tmp_path / "both.bin")
    run(rows=4)
    second = save(tmp_path / "again.bin")
    assert second.artifacts["inductor"] == 1 and "2 loaded artifacts were never hit" in str(second)
    run(rows=5)
    assert not save(tmp_path / "again.bin").notes


def test_the_record_says_what_the_artifacts_are_for(saved):
    record = load(saved).record
    assert record["torch"] == torch.__version__ and record["device"] == "cpu" and record["dtype"] == "float32"
    assert record["config"] == {"batch": 4} and record["device_name"] and record["cpu_capability"]
    assert str(Path.home()) not in json.dumps(record) and str(saved.parent) not in json.dumps(record)


def test_the_file_and_new_folders_are_for_the_owner_only(good_file):
    assert good_file.stat().st_mode & 0o777 == 0o600 and good_file.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in good_file.parent.iterdir()] == ["model.bin"]


@pytest.mark.parametrize("kind", ["below a file", "a folder"])
def test_a_path_that_cannot_be_written(empty_folder, tmp_path, kind):
    run()
    (tmp_path / "file").write_text("kept")
    path = {"below a file": tmp_path / "file" / "model.bin", "a folder": tmp_path}[kind]
    with pytest.raises(OSError, match=r"cannot be written.*choose another file") as caught:
        save(path)
    assert "\n" not in str(caught.value) and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("through_a_link", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_no_file_is_not_replaced(empty_folder, tmp_path, kind, through_a_link):
    run()
    path = tmp_path / kind
    os.mkfifo(path) if kind == "pipe" else os.mknod(path, stat.S_IFSOCK | 0o600)
    target = path
    if through_a_link:
        target = tmp_path / "link"
        target.symlink_to(path)
    with pytest.raises(OSError, match="is no regular file; choose another file") as caught:
        save(target)
    assert "\n" not in str(caught.value) and target.is_symlink() is through_a_link
    assert path.is_fifo() if kind == "pipe" else path.is_socket()


@pytest.mark.parametrize("options", ['"abc"', "[1]", "3", "[" * 100_000], ids=["text", "list", "number", "deep"])
def test_a_record_of_another_shape_is_a_cold_compile(tmp_path, options):
    rest = b'{"options": ' + options.encode() + b"}\nartifacts"
    path = tmp_path / "model.bin"
    digest = hashlib.sha256(rest).hexdigest().encode()
    path.write_bytes(compile_cache.MAGIC + digest + b"\n" + rest)
    path.chmod(0o600)
    assert refused(path) == "its record is damaged"


def test_hits_that_were_not_counted_yet_say_so():
    with pytest.raises(AttributeError, match="nothing was counted yet; expected `with hits"):
        _ = hits().verdict


def test_a_full_disk_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()
    run()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(saved)
    assert saved.read_bytes() == before and [p.name for p in saved.parent.iterdir()] == ["model.bin"]


def test_wrong_arguments_are_said_in_one_line(tmp_path):
    path = tmp_path / "model.bin"
    wrong = [
        (dict(path=""), "path=''"),
        (dict(path=None), "path=None"),
        (dict(path="a\0b"), "without a NUL"),
        (dict(path=path, dtype="float33"), "float33"),
        (dict(path=path, dtype="nn"), "no dtype"),
        (dict(path=path, config=["batch"]), "config="),
        (dict(path=path, config={"shape": (1, 2)}), "shape"),
        (dict(path=path, device="gpu"), "nearest: 'cuda'"),
    ]
    for arguments, said in wrong:
        for function in (save, load):
            with pytest.raises(ValueError, match=said) as caught:
                function(**arguments)
            assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------- files that are no good


def refused(path, **options):
    """Not loaded, one line, and a cold compile that works."""
    report = load(path, **options)
    assert not report and "compiling cold" in str(report) and "\n" not in str(report)
    return report.reason


def test_no_file_yet(empty_folder, tmp_path):
    assert "no such file" in refused(tmp_path / "model.bin")
    assert "no such file" in refused(tmp_path / "nowhere" / "model.bin")
    assert run().verdict == "miss"


@pytest.mark.parametrize("size", [0, 1, 39, 60, 105, 200, 2000, -1])
def test_a_file_cut_short(saved, size):
    saved.write_bytes(saved.read_bytes()[:size])
    assert "empty" in refused(saved) or "damaged" in refused(saved)
    assert run().verdict == "miss"


@pytest.mark.parametrize("place", [3, 45, 110, 150, -1, -500])
def test_a_flipped_bit(saved, place):
    data = bytearray(saved.read_bytes())
    data[place] ^= 4
    saved.write_bytes(data)
    assert "damaged" in refused(saved)


def test_something_else(empty_folder, tmp_path):
    for content in (b"hello", pickle.dumps({"a": 1}), bytes(1000)):
        (tmp_path / "x").write_bytes(content)
        assert "no file of utils.compile_cache" in refused(tmp_path / "x")
    assert "is no file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is no file" in refused(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("name", "value"),
    [("torch", "2.6.0"), ("cuda", "12.9"), ("device", "cuda"), ("device_name", "another CPU"), ("python", "3.99")],
)
def test_a_foreign_file(saved, monkeypatch, empty_folder, name, value):
    plain = compile_cache._record
    monkeypatch.setattr(compile_cache, "_record", lambda wanted: plain(wanted) | {name: value})
    reason = refused(saved)
    assert f"{name} {plain(compile_cache._wanted('cpu', None, None))[name]}, here it is {value}" in reason
    assert run().verdict == "miss"


def test_another_dtype_or_configuration(saved):
    assert "dtype float32, asked for is bfloat16" in refused(saved, dtype=torch.bfloat16)
    assert "config {'batch': 4}, asked for is {'batch': 8}" in refused(saved, config={"batch": 8})
    assert load(saved) and load(saved, dtype="float32", config={"batch": 4})


def test_other_options_of_the_compiler_are_named(saved):
    with torch._inductor.config.patch(freezing=not torch._inductor.config.freezing):
        report = load(saved)
        assert report and "options differ" in str(report) and "freezing" in str(report)
        assert not run()
    assert "options differ" not in str(load(saved))


def test_artifacts_that_torch_cannot_take(saved, monkeypatch, empty_folder):
    def fails(data):
        raise RuntimeError("pickle of another build\nmore")

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", fails)
    assert refused(saved) == "torch could not take it: RuntimeError: pickle of another build"
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: None)
    assert refused(saved) == "torch could not read it"
    monkeypatch.delattr(torch.compiler, "load_cache_artifacts")
    assert "2.7 or newer" in refused(saved)


# ---------------------------------------------------------------------------------------------------- files of others


def spoil(path, how):
    if how == "file writable by its group":
        path.chmod(0o620)
    elif how == "file writable by all":
        path.chmod(0o602)
    elif how == "folder writable by its group":
        path.parent.chmod(0o770)
    elif how == "folder writable by all":
        path.parent.chmod(0o707)
    elif how == "folder of the folder writable by all":
        path.parent.parent.chmod(0o777)
    elif how == "symbolic link":
        path.rename(path.with_name("real.bin"))
        path.symlink_to("real.bin")
    elif how == "link to a folder writable by all":
        real = path.parent.rename(path.parent.with_name("real"))
        real.chmod(0o777)
        path.parent.symlink_to(real)
    elif how == "file of another user":
        os.chown(path, 4242, -1)
    else:
        os.chown(path.parent, 4242, -1)


@pytest.mark.parametrize(
    "how",
    [
        "file writable by its group",
        "file writable by all",
        "folder writable by its group",
        "folder writable by all",
        "folder of the folder writable by all",
        "symbolic link",
        "link to a folder writable by all",
        "file of another user",
        "folder of another user",
    ],
)
def test_a_file_that_others_can_write_is_refused_unless_allowed(saved, monkeypatch, how):
    if "another user" in how and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    spoil(saved, how)
    called = []
    plain = torch.compiler.load_cache_artifacts
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: called.append(1) or plain(data))
    reason = refused(saved)
    assert "allow_untrusted=True" in reason and not called
    assert any(word in reason for word in ("others can write", "symbolic link", "another user"))
    assert load(saved, allow_untrusted=True) and called


def test_a_sticky_folder_is_no_danger(saved):
    saved.parent.chmod(0o1777)
    assert load(saved)


def test_a_save_that_load_will_refuse_says_so(saved):
    run()
    saved.parent.chmod(0o777)
    assert "load will refuse it" in str(save(saved))
