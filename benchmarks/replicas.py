"""Replicas that die and come back, compared with torchft alone and plain DDP.

    python benchmarks/replicas.py [--only ROW] [--kills N] [--minutes N] [--seed N]
    python benchmarks/replicas.py --svg docs/guides/replicas.svg --kills 4

Kills: runs of 600 steps on 2 to 4 replicas of one process each; a random one of those that train is killed by SIGKILL,
when at least one other trains too, at random moments of the first four fifths. Each sample has a weight that counts the
steps in which it was trained with, so what is lost or repeated shows at the end. Steps: a step of two replicas, without
failures, and one of plain DDP on two ranks, of the same model on the same processors; runs take turns, and the median
of ratios is shown. Alone: torchft's own sampler, optimizer and manager, as its documentation puts them together; one of
two replicas is killed in the middle of an epoch, and started again. --svg makes one run of three replicas instead, and
draws who trained when.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

STEPS, EPOCHS, BATCH, PAUSE = 600, 6, 8, 0.03
KILL_EVERY = (0.5, 4.0)  # seconds between two kills


def train(folder: Path, samples: int) -> None:
    """Train in a replica, and write down when each step was made, and by whom."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from accel import Accelerator
    from accel_torchft import FaultToleranceKwargs

    class Counter(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter += (parameter.grad > 0).float()

    accelerator = Accelerator(cpu=True, kwargs_handlers=[FaultToleranceKwargs(timeout=5)])
    replicas = accelerator.replicas
    (folder / f"pid-{replicas.number}").write_text(f"{os.getpid()} {replicas.life}")
    torch.manual_seed(replicas.number)
    model, layer = nn.Embedding(samples, 1, _weight=torch.zeros(samples, 1)), nn.Linear(64, 64)
    both = nn.ModuleDict({"times": model, "layer": layer})
    counter, adam = Counter(model.parameters()), torch.optim.AdamW(layer.parameters())
    loader = DataLoader(TensorDataset(torch.arange(samples)), batch_size=BATCH, shuffle=True)
    both, counter, adam, loader = accelerator.prepare(both, counter, adam, loader)
    with (folder / f"steps-{replicas.number}").open("a", buffering=1) as file:
        for _ in range(EPOCHS):
            for (index,) in loader:
                loss = both["times"](index).mean() + both["layer"](torch.randn(BATCH, 64)).pow(2).mean()
                accelerator.backward(loss)
                counter.step()
                adam.step()
                if not adam.step_was_skipped:
                    file.write(f"{time.time()} {replicas.samples} {json.dumps(replicas.living)}\n")
                counter.zero_grad()
                adam.zero_grad()
                time.sleep(PAUSE)
    found = {"counts": model.weight.detach().flatten(), "layer": layer.weight.detach(), "life": replicas.life}
    torch.save({**found, "lost": replicas.lost_steps}, folder / f"found-{replicas.number}.pt")


def one_run(replicas: int, most: int, draw: random.Random) -> dict[str, object]:
    """Train once under kills; return what was seen."""
    import torch

    samples = STEPS * BATCH * replicas // EPOCHS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "-n", "1", "--replicas", str(replicas)]
        log = (folder / "log").open("w")
        run = subprocess.Popen([*words, __file__, "--work", "train", name, str(samples)], stdout=log, stderr=log)
        kills: list[tuple[int, float]] = []
        due = time.time() + 1
        while run.poll() is None:
            time.sleep(0.02)
            last = {number: lines(folder, number)[-1:] for number in range(replicas)}
            recent = [n for n, found in last.items() if found and time.time() - found[0][0] < 0.5]
            train_now = [n for n in recent if all(n in last[other][0][2] for other in recent)]
            read = max((found[0][1] for found in last.values() if found), default=0) / (samples * EPOCHS)
            if time.time() > due and len(train_now) > 1 and len(kills) < most and read < 0.8:
                victim = draw.choice(train_now)
                pid = int((folder / f"pid-{victim}").read_text().split()[0])
                kills.append((victim, time.time()))
                os.kill(pid, signal.SIGKILL)
                due = time.time() + draw.uniform(*KILL_EVERY)
        waits = []
        for victim, when in kills:
            for number in {*range(replicas)} - {victim}:
                after = [t for t, _, living in lines(folder, number) if t > when and victim not in living]
                trained = any(when - 1 < t <= when for t, _, _ in lines(folder, number))
                if trained and after:
                    waits.append(after[0] - when)
        found = {
            n: torch.load(folder / f"found-{n}.pt") for n in range(replicas) if (folder / f"found-{n}.pt").exists()
        }
        if run.returncode or not found:
            print((folder / "log").read_text()[-3000:], file=sys.stderr)
        died = defaultdict(int)
        for victim, _ in kills:
            died[victim] += 1
        if any(each["life"] > died[n] for n, each in found.items()):
            print((folder / "log").read_text()[-6000:], kills, file=sys.stderr)
        first = next(iter(found.values()))
        return {
            "kills": len(kills),
            "waits": waits,
            "status": run.returncode,
            "restarted": sum(max(0, each["life"] - died[n]) for n, each in found.items()),
            "lost": sum(int((EPOCHS - each["counts"]).clamp(min=0).sum()) for each in found.values()),
            "repeated": sum(int((each["counts"] - EPOCHS).clamp(min=0).sum()) for each in found.values()),
            "equal": all(torch.equal(first["layer"], each["layer"]) for each in found.values()),
            "ended": len(found),
            "killed": kills,
            "steps": {
                number: [(when, samples) for when, samples, _ in lines(folder, number)] for number in range(replicas)
            },
        }


def picture(run: dict[str, object], replicas: int) -> str:
    """Draw who trained when, who was killed, and how many samples were read by then."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "docs" / "site"))
    import drawing

    steps: dict[int, list[tuple[float, float]]] = run["steps"]  # type: ignore[assignment]
    made = sorted(step for each in steps.values() for step in each)
    first, last, most = made[0][0], made[-1][0], made[-1][1]
    left, wide, row, low = 80, 600, 26, 70

    def at(when: float) -> float:
        return left + (when - first) / (last - first) * wide

    out = []
    for number in range(replicas):
        y, times = 24 + number * row, [when for when, _ in steps[number]]
        out.append(drawing.text(left - 8, y + 12, f"replica {number}", "end"))
        begun = times[0]
        for before, when in itertools.pairwise([*times, math.inf]):
            if when - before > 0.4:
                place = f'x="{at(begun):.1f}" width="{max(1.0, at(before) - at(begun)):.1f}" y="{y}" height="15"'
                out.append(f'<rect {place} fill="{drawing.COLORS[number]}" fill-opacity=".75"/>')
                begun = when
        for victim, when in run["killed"]:  # type: ignore[attr-defined]
            if victim == number:
                mark = f"M{at(when) - 5:.1f},{y + 2}l10,11m0,-11l-10,11"
                out.append(f'<path d="{mark}" stroke="#c0392b" stroke-width="2.5" fill="none"/>')
    top = 24 + replicas * row + 8
    points = " ".join(f"{at(when):.1f},{top + low * (1 - read / most):.1f}" for when, read in made[::5])
    out.append(f'<polyline points="{points}" fill="none" stroke="#555" stroke-width="1.5"/>')
    out += [
        drawing.text(left - 8, top + 10, f"{most:,.0f}", "end"),
        drawing.text(left - 8, top + low, "samples", "end"),
    ]
    for second in range(0, int(last - first) + 1, 10):
        x = at(first + second)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{top + low}" {drawing.GRID}/>')
        out.append(drawing.text(x, top + low + 15, f"{second} s"))
    out.append(drawing.text(left, 13, "bars: makes steps; crosses: SIGKILL; the line: samples trained with", "start"))
    return drawing.picture("\n".join(out), left + wide + 30, top + low + 22, paper=True)


def lines(folder: Path, number: int) -> list[tuple[float, float, list[int]]]:
    """Return when a replica made each step, how many samples were read by then, and who took part."""
    path = folder / f"steps-{number}"
    texts = path.read_text().split("\n")[:-1] if path.exists() else []
    parts = [text.split(" ", 2) for text in texts]
    return [(float(when), float(samples), json.loads(living)) for when, samples, living in parts]


def rows_of_kills(most: int, minutes: float, seed: int) -> str:
    """Return the rows about kills."""
    draw, runs, left, end = random.Random(seed), [], most, time.monotonic() + 60 * minutes
    while left > 0 and time.monotonic() < end:
        replicas = draw.choice([2, 3, 4])
        runs.append(one_run(replicas, left, draw))
        left -= int(runs[-1]["kills"])  # type: ignore[call-overload]
        shown = {key: value for key, value in runs[-1].items() if key not in ("waits", "killed", "steps")}
        print(f"{replicas} replicas: {shown}, waits up to {max(runs[-1]['waits'], default=None)} s", file=sys.stderr)
    kills, waits = sum(r["kills"] for r in runs), [wait for r in runs for wait in r["waits"]]
    equal, lost, repeated, ended = (sum(r[key] for r in runs) for key in ("equal", "lost", "repeated", "ended"))
    return "\n".join(
        [
            f"| {kills} kills in {len(runs)} runs: survivors restarted | {sum(r['restarted'] for r in runs)} | – | 0 |",
            f"| runs that failed | {sum(r['status'] != 0 for r in runs)} | – | 0 |",
            f"| samples lost; repeated | {lost}; {repeated} | – | 0; 0 |",
            f"| runs that ended with bit-equal weights ({ended} replicas) | {equal} of {len(runs)} | – | all |",
            f"| from a kill to the survivors' next step, median | {statistics.median(waits):.2f} s | – | ≤ 3 s |",
            f"| the same, worst | {max(waits):.2f} s | – | ≤ 10 s |",
        ]
    )


def model_of_steps():
    """Return a model, its optimizer and a batch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(64 * 400, 512)


def steps(kind: str) -> None:
    """Print the median time of a step, of a replica or of a rank of plain DDP."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accel import Accelerator

    model, optimizer, data = model_of_steps()
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(data), batch_size=64, shuffle=True)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
        loader = accelerator.prepare(loader)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    times = [time.perf_counter()]
    for (batch,) in loader:
        loss = model(batch).pow(2).mean()
        if kind == "ddp":
            loss.backward()
        else:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    taken = [after - before for before, after in itertools.pairwise(times[20:])]
    if accelerator.is_main_process:
        print("median", statistics.median(taken))


def row_of_steps(rounds: int = 3) -> str:
    """Return the row of steps without failures."""

    def measure(*words: str) -> float:
        command = [
            sys.executable,
            "-m",
            "accel_launch",
            "launch",
            "--cpu",
            "-q",
            *words[1:],
            __file__,
            "--work",
            words[0],
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(next(line for line in ended.stdout.splitlines() if line.startswith("median")).split()[1])

    pairs = [(measure("replicas", "-n", "1", "--replicas", "2"), measure("ddp", "-n", "2")) for _ in range(rounds)]
    ratio = statistics.median(ours / plain for ours, plain in pairs)
    ours, plain = (statistics.median(each) * 1e3 for each in zip(*pairs, strict=True))
    return f"| step ÷ plain DDP, 2 processes | {ratio:.3f} ({ours:.1f} ms) | {plain:.1f} ms | ≤ 1.10 |"


def alone(number: int, folder: Path, samples: int) -> None:
    """Train with torchft alone, and write down which samples were in steps that were made."""
    import logging

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    logging.disable(logging.CRITICAL)
    model = nn.Linear(1, 1)
    plain = torch.optim.AdamW(model.parameters())
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    from datetime import timedelta

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=lambda found: (
            model.load_state_dict(found["model"]),
            plain.load_state_dict(found["optimizer"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"alone{number}",
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    data = TensorDataset(torch.arange(samples))
    sampler = DistributedSampler(data, replica_rank=number, num_replica_groups=2, group_rank=0, num_replicas=1)
    with (folder / f"read-{number}").open("a", buffering=1) as file:
        for (index,) in DataLoader(data, batch_size=BATCH, sampler=sampler):
            optimizer.zero_grad()
            before = manager.current_step()
            wrapped(index.float()[:, None]).sum().backward()
            optimizer.step()
            if manager.current_step() > before:
                file.write(f"{time.time()} {' '.join(map(str, index.tolist()))}\n")
            time.sleep(PAUSE)
    os._exit(0)


def row_alone(samples: int = 2400) -> str:
    """Return the row of torchft alone: one of two replicas is killed in the middle of an epoch, and comes back."""
    from torchft.coordination import LighthouseServer

    os.environ["RUST_LOG"] = "error"
    house = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=500, quorum_tick_ms=50, heartbeat_timeout_ms=1500
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def start(number: int) -> subprocess.Popen[bytes]:
            words = [sys.executable, __file__, "--work", "alone", name, str(samples), str(number)]
            variables = {**os.environ, "TORCHFT_LIGHTHOUSE": house.address()}
            return subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def read(number: int) -> list[tuple[float, list[int]]]:
            path = folder / f"read-{number}"
            texts = path.read_text().split("\n")[:-1] if path.exists() else []
            return [(float(text.split()[0]), [*map(int, text.split()[1:])]) for text in texts]

        running = [start(0), start(1)]
        while len(read(1)) < samples // BATCH // 4:
            time.sleep(0.02)
        running[1].kill()
        when = time.time()
        running[1] = start(1)
        for process in running:
            process.wait()
        after = [t for t, _ in read(0) if t > when]
        made = [index for number in (0, 1) for _, indices in read(number) for index in indices]
        house.shutdown()
    never, again = samples - len({*made}), len(made) - len({*made})
    waited = next(b - a for a, b in itertools.pairwise([when, *after]) if b - a > 0.5)
    return (
        f"| an epoch of {samples} samples, one of two replicas killed in its middle: samples never trained with; "
        f"trained with twice; next step after | 0; 0; as above | torchft alone: {never}; {again}; {waited:.2f} s | – |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer has no replicas")
    parser.add_argument("--only", choices=("kills", "steps", "alone"), help="measure one row")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=30, help="begin no run later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--svg", type=Path, help="draw one run of three replicas")
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        kind, *rest = args.work
        if kind == "train":
            train(Path(rest[0]), int(rest[1]))
        elif kind == "alone":
            alone(int(rest[2]), Path(rest[0]), int(rest[1]))
        else:
            steps(kind)
        return
    if args.svg:
        args.svg.write_text(picture(one_run(3, args.kills, random.Random(args.seed)), 3))
        return
    print("| replicas | accel | compared with | target |\n|---|---|---|---|")
    rows = {
        "kills": lambda: rows_of_kills(args.kills, args.minutes, args.seed),
        "steps": row_of_steps,
        "alone": row_alone,
    }
    for name in [args.only] if args.only else rows:
        print(rows[name](), flush=True)


if __name__ == "__main__":
    main()
