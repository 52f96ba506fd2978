"""How close to the memory limit does decoding come? Run by `./cookbook bench decode`, never by pytest.

Batch 1, the 11.39M GPT, the same weights for all, greedy. Every contender runs with the number of threads that was
fastest for it here, and its tokens are compared with those of `generate`. Three parts, each with interleaved rounds:
the race; the share of the limit, which is `torch.sum` over 400 MB with the contender's threads (and, beside it, over a
buffer of the size that a token reads, which a processor's cache may hold in part); a token late in a long text against
an early one. Under five minutes on two cores.
"""

from __future__ import annotations

import argparse
import logging
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from utils.equivalence import declared_lossy
from utils.machine import describe, has_compiler, missing
from utils.models import gpt, gpt_llama
from utils.models.gpt_fast import FastGPT
from utils.timing import clock, compare, fixed, rounds

PROMPT_TOKENS = 8
BUFFER = 400_000_000  # bytes
READS = 10  # of the large buffer, between two runs
SHORT, LONG = 512, 4096  # positions of the long-context ratio
BASELINE, FLOAT, INT8 = "generate, dynamic cache", "float32, ours", "int8, ours"
GOALS = {FLOAT: 5.0, INT8: 10.0}  # times `generate`
GOAL_SHARE, GOAL_LONG = 0.75, 1.15
INT8_AGREEMENT = 0.9


@dataclass
class Contender:
    write: Callable[[torch.Tensor, int], torch.Tensor]  # prompt [L], new tokens -> tokens [new]
    fast: FastGPT | None = None
    threads: int = 1

    def run(self, prompt: torch.Tensor, new: int) -> torch.Tensor:
        """The whole text, prompt included, [L + new], with this contender's threads."""
        torch.set_num_threads(self.threads)
        return torch.cat((prompt, self.write(prompt, new)))


def prompt_of(number: int) -> torch.Tensor:
    return torch.randint(1000, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(number))


def build(model: gpt.GPT, new: int, rungs: bool) -> dict[str, Contender]:
    llama = gpt_llama.to_llama(model)

    def dynamic(prompt: torch.Tensor, count: int) -> torch.Tensor:
        return llama.generate(prompt[None], max_new_tokens=count, min_new_tokens=count, do_sample=False)[
            0, len(prompt) :
        ]

    found = {BASELINE: Contender(dynamic)}
    found["KV cache, eager"] = Contender(lambda prompt, count: gpt.generate(model, prompt[None], count)[0])
    if not has_compiler():
        print("compiled contenders:", missing("compiler"))
        return found
    found["generate, static, compiled"] = Contender(static_generate(llama, PROMPT_TOKENS + new))
    kinds = {FLOAT: ("float", "aot"), INT8: ("int8", "aot")}
    if rungs:
        kinds["float32, torch.compile"] = ("float", "compile")
    for label, (weights, how) in kinds.items():
        fast = FastGPT(model, LONG + 1, weights=weights, how=how)
        found[label] = Contender(fast.generate, fast)
    return found


def static_generate(llama, slots: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """The strongest form of `generate`: static cache, compiled, weights frozen and packed, one kind of product."""
    from transformers import CompileConfig, StaticCache

    # The packed C++ product won every comparison of the autotuner, and comparing takes a minute: it is the only choice.
    config = CompileConfig(mode=None, options={"max_autotune": True, "max_autotune_gemm_backends": "CPP"})
    config._compile_all_devices = True  # transformers compiles by itself on accelerators only
    # One cache for all calls: a frozen graph keeps the address of the first cache's length.
    cache = StaticCache(config=llama.config, max_cache_len=slots)

    def write(prompt: torch.Tensor, count: int) -> torch.Tensor:
        cache.reset()
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "compile_config": config}
        torch._inductor.config.freezing = True  # given as an option of torch.compile it freezes nothing
        try:
            return llama.generate(prompt[None], past_key_values=cache, **options)[0, len(prompt) :]
        finally:
            torch._inductor.config.freezing = False

    return write


def interleaved(calls: Mapping[str, Callable[[], object]], passes: int, prewarm: int = 0) -> dict[str, np.ndarray]:
    """Seconds of every call, [passes] each; entry p of all of them is from the same pass."""
    options = {"mode": "latency", "cache": "hot", "calls": 1, "timer": clock.default_timer(), "threads": 1}
    work = dict(enumerate(calls.values()))
    samples = {index: clock.sampler(call, **options) for index, call in work.items()}
    plan = rounds.schedule(list(work), max(1, passes // 2), 1, random.Random(0))
    stamps = rounds.take(plan, samples, work, dict.fromkeys(work, prewarm), [0])
    return dict(zip(calls, rounds.by_contender(plan, stamps).values(), strict=True))


def choose_threads(contenders: Mapping[str, Contender], new: int, most: int) -> None:
    """One thread, half of all, all: what writes a short text fastest? torch.compile makes a graph for each."""
    prompt = prompt_of(0)
    for label, contender in contenders.items():

        def with_threads(threads: int, contender: Contender = contender) -> None:
            contender.threads = threads
            contender.run(prompt, new)

        calls = {n: lambda n=n, call=with_threads: call(n) for n in sorted({1, max(1, most // 2), most})}
        for call in calls.values():
            call()
        seconds = {n: float(np.median(taken)) for n, taken in interleaved(calls, 4).items()}
        contender.threads = min(seconds, key=seconds.get)
        shown = ", ".join(f"{n}: {taken / new * 1e3:.2f} ms" for n, taken in seconds.items())
        print(f"{label}: {contender.threads} of the threads tried ({shown})", flush=True)


def agreement(fast: FastGPT) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Top-1 agreement: how often the next token is the reference's, when the text so far is the reference's too.

    0 when the text that was written is not the one that these predictions give.
    """

    def metric(actual: torch.Tensor, expected: torch.Tensor) -> float:
        text = expected.tolist()
        predicted = [int(fast.prefill(expected[:PROMPT_TOKENS]))]
        for place in range(PROMPT_TOKENS, len(text) - 1):
            predicted.append(int(fast.step(*fast.arguments(text[place], place))[0]))
        same = np.array(predicted) == text[PROMPT_TOKENS:]
        until = len(same) if same.all() else int(same.argmin()) + 1  # up to the first difference both texts are one
        return float(same.mean()) if actual.tolist()[PROMPT_TOKENS:][:until] == predicted[:until] else 0.0

    return metric


def race(contenders: dict[str, Contender], new: int, seconds: float) -> list[str]:
    """Print the table; return the goals that were missed."""

    def builder(contender: Contender) -> fixed:
        return fixed(lambda prompt: contender.run(prompt, new))

    others = {label: builder(contender) for label, contender in contenders.items() if label != BASELINE}
    lossy = {}
    if INT8 in others:
        lossy[INT8] = declared_lossy(agreement(contenders[INT8].fast), at_least=INT8_AGREEMENT, name="top-1 agreement")
    result = compare(
        builder(contenders[BASELINE]), others, label=BASELINE, make_inputs=lambda number: (prompt_of(number),),
        replicates=1, min_run_time=seconds, lossy=lossy,
        allow_nondeterministic=True,  # else each text is written twice; equal tokens are asked for anyway
    )  # fmt: skip
    print(f"\n{new} new tokens\n{result}")
    missed = []
    for label in others:
        row = result[label]
        print(f"{label}: {row.median_s / new * 1e3:.2f} ms per token, {row.equivalence}" if row.speedup else row.error)
        if row.verdict in ("invalid", "error"):
            missed.append(f"{label}: {row.verdict}, {row.error or row.equivalence}")
        elif row.speedup < GOALS.get(label, 0):
            missed.append(f"{label}: {row.speedup:.1f}x, goal {GOALS[label]:.0f}x")
    return missed


def share_of_limit(label: str, contender: Contender, new: int, passes: int) -> list[str]:
    """Bytes per token over the read bandwidth, against the time per token: same threads, same rounds."""
    fast, prompt = contender.fast, prompt_of(0)
    need = np.mean([fast.bytes_per_token(PROMPT_TOKENS + i) for i in range(new)])
    large, own = torch.ones(BUFFER // 4), torch.ones(round(need / 4))

    def read(buffer: torch.Tensor, times: int) -> Callable[[], None]:
        return lambda: [buffer.sum() for _ in range(times)]

    torch.set_num_threads(contender.threads)
    own_reads = round(READS * BUFFER / own.nbytes)
    taken = interleaved(
        {"text": lambda: fast.generate(prompt, new), "large": read(large, READS), "own": read(own, own_reads)}, passes
    )
    token = taken["text"] / new
    share = need * taken["large"] / (READS * large.nbytes) / token
    beside = need * taken["own"] / (own_reads * own.nbytes) / token
    rate = np.median(READS * large.nbytes / taken["large"]) / 1e9
    low, high = share.min(), share.max()
    print(
        f"{label}: {need / 1e6:.1f} MB a token, {np.median(token) * 1e3:.2f} ms; {np.median(share):.0%} of the limit "
        f"({low:.0%} to {high:.0%} in {len(share)} passes), which is {rate:.0f} GB/s with {contender.threads} "
        f"thread(s); {np.median(beside):.0%} of that of a buffer of its own size"
    )
    if label == FLOAT and np.median(share) < GOAL_SHARE:
        return [f"{label}: {np.median(share):.0%} of the limit, goal {GOAL_SHARE:.0%}"]
    return []


def long_context(label: str, contender: Contender, passes: int = 120) -> list[str]:
    """The time of one token at position 4,096 over that at 512, against the ratio of bytes.

    Fixed costs make this ratio better, not worse. So the time that was added is set beside the bytes that were added.
    """
    fast = contender.fast
    torch.set_num_threads(contender.threads)
    for cached in fast.cache:
        cached.normal_(generator=torch.Generator().manual_seed(0))
    arguments = {place: fast.arguments(1, place - 1) for place in (SHORT, LONG)}
    calls = {place: lambda given=given: fast.step(*given) for place, given in arguments.items()}
    large = torch.ones(BUFFER // 4)
    taken = interleaved(calls | {"large": large.sum}, passes, prewarm=1)  # the caches hold what this position reads
    times = float(np.median(taken[LONG] / taken[SHORT]))
    need = {place: fast.bytes_per_token(place - 1) for place in (SHORT, LONG)}
    size = need[LONG] / need[SHORT]
    rate = large.nbytes / taken["large"]
    extra = float(np.median((need[LONG] - need[SHORT]) / rate / (taken[LONG] - taken[SHORT])))
    print(
        f"{label}: a token at {LONG:,} takes {times:.2f} times one at {SHORT}; bytes {size:.2f}; "
        f"quotient {times / size:.2f}; the added bytes alone are read at {extra:.0%} of the limit"
    )
    if label == FLOAT and times / size > GOAL_LONG:
        return [f"{label}: long context {times / size:.2f} times the ratio of bytes, goal {GOAL_LONG}"]
    return []


def bench(new: int, seconds: float, passes: int, rungs: bool) -> list[str]:
    most = torch.get_num_threads()
    contenders = build(gpt.load("full"), new, rungs)
    choose_threads(contenders, 32, most)
    missed = race(contenders, new, seconds)
    for label, contender in contenders.items():
        if contender.fast is not None:
            print()
            missed += share_of_limit(label, contender, new, passes)
            missed += long_context(label, contender)
    return missed


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="./cookbook bench decode", description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=8.0, help="of timed runs for each contender of the race")
    parser.add_argument("--passes", type=int, default=12, help="over the limit and the text")
    parser.add_argument("--rungs", action="store_true", help="also torch.compile: a minute longer")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    start = clock.default_timer()()
    print(describe("cpu"), flush=True)
    with torch.no_grad():
        missed = bench(options.new_tokens, options.seconds, options.passes, options.rungs)
    print("\n" + ("\n".join(f"MISSED  {line}" for line in missed) or "every goal reached"))
    print(f"{clock.default_timer()() - start:.0f} s")


if __name__ == "__main__":
    main()
