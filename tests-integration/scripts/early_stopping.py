"""Early stopping: one process sees that the loss no longer falls, and all of them stop at the same step."""

from samples import classifier, digits, norm, report
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


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
set_seed(4)
model = classifier()
optimizer = SGD(model.parameters(), lr=0.2)
loader = DataLoader(digits(0, 640), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
patience, steps, stopped_at, losses = Patience(6), 0, None, []
for epoch in range(4):
    for values, classes in loader:
        loss = cross_entropy(model(values), classes)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
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
accelerator.end_training()
