"""Let a small network learn from a large one, and compare it with the same small network that learned alone.

    accel launch --cpu --num-processes 2 examples/gallery/distillation.py

Shows a model that is used and not trained: it is moved to the device and not prepared.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel import Accelerator, set_seed
from report import finish, folder

sys.path.insert(0, str(Path(__file__).parents[1]))
from digits import DigitNet, datasets

TEMPERATURE, EPOCHS = 3.0, 8


def train(
    accelerator: Accelerator, model: nn.Module, teacher: nn.Module | None, epochs: int
) -> tuple[nn.Module, list[float]]:
    """Train on labels, and on a teacher's scores where there is one; return the model and its test accuracies."""
    train_data, test_data = datasets()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, test_loader = DataLoader(train_data, batch_size=32, shuffle=True), DataLoader(test_data, batch_size=64)
    wrapped, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    accuracies = []
    for _ in range(epochs):
        for images, labels in loader:
            scores = wrapped(images)
            loss = nn.functional.cross_entropy(scores, labels)
            if teacher is not None:
                with torch.no_grad():
                    wanted = teacher(images)
                loss = 0.1 * loss + 0.9 * soft_loss(scores, wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        right = asked = 0
        for images, labels in test_loader:
            with torch.no_grad():
                guesses = wrapped(images).argmax(1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            right, asked = right + int((guesses == labels).sum()), asked + len(labels)
        accuracies.append(right / asked)
    plain = accelerator.unwrap_model(wrapped)
    accelerator.free_memory()
    return plain, accuracies


def soft_loss(scores: Tensor, wanted: Tensor) -> Tensor:
    """Return how far a student's scores are from a teacher's, both softened (Hinton et al. 2015)."""
    student, teacher = (values.div(TEMPERATURE).log_softmax(1) for values in (scores, wanted))
    return TEMPERATURE**2 * nn.functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def main() -> None:
    """Train a teacher, a student that learns from it, and the same student alone."""
    target = folder(__doc__, "distillation")
    accelerator = Accelerator()
    set_seed(0)
    teacher, teacher_accuracy = train(accelerator, DigitNet(channels=32, depth=2), None, epochs=5)
    teacher.eval().requires_grad_(False)
    set_seed(1)
    student, taught = train(accelerator, DigitNet(channels=4, depth=1), teacher, EPOCHS)
    set_seed(1)
    _, alone = train(accelerator, DigitNet(channels=4, depth=1), None, EPOCHS)

    sizes = [sum(p.numel() for p in model.parameters()) for model in (teacher, student)]
    rows = {
        "processes": accelerator.num_processes,
        "teacher": f"{sizes[0]:,} weights, test accuracy {teacher_accuracy[-1]:.3f}",
        "student, taught": f"{sizes[1]:,} weights, test accuracy {taught[-1]:.3f}",
        "student, alone": f"{sizes[1]:,} weights, test accuracy {alone[-1]:.3f}",
    }
    finish(accelerator, target, "Distillation", rows, {"student, taught": taught, "student, alone": alone})


if __name__ == "__main__":
    main()
