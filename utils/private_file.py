"""Files of pickles: written at once and for the owner only, read only when nobody else could have written them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path


def checked_path(path: str | os.PathLike) -> Path:
    """The absolute path. Raises ValueError when `path` is not the name of a file."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path).strip():
        raise ValueError(f"path={path!r}; expected the name of a file")
    if "\0" in os.fspath(path):
        raise ValueError(f"path={path!r}; expected the name of a file, without a NUL character")
    return Path(path).expanduser().absolute()


def write(target: Path, data: bytes) -> None:
    """All or nothing, readable by the owner only; missing folders are made for the owner only.

    Raises OSError, one line, when it cannot be written; what was there before is then still there.
    """
    scratch = None
    try:
        for folder in reversed(target.parents):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():  # replacing a device or a pipe would take it from everybody
            raise FileExistsError(errno.EEXIST, "it is there and is no regular file")
        handle, scratch = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except OSError as error:
        if scratch:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
        why = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, f"{target} cannot be written: {why}; choose another file") from None


def read(target: Path, allow_untrusted: bool) -> tuple[bytes | None, str]:
    """The content, or None and why not. Modes are checked on the file that is opened, not on the name alone."""
    try:
        if not allow_untrusted and (problem := untrusted(target)):
            return None, f"{problem}, so it could run code of theirs; allow_untrusted=True takes it all the same"
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # opening a pipe must not wait for its writer
        flags |= 0 if allow_untrusted else getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(target, flags)
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode):
            os.close(handle)
            return None, "it is no file"
        with os.fdopen(handle, "rb") as file:
            if not allow_untrusted and (problem := _writable_by_others(seen, "it")):
                return None, problem
            return file.read(), ""
    except FileNotFoundError:
        return None, "there is no such file yet"
    except OSError as error:
        return None, f"it cannot be read: {error.strerror or error}"


def untrusted(target: Path) -> str | None:
    """Who else could have written this file, by itself or by a folder on the way to it. None: nobody.

    Access control lists are not looked at. Raises OSError when the file is not there.
    """
    seen = os.lstat(target)
    if stat.S_ISLNK(seen.st_mode):
        return "it is a symbolic link"
    if problem := _writable_by_others(seen, "it"):
        return problem
    for folder in dict.fromkeys((*target.parents, *target.resolve().parents)):
        if problem := _writable_by_others(os.stat(folder), f"its folder {folder.name or folder}", folder=True):
            return problem
    return None


def _writable_by_others(seen: os.stat_result, name: str, *, folder: bool = False) -> str | None:
    if not hasattr(os, "geteuid"):
        return None  # a system without owners and modes
    if seen.st_uid not in (os.geteuid(), 0):  # root can do anything anyway
        return f"{name} belongs to another user"
    sticky = folder and seen.st_mode & stat.S_ISVTX  # as /tmp: there nobody can replace a file of somebody else
    others = seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"others can write {name} (chmod go-w mends that)" if others and not sticky else None
