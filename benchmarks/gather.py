"""Gather and reduce of many small tensors on two ranks.

    python benchmarks/gather.py [--peer PYTHON] [--calls N]

Two processes talk through gloo. In turns they gather (or reduce) a nest of 64 tensors of float32, and do one plain
collective on a single tensor of as many bytes: the least that the nest can cost. With --peer, two processes of that
Python do the same with accelerate 1.15.0, in turns with ours. Shown are medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

NESTS = {"32 KiB": (8, 16), "128 KiB": (16, 32)}
TENSORS = 64
ROUNDS = 10
PEER_SHARE = 5


def nest_of(shape, rank):
    """Return 64 tensors in dicts and lists, as a batch or a model's output holds them."""
    import torch

    tensors = [torch.full(shape, float(rank + place)) for place in range(TENSORS)]
    return {"inputs": {f"field{place}": tensors[place] for place in range(32)}, "outputs": [tuple(tensors[32:])]}


def work(library: str) -> None:
    """Be one rank: measure a round whenever a line comes in, and report when the lines end."""
    import torch
    import torch.distributed as dist

    if library == "accel":
        from accel_core.comm.collectives import gather, reduce
        from accel_core.process.world import ensure

        rank = ensure(cpu=True).rank
    else:
        from accelerate import PartialState
        from accelerate.utils import gather, reduce

        rank = PartialState(cpu=True).process_index
    torch.set_num_threads(1)
    plain_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    turns = {}
    for name, shape in NESTS.items():
        nest = nest_of(shape, rank)
        flat = torch.zeros(TENSORS * shape[0] * shape[1])
        received = torch.zeros(2 * flat.numel())
        turns[f"gather {name}"] = (lambda n=nest: gather(n), lambda r=received, f=flat: plain_gather(r, f))
        turns[f"reduce {name}"] = (lambda n=nest: reduce(n, "sum"), lambda f=flat: dist.all_reduce(f))
    times = {(name, who): [] for name in turns for who in (0, 1)}

    def once(keep):
        for name, pair in turns.items():
            for who, call in enumerate(pair):
                dist.barrier()
                begun = time.perf_counter()
                call()
                if keep:
                    times[name, who].append(time.perf_counter() - begun)

    for _ in range(3):
        once(keep=False)
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            once(keep=True)
        print("done", flush=True)
    print(json.dumps({name: [statistics.median(times[name, who]) * 1000 for who in (0, 1)] for name in turns}))
    sys.stdout.flush()
    dist.destroy_process_group()


def start(python: str, library: str) -> list[subprocess.Popen[str]]:
    """Start two ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        ranks.append(
            subprocess.Popen(
                [python, __file__, "--worker", library],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **variables},
            )
        )
    for process in ranks:
        hear(process)
    return ranks


def hear(process: subprocess.Popen[str]) -> str:
    """Return the next line of a rank."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a rank ended with status {process.wait()}")
    return line


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has accelerate 1.15.0 installed")
    parser.add_argument("--calls", type=int, default=300, help="calls of ours; the peer makes a fifth of them")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return
    sides = {"accel": start(sys.executable, "accel")}
    calls = {"accel": args.calls // ROUNDS}
    if args.peer:
        sides["accelerate 1.15.0"] = start(args.peer, "accelerate")
        calls["accelerate 1.15.0"] = args.calls // ROUNDS // PEER_SHARE
    for _ in range(ROUNDS):
        for side, ranks in sides.items():
            for process in ranks:
                assert process.stdin is not None
                process.stdin.write(f"{calls[side]}\n")
                process.stdin.flush()
            for process in ranks:
                hear(process)
    found = {}
    for side, ranks in sides.items():
        for process in ranks:
            assert process.stdin is not None
            process.stdin.close()
        found[side] = json.loads(hear(ranks[0]))
        for process in ranks:
            process.wait()
    headings = ["64 tensors, 2 gloo ranks", "plain, one tensor (ms)"]
    print("| " + " | ".join(headings + [f"{side} (ms) | added (ms)" for side in sides]) + " |")
    print("|" + "---|" * (2 + 2 * len(sides)))
    for name, (_, plain) in found["accel"].items():
        cells = [name, f"{plain:.2f}"]
        for side in sides:
            mine, floor = found[side][name]
            cells += [f"{mine:.2f}", f"{mine - floor:+.2f}"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
