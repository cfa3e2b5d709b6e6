"""What Ray is asked for, what is refused before it is, and the launcher of one machine as an actor runs it."""

import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_launch.launchers import registry
from accel_launch.launchers.ray import RayLauncher
from accel_launch.launchers.ray_machines import Machine
from accel_launch.supervision.orphans import alive
from accel_testing import limits, requires

RAY = ["--launcher", "ray", "--machines", "2", "--processes-per-machine", "4"]


@pytest.fixture(autouse=True)
def _threads_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the setting that whoever runs the tests may have made."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_each_machine_is_a_bundle(settings) -> None:
    """One bundle for each machine, with a GPU and the threads of each process; on CPUs without GPUs."""
    run = settings(*RAY, "--num-cpu-threads-per-process", "3", "--ray", "working_dir=.", "--address", "n1:6379", "t.py")
    launcher = registry.choose(run)
    assert isinstance(launcher, RayLauncher)
    assert launcher.job(run).splitlines()[:3] == [
        "address: n1:6379",
        'runtime_env: {"working_dir": "."}',
        'placement group: STRICT_SPREAD, 2 x {"CPU": 12, "GPU": 4}',
    ]
    on_cpus = launcher.job(settings(*RAY, "--cpu", "t.py"))
    assert on_cpus.startswith('address: auto\nruntime_env: {}\nplacement group: STRICT_SPREAD, 2 x {"CPU": 4}\n')


@requires("engine:fsdp")
def test_flags_of_the_machines_give_the_same_settings(settings, tmp_path: Path) -> None:
    """What the launchers read is what this one read, from flags and from a file that the machines do not have."""
    (tmp_path / "run.yaml").write_text("mixed_precision: bf16\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 2\n")
    words = ["--config-file", str(tmp_path / "run.yaml"), "--use-fsdp", "--fp8-override-linear-precision", "1,0,1"]
    first = settings(*RAY, *words, "train.py", "-x", "a b")
    command = RayLauncher().command(first)
    second = settings(*command[command.index("launch") + 1 :])
    assert (second.script, second.arguments) == (first.script, first.arguments)
    different = {key for key in first if first[key] != second[key]}
    assert different == {"launcher", "config_file", "machine_rank", "num_cpu_threads_per_process", "tee"}
    assert (second["mixed_precision"], second["cpu"]) == ("bf16", True)


def test_engine_does_not_start_other_machines(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each machine torch's agent starts the ranks, also under DeepSpeed, which has a launcher over ssh."""
    pytest.importorskip("accel_deepspeed")
    command = RayLauncher().command(settings(*RAY, "--use-deepspeed", "train.py"))
    monkeypatch.setenv("PET_NNODES", "2")  # as in an actor
    assert registry.choose(settings(*command[command.index("launch") + 1 :])).name == "torchrun"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*RAY, "--nnodes", "1:2", "t.py"], "does not take this nnodes; got 1:2 from --nnodes. Give a fixed number"),
        ([*RAY, "--gpu-ids", "0,1", "t.py"], "got 0,1 from --gpu-ids. Leave it out: Ray chooses"),
        ([*RAY, "--address", "ray://n1:10001", "t.py"], "got ray://n1:10001 from --address. Start it on a.*ray job"),
        (
            [*RAY, "--ray", "working_dir", "t.py"],
            r"got .*working_dir.* from --ray. Give it KEY=VALUE, as in working_dir=\.",
        ),
    ],
)
def test_settings_that_contradict_the_run_are_refused(settings, words: list[str], message: str) -> None:
    """Settings that Ray decides, an address of its client, a field without a value."""
    with pytest.raises(ConfigurationError, match=message):
        registry.choose(settings(*words))


def test_missing_library_is_named(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ray the extra is named, and that --dry-run needs none."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'accel-launch\[ray\]'`; `--dry-run` shows"):
        RayLauncher().run(settings(*RAY, "t.py"))


def test_other_launchers_do_not_import_ray() -> None:
    """Choosing a launcher imports neither ray nor what drives it."""
    code = (
        "import sys\nfrom accel_launch.commands.launch import launch_command_parser\n"
        "from accel_launch.commands.start import settings_from\nfrom accel_launch.launchers.registry import choose\n"
        "choose(settings_from(launch_command_parser().parse_args(['-n', '2', 'train.py'])))\n"
        "print({'ray', 'accel_launch.launchers.ray_machines'} & set(sys.modules))\n"
    )
    done = limits.run([sys.executable, "-c", code])
    assert done.stdout.strip() == "set()", done.stderr


class Script:
    """A script on a machine, with one process."""

    def __init__(self, folder: Path, text: str, variables: dict[str, str]) -> None:
        (folder / "train.py").write_text(text)
        self.words, self.folder = ["--cpu", "--num-processes=1", "--tee=3", "train.py"], str(folder)
        self.variables = variables


@pytest.mark.slow
def test_machine_yields_lines_and_status(tmp_path: Path, variables: dict[str, str]) -> None:
    """Lines come with their local rank, variables travel, and the end has the status."""
    text = "import os, sys\nprint(os.environ['CHOSEN'])\nprint('no end of line', end='')\nsys.exit(3)\n"
    script = Script(tmp_path, text, {**variables, "CHOSEN": "by caller"})
    *printed, status = Machine().run(script.words, script.folder, script.variables)
    lines = b"\n".join(printed).decode().splitlines()
    assert "[default0]: by caller" in lines
    assert "[default0]: no end of line" in lines
    assert status == 3


@pytest.mark.slow
def test_machine_passes_signals_on(tmp_path: Path, variables: dict[str, str]) -> None:
    """A signal ends the launcher, also where the actor's thread blocks it as Ray's does."""
    script = Script(tmp_path, "import time\nprint('going', flush=True)\ntime.sleep(3600)\n", variables)
    machine, items = Machine(), list[Any]()

    def follow() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        items.extend(machine.run(script.words, script.folder, script.variables))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert limits.wait_until(lambda: any(b"going" in item for item in items if isinstance(item, bytes)), pause=0.05)
    machine.send(signal.SIGINT)
    thread.join(limits.limit())
    assert items[-1] == 130


@pytest.mark.slow
def test_killed_actor_takes_the_ranks_along(tmp_path: Path, variables: dict[str, str]) -> None:
    """Neither launcher nor rank outlives the process that runs the actor."""
    text = "import os, time\nopen('pids', 'w').write(f'{os.getppid()} {os.getpid()} ')\ntime.sleep(3600)\n"
    script = Script(tmp_path, text, variables)
    code = (
        "import os\nfrom accel_launch.launchers.ray_machines import Machine\n"
        f"list(Machine().run({script.words!r}, {script.folder!r}, dict(os.environ)))\n"
    )
    actor = subprocess.Popen([sys.executable, "-c", code], env=variables)
    file = tmp_path / "pids"
    assert limits.wait_until(lambda: file.exists() and file.read_text().count(" ") == 2, pause=0.05)
    actor.kill()
    actor.wait(limits.limit())
    pids = [int(word) for word in file.read_text().split()]
    assert limits.wait_until(lambda: not any(alive(pid) for pid in pids), pause=0.05), pids


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.parametrize("address", [":", ":6379"])
def test_address_that_is_none_is_refused_in_one_line(address: str, variables: dict[str, str]) -> None:
    """An address without a host or a port is named, and Ray prints nothing about it."""
    words = [sys.executable, "-m", "accel_launch", "launch", *RAY, "--cpu", "--address", address, __file__]
    done = limits.run(words, env=variables)
    assert done.returncode == 1
    assert f"{address!r} gives: " in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
