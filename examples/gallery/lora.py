"""Train a small transformer on Python code, then teach it prose by LoRA: only small matrices beside its weights learn.

    accel launch --cpu --num-processes 2 examples/gallery/lora.py

Shows parameters that need no gradient, an optimizer for a part of a model, and saving only what was trained.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed
from corpus import Transformer, code, next_character_loss, prose, test_loss, windows
from report import finish, folder

RANK = 4


class LoRA(nn.Module):
    """A linear layer that stays as it is, and a product of two small matrices beside it that learns."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain = plain
        self.down = nn.Parameter(torch.randn(RANK, plain.in_features) / plain.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(plain.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Add what was learned to what the plain layer gives."""
        result: Tensor = self.plain(x) + 2 * (x @ self.down.T @ self.up.T)
        return result


def train(accelerator: Accelerator, model: nn.Module, data: TensorDataset, rate: float, epochs: int) -> list[float]:
    """Train what needs gradients, and return the loss of every epoch's last batch, averaged over all processes."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    losses = []
    for _ in range(epochs):
        for (window,) in loader:
            loss = next_character_loss(wrapped, window)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    accelerator.free_memory()
    return losses


def main() -> None:
    """Train the base, freeze it, train the adapters, compare."""
    target = folder(__doc__, "lora")
    accelerator = Accelerator()
    set_seed(0)
    model = Transformer().to(accelerator.device)
    base_losses = train(accelerator, model, windows(code(100_000))[0], rate=2e-3, epochs=2)

    data, held_out = windows(prose())
    test_loader = accelerator.prepare(DataLoader(held_out, batch_size=64))
    before = test_loss(accelerator, model, test_loader)
    model.requires_grad_(False)
    for layer in model.layers:
        for name in ("qkv", "out", "wide", "narrow"):
            setattr(layer, name, LoRA(getattr(layer, name)).to(accelerator.device))
    adapter_losses = train(accelerator, model, data, rate=4e-3, epochs=3)
    after = test_loss(accelerator, model, test_loader)

    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    accelerator.save(learned, target / "adapters.safetensors", safe_serialization=True)
    accelerator.wait_for_everyone()
    total, trained = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in learned.values())
    assert after < before, "the adapters have learned"
    rows = {
        "processes": accelerator.num_processes,
        "weights trained": f"{trained:,} of {total:,}",
        "loss on prose": f"{before:.2f} before, {after:.2f} after",
        "file": f"{(target / 'adapters.safetensors').stat().st_size // 1024} KiB",
    }
    finish(accelerator, target, "LoRA", rows, {"base, on code": base_losses, "adapters, on prose": adapter_losses})


if __name__ == "__main__":
    main()
