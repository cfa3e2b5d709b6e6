"""What benchmarks share: processes that measure, such as ranks, and steps by hand and of ours that take turns."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time


def on_ranks(script, size, *work, python=sys.executable, stderr=None, **variables):
    """Run a script with `--work WORK`, as JSON, on some ranks and return what each printed last, as JSON too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [python, script, "--work", json.dumps(work)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            | variables,
        )
        for rank in range(size)
    ]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def report(measure, *arguments):
    """Be one rank, and print what it measured."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    print("\n" + json.dumps(measure(*arguments)), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def paired_seconds(plain, ours, rounds, steps=1):
    """Return the seconds that so many steps of both take between barriers, in each round."""
    import torch.distributed as dist

    def timed(step):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        dist.barrier()
        return time.perf_counter() - begun

    timed(plain), timed(ours)
    found = []
    for turn in range(rounds):
        times = {step: timed(step) for step in ((plain, ours) if turn % 2 else (ours, plain))}
        found.append((times[plain], times[ours]))
    return found


def added_microseconds(plain, ours, rounds):
    """Return the median of the microseconds by which a step of ours takes longer, in one process."""
    for _ in range(50):
        plain(), ours()
    added = []
    for turn in range(rounds):
        times = {}
        for step in (plain, ours) if turn % 2 else (ours, plain):
            begun = time.perf_counter()
            step()
            times[step] = time.perf_counter() - begun
        added.append(times[ours] - times[plain])
    return statistics.median(added) * 1e6


class Worker:
    """A process that measures when it is told to."""

    def __init__(self, *command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.turns = []
        assert self.process.stdout.readline().strip() == "ready"

    def measure(self):
        """Take one turn."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.turns.append(json.loads(self.process.stdout.readline()))

    def end(self):
        """Let the process end."""
        self.process.stdin.close()
        self.process.wait()
