"""What a run of the transformers Trainer costs on the drop-in.

    python benchmarks/trainer.py --peer PYTHON [--turns N]

200 steps of a Llama of a few thousand parameters, one process. This Python has transformers and the drop-in. PYTHON has
accelerate 1.15.0, which is taken from there and put before the drop-in, so that both sides run the same Python, torch
and transformers. They take turns, each in a process of its own, because the Trainer keeps state. Shown are the median
time of steps 20 to 200 over all turns, and the median over turns of a process's largest memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 200
FIRST = 20
WHERE = "import importlib.util; print(importlib.util.find_spec('accelerate').origin)"


def work() -> None:
    """Train once, and print the times of the steps in seconds and the largest memory in bytes."""
    import resource

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    rows = torch.randint(3, 32, (2 * STEPS, 4))
    data = [{"input_ids": row, "labels": row} for row in rows]
    times = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_args: object, **_kwargs: object) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, max_steps=STEPS, report_to=[], use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    steps = [after - before for before, after in zip(times[FIRST - 1 :], times[FIRST:], strict=False)]
    print(json.dumps([steps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]), flush=True)


def once(path: str) -> tuple[list[float], int]:
    """Train in a new process that looks for modules in `path` first; return what `work` prints."""
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, __file__, "--work"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    measured, largest = json.loads(done.stdout.splitlines()[-1])
    return measured, largest


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has accelerate 1.15.0 installed")
    parser.add_argument("--turns", type=int, default=5, help="runs of each side")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return
    steps: dict[str, list[float]] = {}
    memory: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sides = {"accel": ""}
        if args.peer:
            sides["accelerate 1.15.0"] = folder
            found = subprocess.run([args.peer, "-c", WHERE], stdout=subprocess.PIPE, text=True, check=True)
            for path in Path(found.stdout.strip()).parent.parent.glob("accelerate*"):
                (Path(folder) / path.name).symlink_to(path)
        for _ in range(args.turns):
            for name, path in sides.items():
                measured, largest = once(path)
                steps.setdefault(name, []).extend(measured)
                memory.setdefault(name, []).append(largest)
    print("| library | step, µs | share of the peer's | target | largest memory, MiB | share | target |")
    print("|---|---|---|---|---|---|---|")
    medians = {name: statistics.median(times) for name, times in steps.items()}
    largest_of = {name: statistics.median(found) for name, found in memory.items()}
    *_, last = sides
    for name in sides:
        time_share = f"{medians[name] / medians[last]:.3f}"
        memory_share = f"{largest_of[name] / largest_of[last]:.3f}"
        reach = ("≤ 0.95", "≤ 1.0") if name == "accel" else ("", "")
        print(
            f"| {name} | {medians[name] * 1e6:.0f} | {time_share} | {reach[0]} | {largest_of[name] / 2**20:.0f} | "
            f"{memory_share} | {reach[1]} |"
        )


if __name__ == "__main__":
    main()
