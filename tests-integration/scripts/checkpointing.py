"""Checkpoints inside an epoch: a run that is taken up again ends with the weights of one that never stopped."""

import tempfile
from pathlib import Path

from samples import classifier, digits, norm, report, train_on
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list, set_seed

EPOCHS, EVERY = 3, 7


def parts(accelerator):
    """Make everything that a run is made of."""
    set_seed(12)
    model = classifier()
    optimizer = AdamW(model.parameters(), lr=0.01)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    loader = DataLoader(digits(0, 320), batch_size=16)
    return accelerator.prepare(model, optimizer, schedule, loader)


def train(accelerator, model, optimizer, schedule, loader, begin=0, save=False):
    """Train from a step on, and return the loss of each step."""
    losses = []
    for epoch in range(begin // len(loader), EPOCHS):
        passed = begin % len(loader) if epoch == begin // len(loader) else 0
        batches = accelerator.skip_first_batches(loader, passed) if passed else loader
        for index, batch in enumerate(batches, epoch * len(loader) + passed + 1):
            loss = train_on(accelerator, model, optimizer, batch)
            schedule.step()
            losses.append(accelerator.reduce(loss, "mean").item())
            if save and index % EVERY == 0:
                accelerator.save_state()
    return losses


accelerator = Accelerator(cpu=True)
folder = broadcast_object_list([tempfile.mkdtemp() if accelerator.is_main_process else None])[0]
project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=3)
accelerator.project_configuration = project
model, optimizer, schedule, loader = parts(accelerator)
whole = train(accelerator, model, optimizer, schedule, loader, save=True)
straight, rate = norm(accelerator, model), schedule.get_last_lr()
accelerator.wait_for_everyone()
kept = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
accelerator.free_memory()

model, optimizer, schedule, loader = parts(accelerator)
accelerator.load_state(str(Path(folder, "checkpoints", kept[-1])))
begin = EVERY * (int(kept[-1].rpartition("_")[2]) + 1)
rest = train(accelerator, model, optimizer, schedule, loader, begin=begin)
report(
    accelerator, kept=kept, begin=begin, losses=whole, rest=rest, same=rest == whole[begin:], rate=rate,
    weights=straight, equal=norm(accelerator, model) == straight, same_rate=schedule.get_last_lr() == rate,
)  # fmt: skip
