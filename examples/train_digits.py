"""Train a small vision model on real handwritten digits, on as many processes as you like.

    accel launch --cpu --num-processes 2 examples/train_digits.py
    accel launch --cpu --num-processes 2 examples/train_digits.py --resume

The first command trains to the end, and saves a state in the middle of an epoch on its way. The second starts from that
state in new processes, trains to the end, and compares its weights with those of the first, bit by bit.

SIGTERM and SIGUSR1 make it save its state and leave; the same command goes on from there.
"""

import argparse
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, preemption, set_seed, tqdm
from digits import DigitNet, datasets, table

EPOCHS = 6
BATCH = 32  # per process
ACCUMULATION = 2
WARM_UP = 0.1  # of the schedule


class Progress:
    """How far the training is; saved and restored with everything else."""

    def __init__(self) -> None:
        self.batch = 0
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Return the counters."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the counters of a saved state."""
        vars(self).update(state)


def warm_up_then_cosine(steps: int) -> Callable[[int], float]:
    """Return the learning rate's factor as a function of the step: up to 1 in a straight line, down to 0 in an arc."""
    first = max(1, int(steps * WARM_UP))

    def factor(step: int) -> float:
        if step < first:
            return (step + 1) / first
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - first) / (steps - first))))

    return factor


def accuracy(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """Return the share of digits that the model reads correctly, and the number of digits it was asked."""
    model.eval()
    right = asked = 0
    for images, labels in loader:
        with torch.no_grad():
            guesses = model(images).argmax(1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        right += int((guesses == labels).sum())
        asked += len(labels)
    model.train()
    return right / asked, asked


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read all the safetensors files of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def main() -> None:
    """Train, or go on from the saved state, then test on the held-out digits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"), help="where states, logs and weights go")
    parser.add_argument(
        "--state", help="where the state of mid-way goes instead: a folder, or an address as s3://bucket/it"
    )
    parser.add_argument("--resume", action="store_true", help="start from the state that was saved mid-way")
    args = parser.parse_args()
    state, saved = args.state or args.folder / "state", args.folder / "model"
    preempted = args.folder / "preempted"
    preemption.watch()

    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, log_with="tensorboard", project_dir=args.folder / "logs"
    )
    set_seed(0)
    torch.backends.cudnn.deterministic = True  # on a GPU, convolutions give the same bits each time
    train, test = datasets()
    model = DigitNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    test_loader = DataLoader(test, batch_size=64)
    steps = EPOCHS * math.ceil(len(train_loader) / ACCUMULATION)  # as one process counts: see docs/guides/schedules.md
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine(steps))
    model, optimizer, train_loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, test_loader, schedule
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.init_trackers("digits", config={"epochs": EPOCHS, "batch": BATCH, "ranks": accelerator.num_processes})

    if args.resume:
        accelerator.load_state(state)
    elif preempted.is_dir():
        accelerator.load_state(preempted)
    elif accelerator.is_main_process:
        shutil.rmtree(state, ignore_errors=True)
    accelerator.wait_for_everyone()
    begun_at = progress.step
    per_epoch = math.ceil(len(train_loader) / ACCUMULATION)
    middle = EPOCHS * per_epoch // 2 + per_epoch // 3  # an optimizer step inside an epoch

    bar = tqdm(total=EPOCHS * len(train_loader), initial=progress.batch, ncols=80, mininterval=1)
    while train_loader.iteration < EPOCHS:  # a state that is saved after the last batch of an epoch has the next one
        for images, labels in train_loader:  # a loaded state makes it go on where it stood, inside the epoch
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress.batch += 1
            bar.update()
            if accelerator.sync_gradients:
                progress.step += 1
                accelerator.log({"loss": loss.item(), "rate": schedule.get_last_lr()[0]}, step=progress.step)
                if progress.step == middle and not args.resume:
                    accelerator.save_state(state)
                if preemption.requested():  # not inside a window: a state holds no accumulated gradients
                    accelerator.save_state(preempted)
                    preemption.leave()
    bar.close()

    score, asked = accuracy(accelerator, model, test_loader)
    accelerator.log({"test accuracy": score}, step=progress.step)
    target = args.folder / "resumed" if args.resume else saved
    accelerator.save_model(model, target, max_shard_size="60KB")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(preempted, ignore_errors=True)  # the run is over
    accelerator.end_training()

    rows: dict[str, object] = {
        "processes": accelerator.num_processes,
        "optimizer steps": f"{begun_at} to {progress.step}",
        "held-out digits tested": asked,
        "test accuracy": f"{score:.4f}",
        "weights": f"{len(list(target.glob('*.safetensors')))} files in {target}",
    }
    assert asked == len(test), f"tested {asked} digits instead of {len(test)}"
    assert score >= 0.97, f"the test accuracy is {score:.4f}, and should be at least 0.97"
    if args.resume:
        straight, resumed = weights(saved), weights(target)
        same = straight.keys() == resumed.keys() and all(torch.equal(straight[n], resumed[n]) for n in straight)
        rows["equal to the uninterrupted run"] = f"{same}, bit for bit, {len(straight)} tensors"
        assert same, "the resumed run ended with other weights than the uninterrupted one"
    accelerator.print(table("resumed from the middle" if args.resume else "trained straight through", rows))


if __name__ == "__main__":
    main()
