"""A test file leaves the process as it found it: the next file on the same worker depends on it."""

import os
import sys
from collections.abc import Iterator

import pytest


def switches() -> dict[str, object]:
    """What a test can leave behind and another one notices, by name."""
    now: dict[str, object] = {f"os.environ[{name!r}]": value for name, value in os.environ.items()}
    torch = sys.modules.get("torch")
    if torch is None:
        return now
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    now |= {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "cuda.matmul.allow_tf32": matmul.allow_tf32,
        **{f"cudnn.{name}": getattr(cudnn, name) for name in ("allow_tf32", "benchmark", "deterministic")},
    }
    for module in ("torch._inductor.config", "torch._dynamo.config", "torch._functorch.config"):
        if module in sys.modules:
            now |= {f"{module}.{name}": plain(it) for name, it in sys.modules[module].get_config_copy().items()}
    now.pop("torch._inductor.config.aot_inductor.metadata", None)  # torch notes there what it compiled for
    return now


def plain(value: object) -> str:
    return repr(sorted(value, key=repr) if isinstance(value, set) else value)  # a set has no order of its own


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_changed() -> Iterator[None]:
    before = switches()
    yield
    after = switches()
    names = before.keys() - {"os.environ['PYTEST_CURRENT_TEST']"}  # what only came: imports add switches of their own
    assert not {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
