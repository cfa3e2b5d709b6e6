"""DeepSpeed's own launcher: its command line, and variables that reach every machine as they are."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_testing import limits, requires

pytest.importorskip("accel_launch", reason="what the launcher does for a run with DeepSpeed")
from accel_deepspeed.launching.launcher import DeepSpeedLauncher, carried
from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.start import settings_from
from accel_launch.settings.resolve import Settings

MACHINES = ["--use-deepspeed", "--num-machines", "2", "--num-processes", "2", "--deepspeed-hostfile", "hosts"]
NOTE = f"""#!{sys.executable}
import json, os, sys
file = os.environ.get("DS_ENV_FILE")
lines = [] if file is None else open(file).read().splitlines()
json.dump({{"words": sys.argv[1:], "lines": lines, "file": file}}, open("noted.json", "w"))
"""


def program(path: Path, text: str) -> None:
    """Write a program."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with a hostfile and the programs of DeepSpeed, in an environment of one's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("w0 slots=1\nw1 slots=1\n")
    (tmp_path / "s.py").write_text("")
    program(tmp_path / "bin" / "deepspeed", NOTE)
    for name in ("pdsh", "ompi_info", "sinfo"):
        program(tmp_path / "bin" / name, "#!/bin/sh\n")
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def settings(*words: str) -> Settings:
    """Return the settings of a run over two machines."""
    return settings_from(launch_command_parser().parse_args([*MACHINES, *words, "s.py", "x"]))


VALUES = [
    "plain",
    "",
    "two words",
    'a"b',
    "$HOME",
    "back`tick`",
    "back\\slash",
    "100%n",
    "a;b",
    "it's",
    "ü ö",
    "a$(date)",
]


@pytest.mark.parametrize("value", [*VALUES, "two\nlines", " before", "after "])
def test_values_reach_a_shell_unchanged(value: str) -> None:
    """A remote shell reads them as they were; a line of DeepSpeed's file holds no line break and no space around."""
    text = carried(value, "pdsh")
    if value not in VALUES:
        assert text is None
        return
    assert text is not None
    quoted = f'"{text}"' if re.search(r"[^\w@%+=:,./-]", text) else text  # as DeepSpeed's add_export does
    command = f'export V={quoted}; printf %s "$V"'.replace("%s", "@").replace("%%", "%").replace("@", "%s")
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, env={"HOME": "/home"})
    assert shown.stdout == value


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("pdsh", ["--launcher", "pdsh", "--num_gpus", "1"]),
        ("slurm", ["--launcher", "slurm", "--num_gpus", "1"]),
        ("openmpi", ["--launcher", "openmpi"]),
        ("nossh", ["--no_ssh", "--node_rank", "1", "--num_gpus", "1"]),
    ],
)
def test_command_is_one_that_deepspeed_takes(folder: Path, launcher: str, words: list[str]) -> None:
    """MPI launchers take no number of slots, and `nossh` is a switch with the number of this machine."""
    more = ["--deepspeed-multinode-launcher", launcher, "--machine-rank", "1", "--main-process-ip", "h"]
    command = DeepSpeedLauncher().command(settings(*more))
    assert command[:4] == ["deepspeed", "--hostfile", "hosts", "--no_local_rank"]
    assert command[4:] == [*words, "--master_addr", "h", "--master_port", "29500", "s.py", "x"]


def launch(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run `accel launch` over two machines in a process of its own."""
    return limits.run(
        [sys.executable, "-m", "accel_launch", "launch", *MACHINES, *words, "s.py", "x"],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), **variables},
        quiet=12,
    )


@pytest.mark.slow
def test_variables_are_handed_over(folder: Path) -> None:
    """The program gets every variable in a file of its own after the user's lines; no file is changed or left."""
    (folder / "tmp").mkdir()
    (folder / "home").mkdir()
    (folder / "home" / ".deepspeed_env").write_text("FIRST=home\n\n")
    (folder / ".deepspeed_env").write_text("SECOND=here\n")
    more = {
        "MESSAGE": "two words; $HOME",
        "BASH_FUNC_x%%": "() { :; }",
        "TMPDIR": str(folder / "tmp"),
        "BANNER": "a\nb",
    }
    done = launch("--zero-stage", "3", **more)
    assert done.returncode == 0, done.stderr
    assert "cannot hand these variables over to other machines; got BANNER." in done.stderr
    noted = json.loads((folder / "noted.json").read_text())
    assert noted["lines"][:2] == ["FIRST=home", "SECOND=here"]
    assert {"MESSAGE=two words; \\$HOME", "ACCELERATE_DEEPSPEED_ZERO_STAGE=3"} <= set(noted["lines"])
    assert not any(line.startswith("BASH_FUNC") for line in noted["lines"])
    assert noted["file"].startswith(str(folder / "tmp"))
    assert list((folder / "tmp").iterdir()) == []
    assert (folder / ".deepspeed_env").read_text() == "SECOND=here\n"


def test_what_cannot_be_handed_over_starts_nothing(folder: Path) -> None:
    """A setting that does not reach other machines, and DeepSpeed's program where it is missing, are named."""
    words = ["--offload-optimizer-nvme-path", "/a disk", "--deepspeed-multinode-launcher", "openmpi"]
    with pytest.raises(ConfigurationError, match="got ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH='/a disk'"):
        DeepSpeedLauncher().run(settings(*words))
    (folder / "bin" / "deepspeed").unlink()
    with pytest.raises(MissingDependencyError, match=r"`deepspeed` is not on PATH.*launcher standard"):
        DeepSpeedLauncher().run(settings())
    assert not (folder / "noted.json").exists()


def test_no_file_where_the_environment_is_inherited(folder: Path) -> None:
    """Where every machine is started by hand, processes inherit the environment, and no file is made."""
    done = launch("--deepspeed-multinode-launcher", "nossh", "--machine-rank", "1", "--main-process-ip", "h")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "noted.json").read_text())["file"] is None


PDSH = f"""#!{sys.executable}
import re, subprocess, sys
hosts = sys.argv[sys.argv.index("-w") + 1].split(",")
words = " ".join(sys.argv[sys.argv.index("-w") + 2:])
ranks = []
for rank, host in enumerate(hosts):
    command = re.sub("%(.)", lambda found: {{"n": str(rank), "h": host, "%": "%"}}.get(found[1], found[0]), words)
    ranks.append(subprocess.Popen(["env", "-i", "sh", "-c", command]))
sys.exit(max(rank.wait() for rank in ranks))
"""


@requires("deepspeed")
def test_the_real_launcher_starts_both_hosts(folder: Path) -> None:
    """DeepSpeed's own program reaches two hosts through pdsh, and both get ranks, arguments and variables."""
    program(folder / "bin" / "deepspeed", f"#!{sys.executable}\nfrom deepspeed.launcher.runner import main\nmain()\n")
    program(folder / "bin" / "pdsh", PDSH)
    program(folder / "bin" / "ssh", "#!/bin/sh\n")
    (folder / "s.py").write_text(
        "import json, os, sys\nwanted = ('RANK', 'WORLD_SIZE', 'MESSAGE', 'ACCELERATE_DEEPSPEED_ZERO_STAGE')\n"
        "open(f'rank{os.environ[\"RANK\"]}', 'w').write(json.dumps([sys.argv[1:], *map(os.environ.get, wanted)]))\n"
    )
    message = 'a "b" $HOME 100%n'
    done = launch("--zero-stage", "3", "--main-process-ip", "127.0.0.1", MESSAGE=message, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        assert json.loads((folder / f"rank{rank}").read_text()) == [["x"], rank, "2", message, "3"]
