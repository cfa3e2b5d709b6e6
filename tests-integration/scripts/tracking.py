"""Tracking: a tracker of one's own takes the configuration and every number, from the main process alone."""

import json
import tempfile
from pathlib import Path

from samples import begin, digits, train_on
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process


class LineTracker(GeneralTracker):
    """Writes a line of JSON for every call."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, path):
        super().__init__()
        self.path = path

    @property
    def tracker(self):
        """The file."""
        return self.path

    @on_main_process
    def store_init_configuration(self, values):
        """Write the configuration."""
        self.write({"config": values})

    @on_main_process
    def log(self, values, step=None, **kwargs):
        """Write values."""
        self.write({"step": step, **values, **kwargs})

    @on_main_process
    def write(self, line):
        """Add a line to the file."""
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


path = Path(tempfile.mkdtemp()) / "lines"
tracker = LineTracker(path)
accelerator = Accelerator(cpu=True, log_with=tracker)
accelerator.init_trackers("digits", config={"rate": 0.1, "layers": [64, 32, 10]})
model, optimizer, loader = begin(accelerator, 10, SGD, DataLoader(digits(0, 256), batch_size=16, shuffle=True), lr=0.1)
step = 0
for epoch in range(2):
    total = 0.0
    for batch in loader:
        loss = train_on(accelerator, model, optimizer, batch)
        total += accelerator.reduce(loss, "mean").item()
        step += 1
        accelerator.log({"loss": loss.item()}, step=step)
    accelerator.log({"mean": total / len(loader), "epoch": epoch}, step=step, log_kwargs={"lines": {"kind": "epoch"}})
same = accelerator.get_tracker("lines") is tracker
unwrapped = accelerator.get_tracker("lines", unwrap=True) == path
processes, is_main = accelerator.num_processes, accelerator.is_main_process
accelerator.end_training()
if is_main:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    beside = sorted(found.name for found in Path().iterdir())
    print(json.dumps({"processes": processes, "lines": lines, "same": same, "unwrapped": unwrapped, "beside": beside}))
