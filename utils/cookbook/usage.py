"""How a command says that its arguments are wrong: one line on stderr, exit status 2, nothing done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """A wrong argument, said in one line."""


@contextmanager
def usage() -> Iterator[None]:
    """Where arguments are looked at: a ValueError is the user's mistake, not ours."""
    try:
        yield
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        raise UsageError(str(error)) from None
