"""Throughput of data-parallel training on two ranks, beside hand-written DDP.

    python benchmarks/ddp.py [--peer PYTHON]

Two gloo ranks train a model of 0.5 million parameters on random data: the accelerated loop (prepared model, optimizer
and loader) and a loop of torch's own DistributedDataParallel, DistributedSampler and DataLoader take turns. Shown is
the median of the paired ratios of samples per second. With --peer, accelerate 1.15.0 does the same.
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

ROUNDS, BATCHES, BATCH, WIDTH = 14, 40, 32, 512


def work(library: str) -> None:
    """Be one rank; rank 0 prints the ratios."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    if library == "accel":
        from accel_core.accelerator import Accelerator
    else:
        from accelerate import Accelerator
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.randn(2 * BATCH * BATCHES, WIDTH), torch.randint(10, (2 * BATCH * BATCHES,)))

    def model():
        torch.manual_seed(0)
        layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()
        return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10))

    by_hand = DistributedDataParallel(model())
    hand_optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.01)
    hand_loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
    net = model()
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.01), DataLoader(data, batch_size=BATCH)
    )

    def hand_epoch():
        for x, y in hand_loader:
            torch.nn.functional.cross_entropy(by_hand(x), y).backward()
            hand_optimizer.step()
            hand_optimizer.zero_grad()

    def epoch():
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()

    def timed(run):
        dist.barrier()
        begun = time.perf_counter()
        run()
        dist.barrier()
        return time.perf_counter() - begun

    timed(hand_epoch), timed(epoch)
    ratios, speeds = [], []
    for turn in range(ROUNDS):
        order = (hand_epoch, epoch) if turn % 2 else (epoch, hand_epoch)
        times = {run: timed(run) for run in order}
        ratios.append(times[hand_epoch] / times[epoch])
        speeds.append(len(data) / times[epoch])
    if accelerator.is_main_process:
        print(json.dumps([statistics.median(ratios), statistics.median(speeds)]), flush=True)
    dist.destroy_process_group()


def ranks(python: str, library: str) -> tuple[float, float]:
    """Run two ranks and return the median ratio, and samples per second."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [python, __file__, "--work", library],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    ratio, speed = json.loads(outputs[0])
    return ratio, speed


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has accelerate 1.15.0 installed")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    print("| library | samples/s | ÷ hand-written DDP | target |\n|---|---|---|---|")
    ratio, speed = ranks(sys.executable, "accel")
    print(f"| accel | {speed:.0f} | {ratio:.3f} | ≥ 0.98 |")
    if args.peer:
        ratio, speed = ranks(args.peer, "accelerate")
        print(f"| accelerate 1.15.0 | {speed:.0f} | {ratio:.3f} | |")


if __name__ == "__main__":
    main()
