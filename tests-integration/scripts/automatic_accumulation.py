"""Accumulation that makes up for a batch that does not fit: the batch that is observed stays the same."""

from samples import begin, digits, norm, report, train_on
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

OBSERVED = 32
FITS = 10  # samples that are taken to fit into the memory of this machine

tried, losses = [], []


@find_executable_batch_size(starting_batch_size=OBSERVED, reduce_batch_size_fn=lambda: tried[-1] // 2)
def train(batch_size):
    """Train with the largest batch that fits, and as many of them as make up the observed one."""
    tried.append(batch_size)
    if batch_size > FITS:
        raise RuntimeError("CUDA out of memory. Tried to allocate too much.")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=OBSERVED // batch_size)
    model, optimizer, loader = begin(
        accelerator, 1, SGD, DataLoader(digits(0, 404), batch_size=batch_size, shuffle=True), lr=0.5, momentum=0.9
    )
    steps = 0
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = train_on(accelerator, model, optimizer, batch)
            steps += accelerator.sync_gradients
            losses.append(accelerator.reduce(loss, "mean").item())
    report(accelerator, tried=tried, steps=steps, losses=losses, weights=norm(accelerator, model))


train()
