"""Training with the largest batch for which the memory suffices, after every failure from a clean start."""

from samples import begin, digits, norm, report, train_on
from torch.optim import AdamW
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, release_memory

ROOM = 96 * 64 * 4  # bytes of a batch's values that are taken to fit into the memory of this machine

accelerator = Accelerator(cpu=True)
tried = []


@find_executable_batch_size(starting_batch_size=128)
def train(batch_size):
    """Train for two epochs and return the loss of each batch."""
    accelerator.free_memory()
    tried.append(batch_size)
    model, optimizer, loader = begin(accelerator, 2, AdamW, DataLoader(digits(0, 640), batch_size=batch_size), lr=0.01)
    losses = []
    for _ in range(2):
        for batch in loader:
            if batch[0].nbytes > ROOM:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate too much.")
            loss = train_on(accelerator, model, optimizer, batch)
            losses.append(accelerator.gather(loss.reshape(1)).mean().item())
    weights = norm(accelerator, model)
    model, optimizer, loader = release_memory(model, optimizer, loader)
    return losses, weights


losses, weights = train()
report(accelerator, tried=tried, losses=losses, weights=weights)
