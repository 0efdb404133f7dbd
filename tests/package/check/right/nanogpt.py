"""The style of nanoGPT: random offsets by a rank's seed, accumulation by a flag, AdamW groups."""

import contextlib
import math
import os

import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, vocab, n_embd = 8, 4, 32, 16
gradient_accumulation_steps = 8
init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
seed_offset = ddp_rank
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + seed_offset)
text = torch.randint(vocab, (2000,), generator=torch.Generator().manual_seed(3))


def get_batch(split):
    data = text[:1800] if split == "train" else text[1800:]
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.drop = nn.Dropout(0.1)
        self.attn = nn.Linear(n_embd, 3 * n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        q, k, v = self.attn(self.drop(self.wte(idx))).split(n_embd, dim=2)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 * self.training)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, vocab), targets.view(-1))
        return logits, loss


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}],
    lr=1e-3,
    betas=(0.9, 0.95),
)
scaler = torch.amp.GradScaler("cpu", enabled=False)
model = DDP(model)
raw_model = model.module


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {}
    for split in ["train", "val"]:
        losses = torch.zeros(2)
        for k in range(2):
            x, y = get_batch(split)
            _, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


x, y = get_batch("train")
iter_num = 0
while True:
    lr = 1e-3 * 0.5 * (1.0 + math.cos(math.pi * iter_num / 10))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % 5 == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: {losses['val']:.4f}")
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with contextlib.nullcontext():
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > 10:
        break
destroy_process_group()
