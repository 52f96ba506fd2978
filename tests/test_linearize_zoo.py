"""linearize on modules of transformers and diffusers: equivalent before and after, or rightly left alone."""

import copy
from collections.abc import Collection

import pytest
import torch
from linearize_zoo import YES, ZOO, Case

from utils.linearize import linearize, restore

NAMED = [  # families that must be in the table
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "videomae", "vivit", "vjepa2", "clip", "siglip", "dinov2", "sam",
    "transformer_wan", "transformer_hunyuan_video", "embeddings.PatchEmbed",
]  # fmt: skip


def test_the_table_is_large_enough():
    sites = [(case.source, case.cls, path) for case in ZOO for path in case.expected]
    assert len(sites) == len(set(sites)) >= 60 and len({case.cls for case in ZOO}) >= 40
    assert all(any(name in str(case) or name in case.source for case in ZOO) for name in NAMED)
    left_alone = [reason for case in ZOO for reason in case.expected.values() if reason is not YES]
    assert len(left_alone) >= 8


def tensors(value):
    """Every tensor of a nested output."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [t for item in value for t in tensors(item)] if isinstance(value, Collection) else []


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_equivalent_or_left_alone_rightly(case: Case):
    made = case.make()
    if made is None:
        pytest.skip(f"the installed {case.library} has no {case.cls}")
    model, inputs = made
    twin = copy.deepcopy(model)
    decided = {r.path: YES if r.converted else r.reason for r in linearize(twin)}
    assert decided.keys() == case.expected.keys()
    for path, expected in case.expected.items():
        assert decided[path] is YES if expected is YES else expected in decided[path]

    with torch.no_grad():
        before, after = model(*inputs), twin(*copy.deepcopy(inputs))
    assert tensors(before) and all(t.isfinite().all() for t in tensors(before))
    torch.testing.assert_close(tensors(after), tensors(before))
    assert list(twin.state_dict()) == list(model.state_dict())
    assert len(restore(twin)) == sum(expected is YES for expected in case.expected.values())
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
