"""Train the small GPT of recipe 10 and write weights, vocabulary and held-out text beside this file.

    python data/small_gpt/train.py

One thread, a few minutes. The text is written by this script from a small grammar, so nothing is downloaded and the
model has something to learn: who did what earlier in the paragraph, sums of two numbers, singular and plural. The seed
is fixed; another CPU or torch version gives other last digits of the weights, and the same quality.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from utils.models.gpt import GPT, GPTConfig, load  # noqa: E402

LETTERS = "\n ,.?0123456789abcdefghijklmnopqrstuvwxyz"
CONFIG = GPTConfig(vocab_size=len(LETTERS), layers=3, width=64, heads=4, feed_forward=128)
STEPS, BATCH, LENGTH, RATE = 500, 16, 128, 5e-3
TRAIN_LETTERS, HELD_OUT_LETTERS = 300_000, 8_192

NAMES = "anna ben clara david emma finn greta hugo ida jonas kira leo mina noah"
THINGS = "apple bread candle door engine flower garden horse island jacket kettle lamp mirror needle"
PLACES = "in the kitchen,near the river,behind the station,on the roof,at the market,under the bridge"
VERBS = "finds paints sells carries repairs washes hides measures"
MOODS = "slowly quickly gladly quietly carefully again"


def zipf(listed: str, rng: random.Random) -> str:
    """One of the listed words or phrases; the second is half as likely as the first, and so on."""
    words = listed.split("," if "," in listed else None)
    return rng.choices(words, [1 / rank for rank in range(1, len(words) + 1)])[0]


def paragraph(rng: random.Random) -> str:
    """A few sentences about one person and one thing, and sometimes a sum."""
    who, thing, place = zipf(NAMES, rng), zipf(THINGS, rng), zipf(PLACES, rng)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    sentences = [
        f"{who} {zipf(VERBS, rng)} {a} {thing}s {place}.",
        f"{zipf(MOODS, rng)}, {who} {zipf(VERBS, rng)} {b} more {thing}s.",
        f"{a} and {b} are {a + b}.",
        f"where is {who}? {who} is {place}.",
        f"the {thing} of {who} is {place}, and {zipf(NAMES, rng)} {zipf(VERBS, rng)} it {zipf(MOODS, rng)}.",
    ]
    keep = [0, 1, 2] if rng.random() < 0.6 else [0]
    return " ".join(sentences[i] for i in keep + rng.sample([3, 4], rng.randint(1, 2))) + "\n"


def write_text(letters: int, seed: int) -> str:
    """`letters` letters of paragraphs; the same text for the same seed on every machine."""
    rng = random.Random(seed)
    parts: list[str] = []
    size = 0
    while size < letters:
        parts.append(paragraph(rng))
        size += len(parts[-1])
    return "".join(parts)[:letters]


def encode(text: str) -> torch.Tensor:
    """Letters -> ids, int64 [letters]."""
    place = {letter: number for number, letter in enumerate(LETTERS)}
    return torch.tensor([place[letter] for letter in text])


def train(steps: int = STEPS, seed: int = 0, letters: int = TRAIN_LETTERS) -> GPT:
    """AdamW with warm-up and a cosine, weights rounded to float16 at the end, as they are stored."""
    data = encode(write_text(letters, seed=1))
    model = load(CONFIG, seed=seed).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.05)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        start = torch.randint(len(data) - LENGTH - 1, (BATCH, 1), generator=generator)
        pieces = data[start + torch.arange(LENGTH + 1)]  # [B, L + 1]
        logits = model(pieces[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.4f} nats a letter", flush=True)
    return model.eval().requires_grad_(False)


def perplexity(model: GPT, tokens: torch.Tensor) -> float:
    """exp of the mean loss over rows of LENGTH letters."""
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    logits = model(rows[:, :-1])
    return math.exp(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item())


def main() -> None:
    torch.set_num_threads(1)
    model = train()
    weights = {name: weight.half().contiguous() for name, weight in model.state_dict().items()}
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    held_out = write_text(HELD_OUT_LETTERS, seed=2)
    save_file(weights, HERE / "weights.safetensors")
    (HERE / "held_out.txt").write_text(held_out, encoding="utf-8")
    sizes = {name: getattr(CONFIG, name) for name in ("vocab_size", "layers", "width", "heads", "feed_forward")}
    about = {"config": sizes, "letters": LETTERS, "length": LENGTH}
    (HERE / "vocabulary.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(f"held-out perplexity {perplexity(model, encode(held_out)):.4f}, {CONFIG.parameters:,} parameters")


if __name__ == "__main__":
    main()
