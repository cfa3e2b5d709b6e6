r"""Train a small language model on Python's reference manual, and let it write.

    accel launch --cpu --num-processes 2 examples/gallery/language_model.py

On two processes that share the model out:

    accel launch --cpu --num-processes 2 --use-parallelism-config --parallelism-config-pp-size 2 \
        examples/gallery/language_model.py

Shows gradient accumulation, gradient clipping, a schedule, a loss averaged over all processes, a meter of the steps,
and averaged weights, which are tested and saved. The text comes with Python.
"""

import math

import torch
from torch.utils.data import DataLoader

from accel import Accelerator, MeterKwargs, set_seed
from corpus import LENGTH, Transformer, next_character_loss, prose, test_loss, windows, write_on
from report import finish, folder

EPOCHS = 5


def main() -> None:
    """Train on nine tenths of the text, test on the rest."""
    target = folder(__doc__, "language_model")
    meter = MeterKwargs(tokens=lambda batch: batch[0][:, 1:].numel())  # characters that are predicted
    accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[meter])
    set_seed(0)
    train, test = windows(prose())
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loader, test_loader = DataLoader(train, batch_size=8, shuffle=True), DataLoader(test, batch_size=64)
    steps = EPOCHS * math.ceil(len(loader) / 2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    test_loader = accelerator.prepare(test_loader)
    ema = accelerator.ema(model, decay=0.98)

    at, losses = [], []
    for epoch in range(EPOCHS):
        for number, (window,) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = next_character_loss(model, window)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if number % 10 == 0:
                at.append(epoch * len(loader) + number + 1)
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))

    with ema.applied():
        tested = test_loss(accelerator, model, test_loader)
        accelerator.save_model(model, target)
        text = write_on(accelerator.unwrap_model(model), "The ", 50)
    rows = {
        "processes": accelerator.num_processes,
        "training text": f"{len(train) * LENGTH:,} characters",
        "bits per character": f"{tested / math.log(2):.2f} on text it has not seen",
        "it writes": text.replace("\n", " "),
    }
    finish(accelerator, target, "Language model", rows, {"x": at, "training loss": losses})


if __name__ == "__main__":
    main()
