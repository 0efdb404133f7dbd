"""The same training script on several GPUs, or on several CPU processes.

torchrun --standalone --nproc_per_node=2 runs/pytorch/your_script_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 64, 5


def load_data():
    """Samples to train with, and samples to test with."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1500, 8, generator=generator)
    dataset = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    return torch.utils.data.random_split(dataset, [1024, 476], generator)


@torch.no_grad()
def evaluate(model, dataset, device):
    """The mean loss of all samples."""
    model.eval()
    total = torch.zeros((), device=device)
    mine = range(dist.get_rank(), len(dataset), dist.get_world_size())
    for inputs, targets in DataLoader(dataset, BATCH, sampler=mine):
        outputs = model(inputs.to(device))
        loss = nn.functional.mse_loss(outputs, targets.to(device))
        total += loss * len(inputs)
    dist.all_reduce(total)
    model.train()
    return total.item() / len(dataset)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    model.to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = load_data()
    sampler = DistributedSampler(train, drop_last=True)
    batch = BATCH // dist.get_world_size()
    loader = DataLoader(train, batch, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            outputs = ddp(inputs.to(device))
            loss = nn.functional.mse_loss(outputs, targets.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss = evaluate(model, test, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  test loss {loss:.4f}")
            torch.save(model.state_dict(), "model.pt")
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
