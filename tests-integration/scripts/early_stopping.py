"""Early stopping: one process sees that the loss no longer falls, and all of them stop at the same step."""

from samples import begin, digits, norm, report, train_on
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelerate import Accelerator


class Patience:
    """Counts how often in a row the loss has not fallen."""

    def __init__(self, steps):
        self.steps, self.waited, self.best = steps, 0, float("inf")

    def is_over(self, loss):
        """Return whether the loss has not fallen for too long."""
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        return self.waited >= self.steps


accelerator = Accelerator(cpu=True)
model, optimizer, loader = begin(accelerator, 4, SGD, DataLoader(digits(0, 640), batch_size=16, shuffle=True), lr=0.2)
patience, steps, stopped_at, losses = Patience(6), 0, None, []
for epoch in range(4):
    for batch in loader:
        loss = train_on(accelerator, model, optimizer, batch)
        steps += 1
        losses.append(accelerator.reduce(loss, "mean").item())
        if accelerator.is_main_process and patience.is_over(loss.item()):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            stopped_at = [epoch, steps]
            break
    if stopped_at:
        break
still_set = accelerator.check_trigger()
everywhere = accelerator.gather_for_metrics([steps], use_gather_object=True)
report(accelerator, stopped_at=stopped_at, steps=everywhere, still_set=still_set, losses=losses,
       weights=norm(accelerator, model))  # fmt: skip
