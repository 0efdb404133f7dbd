"""Break one line at a time: a named test must notice.

Each mutation is a mistake that somebody could make, or has published.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from ..forked import fast_bin

ROOT = Path(__file__).parents[2]
DDP = "tests/package/test_ddp.py::"


class Mutation(NamedTuple):
    what: str
    file: str
    line: str
    broken: str
    test: str


MUTATIONS = [
    Mutation(
        "skip the divide",
        "ddp/reducer.py",
        "bucket.buffer().mul_(1 / self.world_size)",
        "pass",
        f"{DDP}test_like_torch[follows_single_process-miniddp]",
    ),
    Mutation(
        "forward bucket order",
        "bucket.py",
        "plan.sort(key=min, reverse=True)",
        "plan.sort(key=min)",
        f"{DDP}test_the_same_buckets_as_torch[True-0.02]",
    ),
    Mutation(
        "forgotten reset of the buckets",
        "ddp/reducer.py",
        "bucket.pending = set(bucket.indices)",
        "pass",
        f"{DDP}test_like_torch[full_buckets-miniddp]",
    ),
    Mutation(
        "every rank rebuilds in its own ready order",
        "ddp/reducer.py",
        "dist.broadcast(order, group=self.group, group_src=0)",
        "pass",
        f"{DDP}test_like_torch[ready_order_differs-miniddp]",
    ),
    Mutation(
        "gradients are lost when buckets are rebuilt",
        "ddp/reducer.py",
        "self.parameters[i].grad = view.copy_(gradient).detach()",
        "self.parameters[i].grad = view.detach()",
        f"{DDP}test_like_torch[two_backwards_accumulate-miniddp]",
    ),
    Mutation(
        "a parameter without gradient goes unnoticed",
        "ddp/reducer.py",
        "if self.expecting and self.ready:",
        "if False:",
        f"{DDP}test_like_torch[a_missing_gradient-miniddp]",
    ),
    Mutation(
        "a second backward adds to the mean",
        "ddp/reducer.py",
        "raise errors.averaged_already()",
        "pass",
        f"{DDP}test_a_second_backward_through_one_forward",
    ),
    Mutation(
        "gradients are not copied out of the bucket",
        "ddp/reducer.py",
        "copy_all(gradients, means)",
        "pass",
        f"{DDP}test_like_torch[gradients_not_views-miniddp]",
    ),
    Mutation(
        "no_sync covers nothing",
        "ddp/wrapper.py",
        "self.require_backward_grad_sync = False",
        "pass",
        f"{DDP}test_like_torch[accumulation-miniddp]",
    ),
    Mutation(
        "no_sync is never left",
        "ddp/wrapper.py",
        "self.require_backward_grad_sync = before",
        "pass",
        f"{DDP}test_like_torch[no_sync_is_restored_after_an_exception-miniddp]",
    ),
    Mutation(
        "synchronise the first micro-batches instead of the last",
        "ddp/wrapper.py",
        "sync = torch.is_grad_enabled() and self.require_backward_grad_sync",
        "sync = torch.is_grad_enabled() and not self.require_backward_grad_sync",
        f"{DDP}test_like_torch[accumulation-miniddp]",
    ),
    Mutation(
        "buffers are not broadcast before forward",
        "ddp/wrapper.py",
        "replicate.broadcast_coalesced(buffers, self.process_group)",
        "pass",
        f"{DDP}test_like_torch[batch_norm_buffers-miniddp]",
    ),
    Mutation(
        "weights are not broadcast at the start",
        "ddp/wrapper.py",
        "replicate.broadcast_module(\n"
        "                module, process_group, buffers=buffers_at_start\n"
        "            )",
        "pass",
        f"{DDP}test_like_torch[follows_single_process-miniddp]",
    ),
    Mutation(
        "a bucket closes one parameter late",
        "bucket.py",
        ">= caps.get(kind, first_cap_bytes)",
        "> caps.get(kind, first_cap_bytes)",
        "tests/package/test_bucket.py::test_the_same_plan_as_torch",
    ),
    Mutation(
        "a hook sums without dividing",
        "hooks.py",
        "numbers.div_(dist.get_world_size(process_group))",
        "pass",
        "tests/package/test_hooks.py::test_the_mean_up_to_the_precision_of_what_is_sent",
    ),
    Mutation(
        "PowerSGD forgets what it lost",
        "hooks.py",
        "matrix.add_(error)",
        "pass",
        "tests/package/test_hooks.py::test_power_sgd_makes_up_for_what_it_lost",
    ),
    Mutation(
        "the ring sends the wrong chunk",
        "ring.py",
        "((rank - s - 1) % size, (rank - s - 2) % size)",
        "((rank - s) % size, (rank - s - 2) % size)",
        "tests/package/test_ring.py::test_each_rank_receives_what_its_left_neighbour_sends",
    ),
    Mutation(
        "the ring stops one step early",
        "ring.py",
        "(rank - s - 1) % size) for s in range(size - 1)]",
        "(rank - s - 1) % size) for s in range(size - 2)]",
        "tests/package/test_ring.py::test_all_gather_brings_every_chunk_to_every_rank",
    ),
    Mutation(
        "SimpleDDP sums without dividing",
        "naive.py",
        "gradient /= world_size",
        "pass",
        "tests/package/test_naive.py::test_every_rank_trains_like_one_process",
    ),
    Mutation(
        "every rank takes the first shard",
        "sampler.py",
        "return range(rank, length, world_size)",
        "return range(0, length, world_size)",
        "tests/package/test_sampler.py::test_indices_are_torchs",
    ),
    Mutation(
        "every epoch has the same shuffle",
        "sampler.py",
        "manual_seed(seed + epoch)",
        "manual_seed(seed)",
        "tests/package/test_sampler.py::test_another_epoch_and_another_seed_are_other_orders",
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.what for m in MUTATIONS])
def test_a_broken_line_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    package = tmp_path / "miniddp"
    shutil.copytree(ROOT / "src/miniddp", package, ignore=shutil.ignore_patterns("__pycache__"))
    source = (package / mutation.file).read_text()
    assert source.count(mutation.line) == 1, f"{mutation.file} has not one line {mutation.line!r}"
    (package / mutation.file).write_text(source.replace(mutation.line, mutation.broken))
    result = subprocess.run(
        [
            fast_bin() / "python",
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            mutation.test,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert result.returncode == 1, f"{mutation.test} did not notice:\n{result.stdout[-2000:]}"
