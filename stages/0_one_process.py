"""Stage 0: one process trains a small language model on Shakespeare.

python stages/0_one_process.py
"""

import os
from itertools import islice

import torch

from shakespeare import build_language_model, load_text

STEPS = int(os.environ.get("STEPS", "183"))
EPOCHS, BATCH = 3, 36


def batches(sequences):
    """`BATCH` sequences at a time, each epoch in another order."""
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(sequences), generator=generator)
        for first in range(0, len(order) - BATCH + 1, BATCH):
            yield sequences[order[first : first + BATCH]]


def main():
    torch.manual_seed(0)
    model = build_language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, _ = load_text()
    for step, batch in enumerate(islice(batches(train), STEPS), start=1):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS:
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
