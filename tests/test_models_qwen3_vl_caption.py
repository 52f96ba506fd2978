"""The whole captioner of Qwen3-VL: real classes, offline, seeded; and the two ways to real weights."""

import sys
from functools import partial

import huggingface_hub
import pytest
import torch

from utils.models.qwen3_vl import patch_inputs, vision_tower
from utils.models.qwen3_vl_caption import (
    CACHE,
    Qwen3VLForConditionalGeneration,
    caption_config,
    captioner,
    copy_of,
    prompt_ids,
)

GRID = (4, 4, 4)
BOTH_WAYS = r"a local folder with config.json.* or an owner/name on the Hub"


@pytest.fixture(scope="module")
def model():
    return captioner("tiny", seed=3)


def inputs_of(model, many=2, seed=0):
    pixels, grid = patch_inputs(*[GRID] * many, seed=seed)
    ids = prompt_ids(model.config, GRID).expand(many, -1)
    kinds = 2 * (ids == model.config.video_token_id).int()
    return {"input_ids": ids, "pixel_values_videos": pixels, "video_grid_thw": grid, "mm_token_type_ids": kinds}


def test_it_is_the_class_of_transformers(model):
    assert type(model) is Qwen3VLForConditionalGeneration
    assert type(model).__module__ == "transformers.models.qwen3_vl.modeling_qwen3_vl"
    assert isinstance(model.model.visual.patch_embed.proj, torch.nn.Conv3d)
    assert not model.training and not [p for p in model.parameters() if p.is_meta]


def test_the_8b_model_has_its_published_sizes():
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(caption_config("8b"))
    assert sum(p.numel() for p in model.parameters()) == 8_767_123_696
    assert sum(p.numel() for p in model.model.visual.parameters()) == 576_388_336
    assert model.config.text_config.rope_parameters["mrope_section"] == [24, 20, 20]
    assert caption_config("4b").tie_word_embeddings


def test_the_tower_is_the_one_of_the_vision_recipe(model):
    alone = dict(vision_tower("tiny", seed=3).named_parameters())
    inside = dict(model.model.visual.named_parameters())
    assert alone.keys() == inside.keys()
    assert all(torch.equal(alone[name], inside[name]) for name in alone)


def test_the_same_seed_gives_the_same_model(model):
    again, other = captioner("tiny", seed=3), captioner("tiny", seed=4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_a_caption_depends_on_the_clip(model):
    with torch.inference_mode():
        scores = [model(**inputs_of(model, seed=seed), logits_to_keep=1).logits for seed in (0, 0, 1)]
    assert torch.isfinite(scores[0]).all() and scores[0].shape == (2, 1, 512)
    assert torch.equal(scores[0], scores[1])
    assert (scores[0] - scores[2]).abs().max() > 0.05 * scores[0].std()


def test_it_generates(model):
    with torch.inference_mode():
        ids = model.generate(**inputs_of(model), do_sample=False, max_new_tokens=3)
    assert ids.shape == (2, prompt_ids(model.config, GRID).numel() + 3)


@pytest.mark.parametrize("share", [False, True])
def test_a_copy_has_weights_of_its_own_unless_shared(model, share):
    twin = copy_of(model, share=share)
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    assert all((a is b) == share and torch.equal(a, b) for a, b in pairs)
    twin.set_attn_implementation("eager")
    assert model.config.text_config._attn_implementation == "sdpa"
    twin.model.visual.patch_embed.forward = None
    assert model.model.visual.patch_embed.forward is not None


def test_a_copy_in_bfloat16_keeps_the_frequencies(model):
    half = copy_of(model, dtype=torch.bfloat16, share=True)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    buffers = dict(model.named_buffers())
    assert buffers and all(torch.equal(buffers[name], buffer) for name, buffer in half.named_buffers())


def test_tied_weights_stay_tied_in_a_copy():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.b.weight = self.a.weight

    half = copy_of(Tied(), dtype=torch.bfloat16)
    assert half.a.weight is half.b.weight and half.a.weight.dtype is torch.bfloat16


def test_the_prompt_has_a_place_for_every_vector(model):
    config, ids = model.config, prompt_ids(model.config, GRID, question=5)
    assert ids.numel() == 4 * (3 + 1 + 4 + 1) + 5
    assert (ids == config.video_token_id).sum() == 4 * 4
    assert (ids == config.vision_start_token_id).sum() == (ids == config.vision_end_token_id).sum() == 4
    assert ids.max() < config.text_config.vocab_size
    assert not torch.equal(ids, prompt_ids(config, GRID, question=5, seed=1))


def test_the_name_of_the_cache_is_one_that_the_model_takes(model):
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config.text_config)
    with torch.inference_mode():
        model.model.language_model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True, **{CACHE: cache})
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("half", ["config", "nothing"])
def test_a_folder_without_weights_names_both_ways(tmp_path, half):
    if half == "config":
        caption_config("tiny").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=BOTH_WAYS) as error:
        captioner(checkpoint=str(tmp_path))
    assert "\n" not in str(error.value) and f"checkpoint={str(tmp_path)!r}" in str(error.value)


def test_a_name_that_no_hub_gives_names_both_ways(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=BOTH_WAYS) as error:
        captioner(checkpoint="no-such-owner/no-such-model")
    assert "\n" not in str(error.value) and "'no-such-owner/no-such-model'" in str(error.value)


@pytest.fixture
def asked(monkeypatch):
    """What was asked of the Hub; nothing answers."""
    names = []

    def send(client, request, **options):
        names.append(str(request.url))
        raise OSError("no network\nat all")

    for module in ("httpx", "httpx2"):
        if module in sys.modules:
            monkeypatch.setattr(f"{module}.Client.send", send)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return names


@pytest.mark.parametrize("name", ["nope", "a/b/c", "./org/name", "~/org/name", "a b/c"])
def test_what_is_no_folder_and_no_name_on_the_hub_asks_no_network(asked, name):
    with pytest.raises(ValueError, match=BOTH_WAYS) as error:
        captioner(checkpoint=name)
    assert asked == [] and "\n" not in str(error.value) and "(no such folder)" in str(error.value)


def test_a_hub_that_does_not_answer_is_asked_once(asked):
    with pytest.raises(ValueError, match=BOTH_WAYS) as error:
        captioner(checkpoint="no-such-owner/no-such-model")
    assert len(asked) == 1 and "(no network)" in str(error.value)


def test_without_a_network_the_cache_of_the_hub_is_used(asked, model, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    model.save_pretrained(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "utils.models.qwen3_vl_caption.try_to_load_from_cache",
        cached := partial(huggingface_hub.try_to_load_from_cache, cache_dir=tmp_path),
    )
    assert isinstance(cached("org/name", "config.json"), str)
    loaded = captioner(checkpoint="org/name")
    assert len(asked) == 1 and torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_saved_checkpoint_is_loaded(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = captioner("8b", checkpoint=str(tmp_path), attention="eager")
    assert loaded.config.text_config._attn_implementation == "eager"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: captioner("7b"), r"size='7b'; expected one of tiny, small, 4b, 8b; nearest: '8b'"),
        (lambda: captioner("tiny", dtype=torch.int8), r"dtype=torch.int8; expected a floating point"),
        (lambda: prompt_ids(caption_config("tiny"), (4, 3, 4)), r"grid=\(4, 3, 4\).*multiples of 2"),
    ],
)
def test_errors_are_one_line(call, said):
    with pytest.raises(ValueError, match=said) as error:
        call()
    assert "\n" not in str(error.value)
