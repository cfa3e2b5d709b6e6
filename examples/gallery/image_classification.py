"""Classify handwritten digits, and count every test digit exactly once on any number of processes.

    accel launch --cpu --num-processes 2 examples/gallery/image_classification.py

Shows the five lines that make a PyTorch loop run on many processes, `gather_for_metrics`, and `save_model`.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, set_seed
from report import finish, folder

sys.path.insert(0, str(Path(__file__).parents[1]))
from digits import DigitNet, datasets

EPOCHS = 5


def main() -> None:
    """Train, and test after every epoch."""
    target = folder(__doc__, "image_classification")
    accelerator = Accelerator()
    set_seed(0)
    train, test = datasets()
    model = DigitNet(channels=16, depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, test_loader = DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

    accuracies = []
    for _ in range(EPOCHS):
        model.train()
        for images, labels in loader:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = asked = 0
        for images, labels in test_loader:
            with torch.no_grad():
                guesses = model(images).argmax(1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            right, asked = right + int((guesses == labels).sum()), asked + len(labels)
        accuracies.append(right / asked)

    accelerator.save_model(model, target)
    assert asked == len(test), "every test digit counts once"
    rows = {"processes": accelerator.num_processes, "test digits": asked, "test accuracy": f"{accuracies[-1]:.3f}"}
    finish(accelerator, target, "Handwritten digits", rows, {"test accuracy": accuracies})


if __name__ == "__main__":
    main()
