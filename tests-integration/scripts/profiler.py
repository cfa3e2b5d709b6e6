"""The profiler: what a few steps are made of, and a trace of each process."""

import json
import tempfile
from pathlib import Path

from samples import begin, digits, report, train_on
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelerate import Accelerator, ProfileKwargs
from accelerate.utils import broadcast_object_list

WATCHED = ("aten::addmm", "aten::relu", "aten::log_softmax", "SgdBackward0", "AddmmBackward0", "ReluBackward0")

seen = []


def ready(profiler):
    """Note what a cycle of the schedule recorded."""
    seen.append(sum(event.count for event in profiler.key_averages() if event.key == "aten::addmm"))


accelerator = Accelerator(cpu=True)
folder = [tempfile.mkdtemp() if accelerator.is_main_process else None]
folder = Path(broadcast_object_list(folder)[0])
model, optimizer, loader = begin(accelerator, 9, SGD, DataLoader(digits(0, 96), batch_size=8), lr=0.1)


batches = list(loader)
with accelerator.profile(ProfileKwargs(activities=["cpu"], record_shapes=True, with_flops=True)) as whole:
    for batch in batches[:3]:
        train_on(accelerator, model, optimizer, batch)
counts = {event.key: event.count for event in whole.key_averages() if event.key in WATCHED}
flops = sum(event.flops for event in whole.key_averages())

options = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}
with accelerator.profile(ProfileKwargs(activities=["cpu"], schedule_option=options, on_trace_ready=ready)) as cycles:
    for batch in batches[:6]:
        train_on(accelerator, model, optimizer, batch)
        cycles.step()

with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder))):
    train_on(accelerator, model, optimizer, batches[0])
accelerator.wait_for_everyone()
traces = sorted(path.name for path in folder.iterdir())
kept = [any(event.get("name") == "aten::addmm" for event in json.loads(path.read_text())["traceEvents"])
        for path in sorted(folder.iterdir())]  # fmt: skip
report(accelerator, counts=counts, flops=flops, seen=seen, traces=traces, kept=kept)
