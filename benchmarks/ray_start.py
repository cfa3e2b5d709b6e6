"""How long a run on Ray takes from its command to its first optimizer step.

    python benchmarks/ray_start.py [--rounds N]

A cluster of two nodes on this machine, two ranks on each, CPU. `accel launch --launcher ray` and Ray Train's
`TorchTrainer` start the same training function in turns; each line is a median, in wall-clock seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOAL = 1.1
STEP = """
import sys, time
def train(folder):
    import torch
    from accel import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(4, 8)).sum())
    optimizer.step()
    if accelerator.is_main_process:
        with open(folder + "/first", "w") as file:
            file.write(str(time.time()))
    accelerator.end_training()
"""
OURS = STEP + "train(sys.argv[1])\n"
THEIRS = f"""
import sys
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
address, folder = sys.argv[1:]
def work():
    found = {{}}
    exec({STEP!r}, found)
    found["train"](folder)
ray.init(address, log_to_driver=False)
TorchTrainer(work, scaling_config=ScalingConfig(num_workers=4, resources_per_worker={{"CPU": 1}})).fit()
"""


def seconds_to_first_step(words: list[str], folder: str) -> tuple[float, float]:
    """Return the seconds to the first step, and to the end of the command.

    Raises:
        SystemExit: The run failed.
    """
    begun = time.time()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    ended = time.time()
    if done.returncode:
        sys.exit(f"{words} ended with {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return float(Path(folder, "first").read_text()) - begun, ended - begun


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="not used: accelerate 1.15.0 starts nothing on Ray")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"})
    from ray.cluster_utils import Cluster

    each = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
    cluster.add_node(**each)
    cluster.wait_for_nodes()
    times: dict[str, list[tuple[float, float]]] = {"accel": [], "TorchTrainer": []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "ours.py").write_text(OURS)
            Path(folder, "theirs.py").write_text(THEIRS)
            launch = [sys.executable, "-m", "accel_launch", "launch", "--launcher", "ray", "--address", cluster.address]
            launch += ["--machines", "2", "--processes-per-machine", "2", "--cpu", "ours.py", folder]
            commands = {"accel": launch, "TorchTrainer": [sys.executable, "theirs.py", cluster.address, folder]}
            for turn in range(args.rounds + 1):
                for name, words in commands.items():
                    found = seconds_to_first_step(words, folder)
                    if turn:
                        times[name].append(found)
    finally:
        cluster.shutdown()
    print(f"| median of {args.rounds}, s | accel launch --launcher ray | TorchTrainer | ratio | target |")
    print("|---|---|---|---|---|")
    for index, what in enumerate(("command to first step", "command to its end")):
        ours, theirs = ([pair[index] for pair in times[name]] for name in ("accel", "TorchTrainer"))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        goal = GOAL if index == 0 else "-"
        print(f"| {what} | {statistics.median(ours):.2f} | {statistics.median(theirs):.2f} | {ratio:.2f} | {goal} |")
    for name, pairs in times.items():
        print(f"\n{name}, each: " + ", ".join(f"{first:.1f}" for first, _ in pairs), end="")
    print(f"\nload of this machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
