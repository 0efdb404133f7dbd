"""A training script for one GPU.

python runs/pytorch/your_script.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    for inputs, targets in DataLoader(dataset, BATCH):
        outputs = model(inputs.to(device))
        loss = nn.functional.mse_loss(outputs, targets.to(device))
        total += loss * len(inputs)
    model.train()
    return total.item() / len(dataset)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = load_data()
    loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            outputs = model(inputs.to(device))
            loss = nn.functional.mse_loss(outputs, targets.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss = evaluate(model, test, device)
        print(f"epoch {epoch}  test loss {loss:.4f}")
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
