"""Prints docs/reference/launchers.md, made from the launchers, the settings and what `--dry-run` prints.

Run it from the root of the repository after one of them has changed:

    python packages/accel-launch/tests/launchers.py > docs/reference/launchers.md
"""

import contextlib
import inspect
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HEAD = """# Launchers

<!-- Written by packages/accel-launch/tests/launchers.py. -->

How `accel launch` starts a run, and what `--dry-run` prints for each way. The first launcher of this table that takes a
run starts it; those of [other packages](../extend/entry-points.md) are asked before. What has run where is listed under
[Hardware](hardware.md).

| launcher | what it is | takes | options |
|---|---|---|---|"""

_TWO = "--machines 2 --processes-per-machine 4"
EXAMPLES = {
    "slurm": [f"--launcher slurm {_TWO} --slurm time=8:00:00 train.py"],
    "ray": [f"--launcher ray {_TWO} --ray working_dir=. train.py"],
    "sagemaker": ["--config-file sagemaker.yaml --num-processes 1 train.py --lr 0.1"],
    "tpu": [
        "--tpu --num-processes 8 --main-training-function main train.py",
        "--config-file pod.yaml --main-training-function main train.py",
    ],
    "mpi": [f"--mpirun-hostfile hosts {_TWO} train.py"],
    "deepspeed": [f"--use-deepspeed --deepspeed-hostfile slots {_TWO} train.py"],
    "torchrun": [
        "--num-processes 4 train.py",
        f"{_TWO} --machine-rank 0 --main-process-ip 10.0.0.1 --main-process-port 29500 train.py",
    ],
    "simple": ["--num-processes 1 train.py"],
}
"""Command lines of each launcher, after `accel launch --dry-run`."""
FILES = {
    "train.py": "",
    "hosts": "worker-0\nworker-1\n",
    "slots": "worker-0 slots=4\nworker-1 slots=4\n",
    "pod.yaml": "distributed_type: XLA\ntpu_name: pod\ntpu_use_cluster: true\nnum_processes: 8\n",
    "sagemaker.yaml": "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3.16xlarge\niam_role_name: role\n",
    "mpirun": "#!/bin/sh\necho 'mpirun (Open MPI) 5.0'\n",
}
OTHER_TOPICS = {"torchrun": "Rendezvous and restarts", "simple": "Processes and machines"}


def lines() -> Iterator[str]:
    """Return the lines of the page."""
    from accel_core.options.engines import engines, load
    from accel_launch.launchers.registry import BUILT_IN
    from accel_launch.settings.table import ALL

    own = [engine.launcher for engine in engines().values() if engine.launcher]
    launchers = [load(place) for place in (*BUILT_IN[:-2], *own, *BUILT_IN[-2:])]
    topics = {setting.topic.lower(): setting.topic for setting in ALL}
    yield HEAD
    for launcher in launchers:
        topic = OTHER_TOPICS.get(launcher.name) or topics[launcher.name]
        options = f"[{topic}](options.md#{topic.lower().replace(' ', '-')})"
        cells = [f"[{launcher.name}](#{launcher.name})", sentence(launcher), sentence(launcher.claims), options]
        yield f"| {' | '.join(cells)} |"
    for launcher in launchers:
        yield f"\n## {launcher.name}"
        for example in EXAMPLES[launcher.name]:
            yield f"\n```text\n$ accel launch --dry-run {example}\n{printed(shlex.split(example), launcher.name)}```"


def sentence(documented: object) -> str:
    """Return the first sentence of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n\n")[0].replace("\n", " ").removeprefix("Take ").rstrip(".")


def printed(words: list[str], name: str) -> str:
    """Return what `accel launch --dry-run` prints, without what differs between machines."""
    from accel_launch.commands.launch import launch_command_parser
    from accel_launch.commands.start import launch

    with contextlib.redirect_stdout(io.StringIO()) as output:
        launch(launch_command_parser().parse_args(["--dry-run", *words]))
    assert output.getvalue().startswith(f"Launcher {name}: "), output.getvalue()
    text = output.getvalue().replace(sys.executable, "python").replace(os.getcwd(), ".")
    return re.sub(r"(PYTHONPATH=).*|/[^ ]*(/accel_core/)", lambda found: f"{found[1] or ''}...{found[2] or ''}", text)


def main() -> None:
    """Print the page."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, text in FILES.items():
            Path(name).write_text(text)
        Path("mpirun").chmod(0o755)
        page = "\n".join(lines())
    sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    # Before accel reads any of it: settings of this machine do not belong into the page.
    python = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    os.environ.clear()
    os.environ.update({**python, "PATH": f".:{os.defpath}", "HF_HOME": "."})
    main()
