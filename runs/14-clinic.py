# %% [markdown]
# # The clinic
#
# Broken programs, each with its symptom, what a second look shows, and its cure. The programs of a
# case are a file in `runs/clinic`; two ranks run each of them. The assertions say that the symptom
# really occurs, and that the cure ends it.

# %% name="setup"
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from book import provenance, show_ranks, table
from clinic.around import call_the_module, call_the_wrapper, gradients_of_the_module
from clinic.branch import evaluate_on_all_ranks, evaluate_on_rank_0
from clinic.clip import clip_then_synchronise, clipped_alone, show_norms, synchronise_then_clip
from clinic.early import load_after_the_barrier, load_too_early, look_before_loading
from clinic.nan import name_the_rank, skip_the_step_together, step_with_whatever_comes
from clinic.norm import follow_the_buffer, keep_the_statistics_of_rank_0, merge_before_evaluating
from clinic.prefix import load_what_fits, save_the_module, save_the_wrapper
from clinic.reentrant import checkpoint_not_reentrant, checkpoint_reentrant
from clinic.same import SAMPLES, read_everything, read_own_part
from clinic.stop import say_when_it_would_stop, stop_alone, stop_together
from clinic.straggler import shards_dealt_in_turn, shards_in_blocks, wait_share
from clinic.uneven import compare_lengths, train_joined, train_unevenly
from clinic.unfreeze import gradients_after_unfreezing, wrap_again_after_unfreezing
from instruments.failures import error_of, failure_of, hang_of, lines_of
from miniddp import run_ranks
from miniddp.launch import RanksFailed
from miniddp.process import device

provenance(device=device(), world_size=2, backend="gloo")
HANG_SECONDS = 4


def wrapped(text: str, width: int = 38) -> str:
    """By default, lines that stand beside those of another rank."""
    lines = text.strip().splitlines()
    return "\n".join(textwrap.fill(line.strip(), width, subsequent_indent="  ") for line in lines)


def errors_of(program: Callable[..., Any], *args: Any) -> list[str]:
    """What each of two ranks ends with."""
    tracebacks = failure_of(program, 2, *args).tracebacks
    return [error_of(tracebacks.get(rank, "no error of its own")) for rank in range(2)]


def waiting_lines(program: Callable[..., Any]) -> list[str]:
    """Where each of two ranks waits."""
    stacks = hang_of(program, 2, timeout=HANG_SECONDS).stacks
    still = f"still waiting after {HANG_SECONDS} s in"
    return ["\n".join([still, *lines_of(stacks[rank])]) for rank in range(2)]


# %% [markdown]
# ## 1. Rank 1 loads a checkpoint that rank 0 has not written yet

# %% name="early-symptom"
folder = tempfile.mkdtemp()
too_early = [text.replace(folder, "checkpoints") for text in errors_of(load_too_early, folder)]
assert too_early[0] == "no error of its own"
assert "FileNotFoundError" in too_early[1]
show_ranks(map(wrapped, too_early))

# %% name="early-diagnosis"
looks = run_ranks(look_before_loading, 2, tempfile.mkdtemp())
assert "exists: True" in looks.outputs[0]
assert "exists: False" in looks.outputs[1]
show_ranks(looks)

# %% name="early-cure"
first, second = run_ranks(load_after_the_barrier, 2, tempfile.mkdtemp())
assert torch.equal(first, second)
print("both hold equal weights:", torch.equal(first, second))

# %% [markdown]
# ## 2. The names in the checkpoint begin with `module.`

# %% name="prefix-symptom"
prefixed = errors_of(save_the_wrapper)
assert all('Missing key(s) in state_dict: "0.weight"' in text for text in prefixed)
assert all('Unexpected key(s) in state_dict: "module.0.weight"' in text for text in prefixed)
show_ranks([wrapped(prefixed[0], width=70)])

# %% name="prefix-wrong-cure"
loaded = run_ranks(load_what_fits, 2)
saved, restored = loaded[0]
assert "missing: 0.weight" in loaded.outputs[0]
assert not torch.allclose(saved, restored)
show_ranks(loaded.outputs[:1])
print(f"saved {saved.item():.4f}, restored {restored.item():.4f}")

# %% name="prefix-cure"
saved, restored = run_ranks(save_the_module, 2)[0]
assert torch.equal(saved, restored)
print(f"saved {saved.item():.4f}, restored {restored.item():.4f}")

# %% [markdown]
# ## 3. Reentrant checkpointing meets `find_unused_parameters`

# %% name="reentrant-symptom"
twice = errors_of(checkpoint_reentrant)
assert all("Expected to mark a variable ready only once" in text for text in twice)
first_sentence = twice[0].partition(" This error")[0]
parameter = re.search(r"Parameter at index.*?marked as ready twice\.", twice[0])[0]
assert "second" in parameter
show_ranks([wrapped(f"{first_sentence} […]\n{parameter}", width=70)])

# %% name="reentrant-diagnosis"
rows = []
for use_reentrant in (True, False):
    for find_unused in (True, False):
        try:
            run_ranks(checkpoint_reentrant, 2, use_reentrant, find_unused)
            ending = "passes"
        except RanksFailed:
            ending = "fails"
        rows.append([f"`{use_reentrant}`", f"`{find_unused}`", ending])
assert [row[2] for row in rows] == ["fails", "passes", "passes", "passes"]
table(rows, ["use_reentrant", "find_unused_parameters", "backward"], align="lll")

# %% name="reentrant-cure"
with_checkpoint = run_ranks(checkpoint_not_reentrant, 2)[0]
without = run_ranks(checkpoint_reentrant, 2, None)[0]
assert all(torch.equal(a, b) for a, b in zip(with_checkpoint, without, strict=True))
print("gradients as without it: True")

# %% [markdown]
# ## 4. A collective that only rank 0 calls

# %% name="branch-symptom"
branched = waiting_lines(evaluate_on_rank_0)
assert "dist.all_reduce(loss)" in branched[0]
assert "dist.barrier()" in branched[1]
show_ranks(branched)

# %% name="branch-cure"
everywhere = run_ranks(evaluate_on_all_ranks, 2)
assert everywhere[0] == everywhere[1]
show_ranks([everywhere.outputs[0], everywhere.outputs[1] or "(prints nothing)"])

# %% [markdown]
# ## 5. One rank has a batch more

# %% name="uneven-symptom"
uneven = waiting_lines(train_unevenly)
assert "backward()" in uneven[0]
assert "dist.barrier()" in uneven[1]
show_ranks(uneven)

# %% name="uneven-diagnosis"
lengths = run_ranks(compare_lengths, 2)
assert lengths[0] == [4, 3]
print(lengths.outputs[0], end="")

# %% name="uneven-cure"
joined = run_ranks(train_joined, 2)
assert [count for count, _ in joined] == [4, 3]
assert joined[0][1] == 0
for rank, (count, difference) in enumerate(joined):
    print(f"rank {rank}: {count} batches, weights differ by {difference:g}")

# %% [markdown]
# ## 6. Each rank decides for itself when to stop

# %% name="stop-symptom"
stopped_alone = waiting_lines(stop_alone)
assert "dist.barrier()" in stopped_alone[0]
assert "loss.backward()" in stopped_alone[1]
show_ranks(stopped_alone)

# %% name="stop-checked"
SCRIPT = """from datetime import timedelta

import torch.distributed as dist
from clinic.stop import stop_alone

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
stop_alone(dist.get_rank())
"""
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
command += ["-m", "miniddp.check"]
environment = {**os.environ, "PYTHONPATH": "runs"}
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder, "train.py")
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([*command, script], capture_output=True, text=True, env=environment)
said = done.stderr[done.stderr.index("miniddp.check: ") :].splitlines()
assert said[0].startswith("miniddp.check: other calls: rank 0 is in barrier")
assert said[4].startswith("miniddp.check: 1 found")
print("\n".join(said[:5]))

# %% name="stop-diagnosis"
stops = run_ranks(say_when_it_would_stop, 2)
assert stops[0] < stops[1]
show_ranks(stops)

# %% name="stop-cure"
together = run_ranks(stop_together, 2)
assert together[0] == together[1] < 40
for rank, steps in enumerate(together):
    print(f"rank {rank} stops after {steps} steps")

# %% [markdown]
# ## 7. Every rank reads all the data

# %% name="same-symptom"
everything = run_ranks(read_everything, 2)
assert everything[0] == everything[1]
assert len(everything[0]) == SAMPLES
table(
    [[rank, len(samples) // 4, SAMPLES // 4 // 2] for rank, samples in enumerate(everything)],
    ["rank", "steps per epoch", "expected"],
)


# %% name="same-diagnosis"
def show_reading(per_rank: Sequence[list[int]]) -> None:
    for rank, samples in enumerate(per_rank):
        print(f"rank {rank} reads {samples[:5]} …")
    shared = set(per_rank[0]) & set(per_rank[1])
    print(f"read by both: {len(shared)} of {SAMPLES} samples")


show_reading(everything)

# %% name="same-cure"
parts = run_ranks(read_own_part, 2)
assert sorted(parts[0] + parts[1]) == list(range(SAMPLES))
show_reading(parts)

# %% [markdown]
# ## 8. The forward pass goes around the wrapper

# %% name="around-symptom"
around = run_ranks(call_the_module, 2)
assert (around[0] - around[1]).abs().max() > 0.01
assert all("replicas differ" in text for text in around.outputs)
show_ranks(around)

# %% name="around-diagnosis"
compared = run_ranks(gradients_of_the_module, 2)
assert compared.outputs[0].count("DIFFERENT") == 4
print(compared.outputs[0], end="")

# %% name="around-cure"
through = run_ranks(call_the_wrapper, 2)
assert torch.equal(through[0], through[1])
show_ranks(through)

# %% [markdown]
# ## 9. A layer is unfrozen after the model was wrapped

# %% name="unfreeze-diagnosis"
compared = run_ranks(gradients_after_unfreezing, 2)
assert re.findall(r"(\S+) +DIFFERENT", compared.outputs[0]) == ["0.weight", "0.bias"]
print(compared.outputs[0], end="")

# %% name="unfreeze-cure"
wrapped_again = run_ranks(wrap_again_after_unfreezing, 2)
assert torch.equal(wrapped_again[0], wrapped_again[1])
show_ranks(wrapped_again)

# %% [markdown]
# ## 10. Clipping before the ranks are averaged


# %% name="clip-symptom"
def similarity(gradient: torch.Tensor) -> str:
    """To that of one process."""
    cosine = torch.cosine_similarity(gradient, clipped_alone(), dim=0).item()
    return f"norm {gradient.norm():.2f}, cosine {cosine:.2f}"


clipped_first = run_ranks(clip_then_synchronise, 2)
assert torch.equal(clipped_first[0], clipped_first[1])
assert clipped_first[0].norm() < 0.9
print("one process:", similarity(clipped_alone()))
print("both ranks: ", similarity(clipped_first[0]))

# %% name="clip-diagnosis"
show_ranks(run_ranks(show_norms, 2))

# %% name="clip-cure"
clipped_last = run_ranks(synchronise_then_clip, 2)
assert torch.allclose(clipped_last[0], clipped_alone(), atol=1e-6)
print("both ranks: ", similarity(clipped_last[0]))

# %% [markdown]
# ## 11. Batch normalisation forgets what the other ranks saw


# %% name="norm-symptom"
def show_statistics(per_rank: Sequence[Sequence[float]]) -> None:
    show_ranks(
        f"running statistics  mean {mean:5.2f}  variance {variance:5.2f}\n"
        f"normalised data     mean {new_mean:5.2f}  variance {new_variance:5.2f}"
        for mean, variance, new_mean, new_variance in per_rank
    )


forgotten = run_ranks(keep_the_statistics_of_rank_0, 2)
assert abs(forgotten[0][0]) < 0.5
assert forgotten[1][0] < 1
assert forgotten[0][2] > 1
show_statistics(forgotten)

# %% name="norm-diagnosis"
show_ranks(run_ranks(follow_the_buffer, 2))

# %% name="norm-cure"
merged = run_ranks(merge_before_evaluating, 2)
assert merged[0] == merged[1]
assert abs(merged[0][0] - 2) < 0.3
assert abs(merged[0][1] - 5) < 0.5
assert abs(merged[0][2]) < 0.1
assert abs(merged[0][3] - 1) < 0.1
show_statistics(merged)

# %% [markdown]
# ## 12. One NaN, and every rank is lost

# %% name="nan-symptom"
spoiled = run_ranks(step_with_whatever_comes, 2)
assert list(spoiled) == [False, False]
assert spoiled.outputs[0].count("nan") == 2
assert spoiled.outputs[1].count("nan") == 3
show_ranks(spoiled)

# %% name="nan-diagnosis"
named = run_ranks(name_the_rank, 2)
assert [len(text) > 0 for text in named.outputs] == [False, True]
print("".join(named.outputs), end="")

# %% name="nan-cure"
skipped = run_ranks(skip_the_step_together, 2)
assert list(skipped) == [True, True]
assert all(text.count("skipped") == 1 for text in skipped.outputs)
show_ranks(skipped)

# %% [markdown]
# ## 13. One rank has the long sequences

# %% name="straggler-symptom"
blocks = run_ranks(shards_in_blocks, 2)
ratios = [times["backward"] / times["forward"] for times in blocks]
assert ratios[0] > 1.5 * ratios[1]
table(
    [[rank, f"{ratio:.1f}"] for rank, ratio in enumerate(ratios)],
    ["rank", "backward / forward"],
    align="rr",
)


# %% name="straggler-diagnosis"
def show_waiting(per_rank: Sequence[dict[str, float]]) -> None:
    table(
        [
            [rank, times["tokens"], f"{wait_share(times):.0%}"]
            for rank, times in enumerate(per_rank)
        ],
        ["rank", "tokens", "share of its time spent waiting"],
        align="rrr",
    )


probed = run_ranks(shards_in_blocks, 2, True)
assert wait_share(probed[0]) > 0.3
assert wait_share(probed[0]) > 2 * wait_share(probed[1])
show_waiting(probed)

# %% name="straggler-cure"
dealt = run_ranks(shards_dealt_in_turn, 2, True)
assert 1.3 * max(map(wait_share, dealt)) < wait_share(probed[0])
show_waiting(dealt)
