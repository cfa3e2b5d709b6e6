"""The batch script for SLURM, and what is refused before it is submitted."""

import subprocess
from pathlib import Path

import pytest

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_launch.launchers import registry
from accel_launch.launchers.slurm import SlurmLauncher

SLURM = ["--launcher", "slurm", "--machines", "2", "--processes-per-machine", "4"]


def test_batch_script_holds_the_run(settings, tmp_path: Path) -> None:
    """Machines and options are in its head, the launchers get the flags of this one, and bash can read it."""
    words = ["--mixed-precision", "bf16", "--slurm", "time=2:00:00", "--slurm", "exclusive", "--slurm", "comment=a b"]
    run = settings(*SLURM, *words, "train.py", "--name", "it's")
    launcher = registry.choose(run)
    assert isinstance(launcher, SlurmLauncher)
    script = launcher.job(run)
    lines = script.splitlines()
    for option in ("nodes=2", "ntasks-per-node=1", "time=2:00:00", "exclusive", "comment='a b'", "signal=B:USR1@120"):
        assert f"#SBATCH --{option}" in lines
    started = next(line for line in lines if line.startswith("srun "))
    assert started.endswith("launch --nproc-per-node=4 --mixed-precision=bf16 train.py --name 'it'\"'\"'s' &"), started
    assert "--slurm" not in script
    assert "--launcher" not in script
    (tmp_path / "job.sh").write_text(script)
    checked = subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_flags_of_the_script_give_the_same_settings(settings) -> None:
    """What the launchers in the job read is what this one read, also flags with several values and switches."""
    words = ["--cpu", "--gpu-ids", "0,1", "--fp8-override-linear-precision", "1,0,1", "--main-process-port", "29501"]
    first = settings(*SLURM, *words, "train.py", "-x")
    command = SlurmLauncher().command(first)
    second = settings(*command[command.index("launch") + 1 :])
    assert (second.script, second.arguments) == (first.script, first.arguments)
    different = {key for key in first if first[key] != second[key]}
    assert different == {"launcher", "num_machines"}  # SLURM says how many machines there are


def test_containers_belong_to_srun(settings) -> None:
    """The batch script runs outside the container, which has a Python of its own."""
    run = settings(*SLURM, "--slurm", "container-image=torch.sqsh", "train.py")
    assert SlurmLauncher().command(run)[:3] == ["srun", "--container-image=torch.sqsh", "accel"]
    assert "#SBATCH --container" not in SlurmLauncher().job(run)


@pytest.mark.parametrize("option", ["comment=a\n#SBATCH --wrap=x", "comment=a\x1b[2J", "=gpu"])
def test_lines_in_an_option_are_refused(settings, option: str) -> None:
    """What is no KEY=VALUE in one line does not go into the batch script."""
    with pytest.raises(ConfigurationError, match=r"got .*Give it KEY=VALUE in one line"):
        settings(*SLURM, "--slurm", option, "train.py")


def test_machine_without_sbatch_is_refused(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that cannot submit says so, and names --dry-run."""
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingDependencyError, match=r"got none on PATH.*--dry-run"):
        SlurmLauncher().run(settings(*SLURM, "train.py"))
