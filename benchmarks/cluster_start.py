"""How long a run on a scheduler takes from its command to its first optimizer step.

    python benchmarks/cluster_start.py [--rounds N] [--only ray|slurm]

A cluster of two nodes on this machine, two ranks on each, CPU. On Ray, `accel launch --launcher ray` and Ray Train's
`TorchTrainer` start the same training function in turns; on SLURM, in allocations of their own, `srun accel launch` and
`srun torchrun`. Each line is a median, in wall-clock seconds. SLURM needs root and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
LAUNCH = [sys.executable, "-m", "accel_launch", "launch"]
ON_RAY = f"""
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


def seconds_to_first_step(words: list[str], folder: str, env: dict[str, str]) -> tuple[float, float]:
    """Return the seconds to the first step, and to the end of the command.

    Raises:
        SystemExit: The run failed.
    """
    begun = time.time()
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    ended = time.time()
    if done.returncode:
        sys.exit(f"{words} ended with {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return float(Path(folder, "first").read_text()) - begun, ended - begun


@contextmanager
def ray(folder: str) -> Iterator[tuple[dict[str, list[str]], dict[str, str]]]:
    """Start a Ray cluster; return the command of each side, and their environment."""
    from ray.cluster_utils import Cluster

    each = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
    try:
        cluster.add_node(**each)
        cluster.wait_for_nodes()
        launch = [*LAUNCH, "--launcher", "ray", "--address", cluster.address, "--machines", "2"]
        yield (
            {
                "accel launch --launcher ray": [*launch, "--processes-per-machine", "2", "--cpu", "ours.py", folder],
                "TorchTrainer": [sys.executable, "on_ray.py", cluster.address, folder],
            },
            dict(os.environ),
        )
    finally:
        cluster.shutdown()


@contextmanager
def slurm(folder: str) -> Iterator[tuple[dict[str, list[str]], dict[str, str]]]:
    """Start a controller and two nodes; return the command of each side, and their environment."""
    sys.path.append(str(Path(__file__).parents[1] / "packages" / "accel-launch" / "tests" / "ranks"))
    from slurm_cluster import running

    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500"]
    with running() as cluster:
        commands = {
            "srun accel launch": [*srun, *LAUNCH, "--cpu", "--nproc-per-node=2", "ours.py", folder],
            "srun torchrun": [*srun, *torchrun, "ours.py", folder],
        }
        yield (
            {name: cluster.words("login", *words) for name, words in commands.items()},
            cluster.environment(os.environ),
        )


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer", help="not used: accelerate 1.15.0 starts nothing on Ray, and on SLURM what torchrun does"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["ray", "slurm"])
    args = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"})
    for scheduler in [args.only] if args.only else ["ray", "slurm"]:
        times: dict[str, list[tuple[float, float]]] = {}
        with (
            tempfile.TemporaryDirectory() as folder,
            {"ray": ray, "slurm": slurm}[scheduler](folder) as (commands, env),
        ):
            Path(folder, "ours.py").write_text(OURS)
            Path(folder, "on_ray.py").write_text(ON_RAY)
            for turn in range(args.rounds + 1):
                for name, words in commands.items():
                    found = seconds_to_first_step(words, folder, env)
                    if turn:
                        times.setdefault(name, []).append(found)
        print(f"| median of {args.rounds}, s | {' | '.join(times)} | ratio | target |")
        print("|---|---|---|---|---|")
        for index, what in enumerate(("command to first step", "command to its end")):
            ours, theirs = ([pair[index] for pair in pairs] for pairs in times.values())
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            goal = GOAL if index == 0 else "-"
            print(
                f"| {what} | {statistics.median(ours):.2f} | {statistics.median(theirs):.2f} | {ratio:.2f} | {goal} |"
            )
        for name, pairs in times.items():
            print(f"\n{name}, each: " + ", ".join(f"{first:.1f}" for first, _ in pairs), end="")
        print(f"\nload of this machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")


if __name__ == "__main__":
    main()
