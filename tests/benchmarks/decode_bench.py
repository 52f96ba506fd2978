"""How close to the memory limit does decoding come? Run by `./cookbook bench decode`, never by pytest.

Batch 1, the 11.39M GPT, the same weights for all, greedy. Ratios come from interleaved rounds of one process, each
contender with the number of threads that was fastest for it here. The limit is read in the same rounds: `torch.sum`
over 400 MB with the contender's threads, and over a buffer of its own size, which a processor's cache may hold in
part. Under five minutes on two cores.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from utils.machine import describe, has_compiler, missing
from utils.models import gpt
from utils.models.gpt_fast import FastGPT

PROMPT = [5, 17, 300, 4, 871, 60, 233, 9]
BUFFER = 400_000_000  # bytes
LONG, SHORT = 4096, 512  # positions of the long-context ratio
BASELINE = "generate, dynamic cache"
GOALS = {"float32, ours": 5.0, "int8, ours": 10.0}


@dataclass
class Contender:
    label: str
    generate: Callable[[int], torch.Tensor]  # new tokens -> tokens [new]
    bytes_per_token: Callable[[int], float]  # position -> bytes that have to be read
    fast: FastGPT | None = None
    threads: int = 1
    tokens: torch.Tensor | None = None
    seconds: list[float] = field(default_factory=list)  # per new token, one a round
    shares: list[float] = field(default_factory=list)  # of the limit of 400 MB, in the same round
    own_shares: list[float] = field(default_factory=list)  # of the limit of a buffer of its own size


def build(model: gpt.GPT, new_tokens: int, rungs: bool) -> list[Contender]:
    """Every contender; what is compiled ahead says how long that took."""
    llama, prompt = gpt.to_llama(model), torch.tensor([PROMPT])
    config = model.config

    def float_bytes(position: int) -> float:  # every matrix but the table of words, of which one row is read
        weights = config.parameters - config.vocab_size * config.width
        return 4 * (weights + config.cached_values * (position + 1))

    def dynamic(new: int) -> torch.Tensor:
        found = llama.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        return found[0, len(PROMPT) :]

    found = [Contender(BASELINE, dynamic, float_bytes)]
    if has_compiler():
        found.append(Contender("generate, static, compiled", static_generate(llama, new_tokens), float_bytes))
    found.append(Contender("KV cache, eager", lambda new: gpt.generate(model, [PROMPT], new)[0], float_bytes))
    if not has_compiler():
        print("compiled contenders:", missing("compiler"))
        return found
    chosen = [("float32, ours", "aot", "float"), ("int8, ours", "aot", "int8")]
    if rungs:
        chosen.insert(0, ("float32, torch.compile", "compile", "float"))
    for label, how, weights in chosen:
        start = time.perf_counter()
        fast = FastGPT(model, LONG + 1, weights=weights, how=how)
        print(f"{label}: built in {time.perf_counter() - start:.0f} s", flush=True)
        found.append(Contender(label, lambda new, fast=fast: fast.generate(PROMPT, new), fast.bytes_per_token, fast))
    return found


def static_generate(llama, new_tokens: int) -> Callable[[int], torch.Tensor]:
    """The strongest form of `generate`: static cache, compiled, weights frozen and packed, products autotuned."""
    from transformers import CompileConfig, StaticCache

    config = CompileConfig(mode=None, options={"max_autotune": True})
    config._compile_all_devices = True  # transformers compiles by itself on accelerators only
    # One cache for all calls: a frozen graph keeps the address of the first cache's length.
    cache = StaticCache(config=llama.config, max_cache_len=len(PROMPT) + new_tokens)
    prompt = torch.tensor([PROMPT])

    def generate(new: int) -> torch.Tensor:
        cache.reset()
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "compile_config": config}
        torch._inductor.config.freezing = True  # given as an option of torch.compile it freezes nothing
        try:
            return llama.generate(prompt, past_key_values=cache, **options)[0, len(PROMPT) :]
        finally:
            torch._inductor.config.freezing = False

    return generate


def check(contenders: list[Contender], new: int) -> torch.Tensor:
    """Tokens of everybody, all of them generated (which also compiles); the tokens of the baseline."""
    for contender in contenders:
        contender.tokens = contender.generate(new)
    return contenders[0].tokens


def agreement(fast: FastGPT, tokens: torch.Tensor) -> float:
    """Top-1 agreement: how often the next token is the reference's, when the text so far is the reference's too."""
    same, text = 0, [*PROMPT, *tokens.tolist()]
    fast.prefill(PROMPT)
    for place in range(len(PROMPT), len(text) - 1):
        token, _ = fast.step(*fast.arguments(text[place], place))
        same += int(token) == text[place + 1]
    return same / (len(text) - 1 - len(PROMPT))


def choose_threads(contenders: list[Contender], new: int, rounds: int = 3) -> None:
    most = torch.get_num_threads()
    for contender in contenders:
        fastest = {}
        for threads in sorted({1, max(1, most // 2), most}, reverse=True):
            torch.set_num_threads(threads)
            contender.generate(2)  # a graph of its own for each number of threads, where it is compiled
            fastest[threads] = min(timed(contender.generate, new) for _ in range(rounds))
        contender.threads = min(fastest, key=fastest.get)
        torch.set_num_threads(most)


def timed(work: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def read_rate(buffer: torch.Tensor, times: int = 3) -> float:
    """Bytes per second of reading a buffer with the present number of threads: the median of a few."""
    return buffer.nbytes / statistics.median(timed(buffer.sum) for _ in range(times))


def race(contenders: list[Contender], new: int, rounds: int) -> None:
    """Interleaved rounds in alternating order; the limit is read beside every run, with its number of threads."""
    big = torch.ones(BUFFER // 4)
    middle = len(PROMPT) + new / 2  # the mean position of a new token
    for number in range(rounds):
        for contender in contenders if number % 2 else contenders[::-1]:
            torch.set_num_threads(contender.threads)
            need = contender.bytes_per_token(round(middle))
            own = torch.ones(round(need / 4))
            rates = [(read_rate(big), read_rate(own))]
            per_token = timed(contender.generate, new) / new
            rates.append((read_rate(big), read_rate(own)))
            limit, own_limit = (statistics.mean(pair) for pair in zip(*rates, strict=True))
            contender.seconds.append(per_token)
            contender.shares.append(need / limit / per_token)
            contender.own_shares.append(need / own_limit / per_token)


def long_context(contender: Contender, rounds: int = 60) -> tuple[float, float]:
    """(ratio of times, ratio of bytes) of one token at position 4,096 and at position 512, interleaved calls."""
    fast = contender.fast
    torch.set_num_threads(contender.threads)
    for cached in fast.cache:
        cached.normal_(generator=torch.Generator().manual_seed(0))
    calls = {place: fast.arguments(1, place - 1) for place in (SHORT, LONG)}
    seconds = {place: [] for place in calls}
    for number in range(rounds):
        for place in calls if number % 2 else reversed(calls):
            fast.step(*calls[place])  # the caches hold what this position reads, as in a text
            seconds[place].append(timed(fast.step, *calls[place]))
    times = [long / short for long, short in zip(seconds[LONG], seconds[SHORT], strict=True)]
    return statistics.median(times), fast.bytes_per_token(LONG - 1) / fast.bytes_per_token(SHORT - 1)


def report(contenders: list[Contender], reference: torch.Tensor) -> list[str]:
    """Print one line a contender; return the goals that were missed."""
    missed, base = [], contenders[0].seconds
    print(f"{'':<27}{'ms/token':>9}{'speedup':>9}{'range':>13}{'limit':>7}{'own':>6}{'threads':>8}  tokens")
    for c in contenders:
        ratios = sorted(b / s for b, s in zip(base, c.seconds, strict=True))
        share, own = statistics.median(c.shares), statistics.median(c.own_shares)
        same = "identical" if torch.equal(c.tokens, reference) else "differ"
        if c.fast is not None and c.label.startswith("int8"):
            same = f"top-1 agreement {agreement(c.fast, reference):.1%}"
        speedup = statistics.median(ratios)
        spread = f"{ratios[0]:.1f} - {ratios[-1]:.1f}"
        milli = statistics.median(c.seconds) * 1e3
        print(f"{c.label:<27}{milli:>9.2f}{speedup:>8.1f}x{spread:>13}{share:>7.0%}{own:>6.0%}{c.threads:>8}  {same}")
        if same == "differ":
            missed.append(f"{c.label}: tokens differ from {BASELINE}")
        if speedup < GOALS.get(c.label, 0):
            missed.append(f"{c.label}: {speedup:.1f}x, goal {GOALS[c.label]:.0f}x")
        if c.label == "float32, ours" and share < 0.75:
            missed.append(f"{c.label}: {share:.0%} of the limit, goal 75 %")
    return missed


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="./cookbook bench decode", description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rungs", action="store_true", help="also torch.compile: a minute longer")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    start = time.perf_counter()
    print(describe("cpu"), flush=True)
    with torch.no_grad():
        contenders = build(gpt.load("full"), options.new_tokens, options.rungs)
        reference = check(contenders, options.new_tokens)
        choose_threads(contenders, 64)
        race(contenders, options.new_tokens, options.rounds)
        print(
            f"\n{options.new_tokens} new tokens, {options.rounds} interleaved rounds, medians; goals of issue 5 below\n"
        )
        missed = report(contenders, reference)
        print()
        for c in contenders:
            if c.fast is not None:
                times, size = long_context(c)
                word = f"{c.label}: a token at {LONG:,} takes {times:.2f} times one at {SHORT}; bytes {size:.2f}"
                print(f"{word}; quotient {times / size:.2f} (goal for float32: at most 1.15)")
                if c.label == "float32, ours" and times / size > 1.15:
                    missed.append(f"{c.label}: long context {times / size:.2f} times the ratio of bytes, goal 1.15")
    print("\n" + ("\n".join(f"MISSED  {line}" for line in missed) or "every goal reached"))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
