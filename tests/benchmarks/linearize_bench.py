"""utils.linearize at full width: Qwen3-VL's patch embedding, 6,272 patches, 1,536 -> 1,152, float32 and bfloat16.

    ./cookbook bench linearize        two tables and rows in build/bench/linearize.jsonl; three minutes on two cores

The linearized module against transformers' own fused class (`fusion_config`), a forward written by hand, and the
convolution. Exit status 1 when the linearized module is slower than the fused class or the forward by hand.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from utils.cost import measure_peaks
from utils.linearize import linearize
from utils.models.qwen3_vl import Qwen3VLVisionModel, patch_embed, vision_config, vision_tower
from utils.rows import append_rows, measured
from utils.timing import compare

ROWS = Path(__file__).resolve().parents[2] / "build" / "bench" / "linearize.jsonl"
N, K, D = 6272, 1536, 1152


def fused_class() -> type:
    """The class that `fusion_config` puts in place of the patch embedding."""
    small = vision_tower("tiny")
    load = {"config": small.config, "state_dict": small.state_dict()}
    return type(Qwen3VLVisionModel.from_pretrained(None, **load, fusion_config={"patch_embeddings": True}).patch_embed)


def builders(dtype: torch.dtype, fused: type) -> dict:
    def linearized():
        layer = patch_embed("8b", dtype=dtype)
        assert [r.converted for r in linearize(layer)] == [True]
        return layer

    def by_hand():
        proj = patch_embed("8b", dtype=dtype).proj
        return lambda x: F.linear(x, proj.weight.flatten(1), proj.bias)

    def with_fusion_config():
        layer = patch_embed("8b", dtype=dtype)
        made = fused(vision_config("8b")).to(dtype).eval()
        made.linear_proj.load_state_dict({"weight": layer.proj.weight.flatten(1), "bias": layer.proj.bias})
        return made

    return {
        "linearized": linearized, "fusion_config": with_fusion_config, "F.linear by hand": by_hand,
        "Conv3d": lambda: patch_embed("8b", dtype=dtype),
    }  # fmt: skip


def main() -> int:
    good, fused = True, fused_class()
    for dtype in (torch.float32, torch.bfloat16):
        contenders = builders(dtype, fused)
        peaks = measure_peaks("cpu", dtype, refresh=True)
        for baseline in ("fusion_config", "F.linear by hand"):
            others = ("linearized",) if baseline == "fusion_config" else ("linearized", "Conv3d")
            result = compare(
                contenders[baseline], {name: contenders[name] for name in others}, label=baseline,
                make_inputs=lambda i, dtype=dtype: (torch.randn(N, K).to(dtype),), min_run_time=6.0,
                reference=lambda dtype=dtype: patch_embed("8b", dtype=dtype).double(),
                flops=2 * N * K * D, bytes_moved=(N * K + K * D + N * D) * dtype.itemsize, peaks=peaks,
            )  # fmt: skip
            print(f"{dtype}\n{result}\n", flush=True)
            row = result["linearized"]
            good &= row.verdict in ("faster", "equivalent", "inconclusive") and row.ci_high >= 1
            ROWS.parent.mkdir(parents=True, exist_ok=True)
            case = {"dtype": str(dtype).removeprefix("torch."), "patches": N, "baseline": baseline}
            fields = {
                f: getattr(row, f) for f in ("verdict", "speedup", "ci_low", "ci_high", "median_s", "share_of_limit")
            }
            append_rows(ROWS, [measured("linearize_bench", {}, case, **fields)])
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
