"""Throughput of data-parallel training on two ranks, beside hand-written DDP.

    python benchmarks/ddp.py [--peer PYTHON]

Two gloo ranks train a model of 0.5 million parameters on random data: the accelerated loop (prepared model, optimizer
and loader) and a loop of torch's own DistributedDataParallel, DistributedSampler and DataLoader take turns. Shown is
the median of the paired ratios of samples per second. With --peer, accelerate 1.15.0 does the same.
"""

from __future__ import annotations

import argparse
import json
import statistics

from side_by_side import on_ranks, paired_seconds, report

ROUNDS, BATCHES, BATCH, WIDTH = 14, 40, 32, 512


def work(library: str) -> tuple[float, float]:
    """Be one rank, and return the median ratio and samples per second."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    if library == "accel":
        from accel_core.accelerator import Accelerator
    else:
        from accelerate import Accelerator
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

    found = paired_seconds(hand_epoch, epoch, ROUNDS)
    ratios, speeds = [by_hand / own for by_hand, own in found], [len(data) / own for _, own in found]
    return statistics.median(ratios), statistics.median(speeds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has accelerate 1.15.0 installed")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        report(work, *json.loads(args.work))
        return
    print("| library | samples/s | ÷ hand-written DDP | target |\n|---|---|---|---|")
    ratio, speed = on_ranks(__file__, 2, "accel")[0]
    print(f"| accel | {speed:.0f} | {ratio:.3f} | ≥ 0.98 |")
    if args.peer:
        ratio, speed = on_ranks(__file__, 2, "accelerate", python=args.peer)[0]
        print(f"| accelerate 1.15.0 | {speed:.0f} | {ratio:.3f} | |")


if __name__ == "__main__":
    main()
