"""The recipe that `./cookbook new` writes: a small true one that runs, with a note in each part on what belongs there.

The text of a cell comes after a line `# %%` with its tag, or `# %% md`. NAME and NUMBER are replaced.
"""

TEXT = r"""
# %% md
# A chain that writes in place

**Claim** A chain of elementwise operations that writes in place keeps one buffer alive instead of two, and gives the
same bits.

**Cost** At most 60 s on two cores, memory for a few million numbers.

**Needs** PyTorch; no GPU.

**Source** Where the claim comes from: a document, a paper, an issue; with its ids when `data/claims.yaml` has them.

> *To the author:* this recipe runs and passes `./cookbook check NUMBER`. Replace it part by part; a note like this one
> says what belongs there. Delete the notes last. Then `./cookbook refresh NUMBER` stores the outputs and
> `./cookbook test notebooks/NAME.ipynb` compares them.

# %% md
## Learn

`x * 2 + 1` looks like one operation. It is two, and each of them asks for a new block of memory, fills it, and leaves
the old one behind. Count the blocks before you read on.

> *To the author:* begin with what the reader can see or guess. Then the parameters: one line each, a plain type, a
> default that is small enough for a laptop, a comment that becomes the help text. `device`, `seed` and `rows` stay.

# %% parameters
n: int = 1_000_000  # how many numbers
device: str = "auto"  # auto, cpu or cuda
seed: int = 0  # seed of the input
rows: str = ""  # file to which result rows are appended; empty: none

# %%
import torch

from utils import expect
from utils.cost import peak_memory
from utils.equivalence import check_equivalence
from utils.figures import axes, finish, table
from utils.machine import describe, pick_device
from utils.rows import append_rows, from_comparison, recorded_rows
from utils.timing import compare

expect.whole(1, n=n)
place = pick_device(device)


def draw(replicate=0):  # -> [n], drawn on the CPU and then moved, so that every device gets the same numbers
    return torch.randn(n, generator=torch.Generator().manual_seed(seed + replicate)).to(place)


x = draw()

# %% machine
print(describe(place))

# %% md
### The idea in one picture

> *To the author:* one figure that makes the idea obvious, drawn from counts, bytes or layouts, never from times.

# %% figure
steps = ["x * 2", "+ 1", "relu"]
fig, ax = axes("bytes alive beside the input", "after this operation has started", "bytes")
ax.bar([0.8, 1.8, 2.8], [4 * n, 8 * n, 8 * n], width=0.35, label="new buffer each time")
ax.bar([1.2, 2.2, 3.2], [4 * n, 4 * n, 4 * n], width=0.35, label="in place")
ax.set_xticks([1, 2, 3], steps)
ax.legend()
finish(fig)

# %% md
### The slow version

> *To the author:* the baseline, and the one wasteful thing in it, named.

Each operation writes its result to a new buffer. While it runs, the old buffer is still alive.

# %% baseline
def plain(x):  # [n] -> [n]
    return torch.relu(x * 2 + 1)


print("shape of the result:", tuple(plain(x).shape) == (n,))

# %% md
### The technique

> *To the author:* the whole technique, in view, in at most 40 lines, with shapes in comments. What a reader needs to
> write it again belongs here and not in `utils`.

The first operation must make a new buffer, because `x` belongs to the caller. The others may reuse it.

# %% technique
def in_place(x):  # [n] -> [n]
    y = x * 2  # the only new buffer
    y.add_(1)
    return y.relu_()

# %% md
### Is it the same?

> *To the author:* the check comes before any clock. Print that it held, not a raw difference, which depends on the
> machine.

# %% check
same = check_equivalence(in_place(x), plain(x))
assert same
print("same result:", bool(same))

# %% md
### Break it

One edit: `mul_` instead of `*`. The first call is still right. The second call meets an input that the first one has
overwritten.

> *To the author:* the technique with one edit, for which the same check fails; without the edit it passes. Both are
> asserted and printed. A check that cannot fail proves nothing.

# %% control
def edited(x):  # [n] -> [n]
    y = x.mul_(2)  # the edit: the caller's input is overwritten
    y.add_(1)
    return y.relu_()


def second_call(fn):
    mine = x.clone()
    fn(mine)
    return check_equivalence(fn(mine), plain(x))


broken, undone = second_call(edited), second_call(in_place)
assert not broken
assert undone
print("second call, edited:", "same" if broken else "different")
print("second call, undone:", "same" if undone else "different")

# %% md
### What does it cost?

> *To the author:* predict bytes and FLOPs in plain arithmetic, count them, print the ratio.

A float32 number has 4 bytes. We predict two buffers for the slow version and one for the other.

# %% cost
predicted = {"plain": 2 * 4 * n, "in place": 4 * n}
counted = {"plain": peak_memory(plain, x).peak_bytes, "in place": peak_memory(in_place, x).peak_bytes}
table(
    [
        {"version": name, "predicted": predicted[name], "ratio": f"{counted[name] / predicted[name]:.1f}"}
        for name in predicted
    ]
)

# %% md
### How fast?

> *To the author:* one `compare`. Its output differs each time, so nbval runs this cell and does not compare it. Both
> sides are given as builders, functions that return the function to be timed.

# %% measure
result = compare(
    lambda: plain,
    {"in place": lambda: in_place},
    make_inputs=lambda replicate: (draw(replicate),),
    label="plain",
    min_run_time=0.3,
)
print(result)
append_rows(rows, from_comparison(result, recipe="NAME", namespace=globals()))

# %% md
### Where it loses

Training keeps some results for the backward pass. An operation that overwrites one of them makes the gradient
impossible.

> *To the author:* a losing case that runs. Every technique has one.

# %% limits
weight = torch.ones(3, requires_grad=True)
kept = torch.sigmoid(weight)  # its gradient is computed from its own output
kept.mul_(2)
try:
    kept.sum().backward()
    print("training: works")
except RuntimeError:
    print("training: refused, a value that the gradient needs was overwritten")

# %% md
### Try it

> *To the author:* three exercises: predict a number, change a parameter, repair a broken cell. The answers are folded.

1. **Predict.** The chain gets a fourth operation. How many buffers are alive at the peak of the slow version?

<details><summary>Answer</summary>

Still two: the old buffer and the new one. The first is free again when the third operation starts.

</details>

2. **Change.** Make the input small. Does the verdict stay?

```
papermill notebooks/NAME.ipynb build/NAME.ipynb -p n 1000
```

<details><summary>Answer</summary>

Read the verdict, not the ratio: with so little work the call itself is most of the time.

</details>

3. **Repair.** This version changes its input. Repair it with one edit.

```python
def repaired(x):
    return x.add_(1).relu_()
```

<details><summary>Answer</summary>

`x.add(1).relu_()`: the first operation must make a new buffer.

</details>

# %% md
## Evidence

> *To the author:* first the committed rows of real cards (`data/results/NAME.jsonl`) beside the prediction, and what
> the sources report, marked as reported. Then the claims.

# %% recorded
found = recorded_rows("NAME")
if found:
    table(found, ["provenance", "device_name", "param.n", "speedup", "verdict"])
else:
    print("no recorded row yet: ./cookbook run NUMBER -p device cuda, on a machine with a GPU")

# %% md
> *To the author:* `show(settle("X1", "confirmed", "one line of evidence"))` from `utils.claims` for each claim that
> `data/claims.yaml` gives to this recipe. Only checks without a clock and measured rows settle a claim.

# %% claims
print("no claim of data/claims.yaml belongs to this recipe yet")

# %% md
## Next

> *To the author:* where to go from here, with a link to a recipe.

Take a chain of your own model, and count its buffers before you change it.
"""


def cells(name: str) -> list[tuple[str, str]]:
    """(tag, source) of each cell of the recipe `name`; the tag is "md" for text and "" for a code cell without one."""
    text = TEXT.replace("NAME", name).replace("NUMBER", name[:2])
    parts = [part.partition("\n") for part in text.split("\n# %%")[1:]]
    return [(head.strip(), source.strip()) for head, _, source in parts]
