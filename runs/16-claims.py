# %% [markdown]
# # Claims checked
#
# Claims about data parallel training that no other run of the book looks at.

# %% name="setup"
import itertools

import torch
import torch.distributed as dist
from torch import nn

from book import data_dir, provenance, record, show_ranks, table
from finetune.data import encode, load_mrpc
from finetune.model import load_tokenizer
from miniddp import DistributedSampler, SimpleDDP, run_ranks, set_seed
from miniddp.process import device

WORLD_SIZE = 2
provenance(device=device(), world_size=[WORLD_SIZE, 3], backend="gloo")
pairs = load_mrpc(data_dir())
rows = pairs[:]
tokenizer = load_tokenizer(rows["sentence1"] + rows["sentence2"], "tiny", pretrained=False)
encoded = encode(pairs, tokenizer, max_length=512)
lengths = [len(ids) for ids in encoded["input_ids"]]
print(f"{len(lengths)} pairs, the shortest of {min(lengths)} tokens, the longest of {max(lengths)}")

# %% [markdown]
# ## A check of replicas that half of the ranks pass
#
# Every rank receives rank 0's parameters and compares them with its own. Rank 0 compares its
# parameters with themselves.


# %% name="check"
def compare_with_rank_0(module: nn.Module) -> None:
    for parameter in module.parameters():
        of_rank_0 = parameter.detach().clone()
        dist.broadcast(of_rank_0, src=0)
        if not torch.equal(parameter, of_rank_0):
            raise ValueError("the parameters differ")


# %% name="verification" ranks="3"
def build_and_compare(rank: int) -> tuple[bool, bool]:
    set_seed(rank == 1)  # rank 1 has another seed
    module = nn.Linear(3, 1, bias=False).to(device())
    raised = []
    for name, check in (("compare_with_rank_0", compare_with_rank_0), ("SimpleDDP", SimpleDDP)):
        try:
            check(module)
            raised.append(False)
        except ValueError as error:
            raised.append(True)
            print(f"{name}: ValueError: {str(error).partition(' (')[0]}")
        else:
            print(f"{name}: no error")
    return raised[0], raised[1]


verdicts = run_ranks(build_and_compare, 3)
assert verdicts == [(False, True), (True, True), (False, True)]
show_ranks(verdicts)


# %% [markdown]
# ## Equal numbers of samples are not equal work
#
# `DistributedSampler` gives every rank as many pairs. Batches are padded to their longest pair.

# %% name="equal-counts"
BATCH = 16
orders = [
    list(DistributedSampler(lengths, num_replicas=WORLD_SIZE, rank=rank, shuffle=True, seed=0))
    for rank in range(WORLD_SIZE)
]
assert len(orders[0]) == len(orders[1])
rows = []
padded = []  # tokens in each batch of each rank
for rank, order in enumerate(orders):
    firsts = range(0, len(order) - BATCH + 1, BATCH)
    batches = [BATCH * max(lengths[i] for i in order[first : first + BATCH]) for first in firsts]
    rows.append([rank, len(order), sum(batches), min(batches), max(batches)])
    padded.append(batches)
table(rows, ["rank", "pairs", "padded tokens", "in the smallest batch", "in the largest"])
ratios = [max(step) / min(step) for step in zip(*padded, strict=True)]
assert max(ratios) > 1, "in some step a rank has more to do"
record(batch=BATCH, steps=len(ratios), worst_ratio=max(ratios))

# %% [markdown]
# ## Ranks in a notebook
#
# This run is a notebook. The function of this cell goes to new processes by value.


# %% name="notebook" ranks="2"
def add_up(rank: int) -> int:
    number = torch.tensor(rank + 1)
    dist.all_reduce(number)
    return number.item()


sums = run_ranks(add_up, WORLD_SIZE)
print("the sum of 1 and 2 on both ranks:", list(sums))
assert sums == [3, 3]

# %% [markdown]
# ## Small slips in popular code
#
# A broadcast into a clone, buffers in a forward pass without gradients, and three short ones.


# %% name="clone" ranks="2"
def broadcast_into_a_clone(rank: int) -> list[float]:
    set_seed(rank)
    weight = nn.Linear(1, 1, device=device()).weight
    before = weight.item()
    dist.broadcast(weight.detach().clone(), src=0)
    return [rank, before, weight.item()]


weights = run_ranks(broadcast_into_a_clone, WORLD_SIZE)
assert all(before == after for _, before, after in weights)
assert weights[0][1] != weights[1][1]
table(weights, ["rank", "weight before", "after"])


# %% name="no-grad" ranks="2"
def running_means(rank: int) -> list[float]:
    ddp = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(1).to(device()))
    batch = torch.ones(2, 1, device=device())
    ddp(batch).sum().backward()
    ddp.eval()
    found = []
    for _ in range(2):
        ddp.module.running_mean.fill_(rank)
        with torch.no_grad():
            ddp(batch)
        found.append(ddp.module.running_mean.item())
    return found


passes = list(zip(*run_ranks(running_means, WORLD_SIZE), strict=True))
assert passes == [(0, 0), (0, 1)]
table(
    [[name, *found] for name, found in zip(("first", "second"), passes, strict=True)],
    ["forward without gradients", "rank 0's running mean", "rank 1's"],
)


# %% name="short"
class WithoutSuper(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(1, 1)


for i in itertools.count():
    if i > 20:
        break
print(f"if i > 20: break ends the loop after {i} steps")
for call in ("dist.get_process_group()", "WithoutSuper()"):
    try:
        eval(call)
    except AttributeError as error:
        print(f"{call}:\n    {error}")
    else:
        raise AssertionError(f"{call} works")
