"""Let a small network learn from a large one where labels are few, and compare it with the same network taught by them.

    accel launch --cpu --num-processes 2 examples/gallery/distillation.py

Shows a model that is used and not trained: it is moved to the device and not prepared. Both small networks take equally
many steps: one sees all images and the large network's scores, the other the 60 images whose labels are known.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Subset

from accel import Accelerator, set_seed
from report import finish, folder

sys.path.insert(0, str(Path(__file__).parents[1]))
from digits import DigitNet, datasets

TEMPERATURE, EPOCHS, KNOWN = 3.0, 8, 60


def train(
    accelerator: Accelerator, model: nn.Module, teacher: nn.Module | None, epochs: int, known: int | None = None
) -> tuple[nn.Module, list[float]]:
    """Train on a teacher's scores, or else on labels, of which so many are known; return model and test accuracies."""
    train_data, test_data = datasets()
    chosen = Subset(train_data, range(len(train_data) if known is None else known))
    sampler = RandomSampler(chosen, replacement=known is not None, num_samples=len(train_data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, test_loader = DataLoader(chosen, batch_size=32, sampler=sampler), DataLoader(test_data, batch_size=64)
    wrapped, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    accuracies = []
    for _ in range(epochs):
        for images, labels in loader:
            scores = wrapped(images)
            if teacher is None:
                loss = nn.functional.cross_entropy(scores, labels)
            else:
                with torch.no_grad():
                    wanted = teacher(images)
                loss = soft_loss(scores, wanted)
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
    """Train a teacher, a student that learns from it, and the same student on few labels."""
    target = folder(__doc__, "distillation")
    accelerator = Accelerator()
    set_seed(0)
    teacher, teacher_accuracy = train(accelerator, DigitNet(channels=32, depth=2), None, epochs=5)
    teacher.eval().requires_grad_(False)
    set_seed(1)
    student, taught = train(accelerator, DigitNet(channels=4, depth=1), teacher, EPOCHS)
    set_seed(1)
    _, alone = train(accelerator, DigitNet(channels=4, depth=1), None, EPOCHS, KNOWN)

    sizes = [sum(p.numel() for p in model.parameters()) for model in (teacher, student)]
    rows = {
        "processes": accelerator.num_processes,
        "teacher": f"{sizes[0]:,} weights, test accuracy {teacher_accuracy[-1]:.3f}",
        "student, taught": f"{sizes[1]:,} weights, test accuracy {taught[-1]:.3f}",
        "student, 60 labels": f"{sizes[1]:,} weights, test accuracy {alone[-1]:.3f}",
    }
    finish(accelerator, target, "Distillation", rows, {"student, taught": taught, "student, 60 labels": alone})


if __name__ == "__main__":
    main()
