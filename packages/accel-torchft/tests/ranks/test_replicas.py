"""Replicas that die by SIGKILL and come back, with the real launcher and torchft over gloo."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accel_testing import limits

sys.path.insert(0, str(Path(__file__).parents[1]))
from replica_runs import SAMPLES, check, command_of, launched

pytest.importorskip("accel_launch", reason="accel-launch is an extra")
pytest.importorskip("torchft", reason="torchft is not installed")

ASKS = 4.0  # seconds in which a replica that was stopped asks who is there


def test_a_replica_that_dies_twice_costs_no_sample(tmp_path: Path) -> None:
    """A replica dies before its gradients are exchanged and behind a step: the other one does not start again."""
    found = launched(tmp_path, "1:0:3:before,1:1:4:behind")
    report = found["report"]
    assert "replica 1 ended: killed by SIGKILL" in report
    assert "was made without 1, " in report
    assert found["0-0"]["lost"] > 0
    check(found, tmp_path, 3, {1: 2})


def test_a_metered_run_loses_no_sample_where_a_replica_dies(tmp_path: Path) -> None:
    """Steps are measured and averaged in one run: each replica has numbers of its own, with the wait for others."""
    found = launched(tmp_path, "1:0:3:before", "metered")
    check(found, tmp_path, 3, {1: 1})
    layer, parts = torch.nn.Linear(4, 2), ("waiting", "forward", "backward", "exchange", "optimizer", "saving", "rest")
    for name in ("0-0", "1-0"):
        measured = found[name]["measured"]
        assert len(measured) >= 3
        for numbers, size in measured:
            with FlopCounterMode(display=False) as counter:
                layer(torch.rand(size, 4)).sum().backward()
            assert numbers["flops"] == counter.get_total_flops()
            assert numbers["exchange"] > 0
            assert numbers["seconds"] == pytest.approx(sum(numbers[part] for part in parts))
            assert numbers["samples_per_second"] in (None, pytest.approx(size / numbers["seconds"]))


@pytest.mark.full("more axes at once")
@pytest.mark.parametrize("inside", ["ddp", "fsdp2", "tp"])
def test_replicas_of_several_ranks_end_equal(inside: str, tmp_path: Path) -> None:
    """A replica of two ranks, with whole models, shards or a layer that is split, loses one, and comes back whole."""
    found = launched(tmp_path, "1:0:3:before", inside, ranks=2)
    check(found, tmp_path, 3, {1: 1}, ranks=1 if inside == "tp" else 2)  # ranks that read samples of their own


@pytest.mark.full("another case of a grid")
def test_three_replicas_with_workers_of_which_the_first_dies(tmp_path: Path) -> None:
    """Batches that workers read ahead are read again by those that live; who prints is another one meanwhile."""
    found = launched(tmp_path, "0:0:2:before,2:0:4:behind", "workers", replicas=3)
    check(found, tmp_path, 3, {0: 1, 2: 1})


@pytest.mark.full("another case of a grid")
def test_the_scale_of_fp16_moves_with_the_steps(tmp_path: Path) -> None:
    """A replica that comes takes it over, and a step that is not made leaves it alone."""
    found = launched(tmp_path, "1:0:3:before", "fp16")
    assert found["0-0"]["scale"] > torch.amp.GradScaler("cpu").get_scale()
    check(found, tmp_path, 3, {1: 1})


@pytest.mark.full("another case of a grid")
def test_a_replica_may_stay_away(tmp_path: Path) -> None:
    """Without healing the others train on alone, with all samples that the one that died left."""
    found = launched(tmp_path, "1:0:3:before", "once", gone=1)
    assert "replica 1 ended: killed by SIGKILL; it stays away" in found["report"]
    check(found, tmp_path, 3, {})


@pytest.mark.full("another case of a grid")
def test_a_signal_ends_all_replicas(tmp_path: Path) -> None:
    """Where a script takes no notice of SIGTERM, its replicas end by it, and none is started again."""
    with subprocess.Popen(command_of(tmp_path, "", "slow"), stderr=subprocess.PIPE, text=True) as run:
        assert limits.wait_until(lambda: (tmp_path / "read-1-0").exists(), quiet=20)
        run.send_signal(signal.SIGTERM)
        _, errors = limits.communicate(run, quiet=40)
    assert run.returncode == 128 + signal.SIGTERM, errors
    assert "0 of 2 replicas came to the end of the script" in errors
    starts = [*tmp_path.glob("start-*")]
    assert sorted(path.name for path in starts) == ["start-0-0", "start-1-0"]
    assert not any((Path("/proc") / path.read_text()).exists() for path in starts)


@pytest.mark.full("another case of a grid")
def test_who_gives_its_state_may_die_of_it(tmp_path: Path) -> None:
    """A replica that dies while another one takes over its state costs neither that one nor the third replica's."""
    found = launched(tmp_path, "1:0:3:before,giving", replicas=3)
    assert (tmp_path / "gave").exists()
    (victim,) = [number for number in (0, 2) if found[f"{number}-0"]["life"]]
    check(found, tmp_path, 3, {1: 1, victim: 1})


@pytest.mark.full("another case of a grid")
def test_after_a_death_in_a_save_another_replica_saves(tmp_path: Path) -> None:
    """One replica saves for all; where it dies meanwhile, that save never was, and another replica makes the next."""
    found = launched(tmp_path, "0:0:4:saving", "saving")
    check(found, tmp_path, 3, {0: 1})
    assert [path.name for path in tmp_path.iterdir() if "state" in path.name] == ["state"]
    assert (tmp_path / "state" / "model.safetensors").exists()


@pytest.mark.full("another case of a grid")
def test_the_lighthouse_may_die(tmp_path: Path) -> None:
    """Where the process dies that knows who is there, another one is started, and no replica is."""

    def end_lighthouse(run: subprocess.Popen[str]) -> None:
        assert limits.wait_until(lambda: (tmp_path / "read-0-0").exists(), quiet=20)
        threads = (Path("/proc") / str(run.pid) / "task").glob("*/children")
        children = [each for path in threads for each in path.read_text().split()]
        words = {int(each): (Path("/proc") / each / "cmdline").read_bytes() for each in children}
        (lighthouse,) = [each for each, line in words.items() if b"accel_torchft.launching.lighthouse" in line]
        os.kill(lighthouse, signal.SIGKILL)

    found = launched(tmp_path, "", "slow", epochs=6, meanwhile=end_lighthouse)
    assert "the lighthouse ended, and starts again" in found["report"]
    check(found, tmp_path, 6, {})


@pytest.mark.full("another case of a grid")
def test_the_loss_of_too_many_saves_and_asks_for_another_start(tmp_path: Path) -> None:
    """Who is left waits for a while, saves, and ends with 75; so does the launcher, where nobody can come back."""
    kills = ",".join(["1:0:3:before", *(f"1:{life}:0:before" for life in range(1, 8))])
    ended = limits.run(command_of(tmp_path, kills, "hasty", "--min-replicas=2"), quiet=120)
    assert ended.returncode == 75, ended.stderr
    assert "replica 1 ended: killed by SIGKILL" in ended.stderr
    assert "Too few replicas for a step: fewer than 2 of 2 came in 3 s" in ended.stderr
    assert (tmp_path / "checkpoints" / "checkpoint_0" / "model.safetensors").exists()


@pytest.mark.full("another case of a grid")
def test_a_replica_that_is_silent_for_a_while_comes_back(tmp_path: Path) -> None:
    """The others go on without one that does not answer, and heal it when it answers again; it is not started again.

    It comes between two epochs, of which it has missed some: it reads in the order of the others all the same.
    """

    def hold_up(run: subprocess.Popen[str]) -> None:
        note = tmp_path / "start-1-0"
        assert limits.wait_until(lambda: all((tmp_path / f"read-{n}-0").exists() for n in (0, 1)), quiet=20)
        os.kill(int(note.read_text()), signal.SIGSTOP)
        before = steps()
        assert limits.wait_until(lambda: steps() > before + 40, quiet=20)
        (tmp_path / "hold").touch()
        assert limits.wait_until((tmp_path / "held").exists, quiet=20)
        os.kill(int(note.read_text()), signal.SIGCONT)
        time.sleep(ASKS)
        (tmp_path / "hold").unlink()

    def steps() -> int:
        return len((tmp_path / "read-0-0").read_text().splitlines())

    found = launched(tmp_path, "", "slow", "brief", epochs=12, meanwhile=hold_up)
    assert "was made without 1" in found["report"]
    check(found, tmp_path, 12, {})


def check_tracked(folder: Path) -> None:
    """Check that the losses of all steps were logged once, in one run, by two processes one after the other."""
    lines = [line.split() for line in (folder / "tracked").read_text().splitlines() if line.startswith("loss")]
    read = [line for path in folder.glob("read-*") for line in path.read_text().splitlines()]
    assert [int(step) for *_, step in lines] == sorted({int(line.split()[0]) for line in read})
    _, runs, processes, _ = zip(*lines, strict=True)
    assert {*runs} == {processes[0]}
    assert len({*processes}) == 2


@pytest.mark.full("another case of a grid")
def test_trackers_go_on_where_the_replica_dies_that_ran_them(tmp_path: Path) -> None:
    """Another one goes on with the run, and keeps it when the first one is back: no step lacks, and none is doubled."""
    found = launched(tmp_path, "0:0:3:before", "slow", "tracking", replicas=3)
    check_tracked(tmp_path)
    check(found, tmp_path, 3, {0: 1})


@pytest.mark.parametrize("how", ["", pytest.param("aside", marks=pytest.mark.full("another case of a grid"))])
def test_a_replica_that_is_silent_in_a_save_comes_back(how: str, tmp_path: Path) -> None:
    """Another one saves and tracks meanwhile, and clears away what the first one wrote: its save is lost, no more."""

    def hold_up(run: subprocess.Popen[str]) -> None:
        assert limits.wait_until((tmp_path / "paused").exists, quiet=20)
        assert limits.wait_until((tmp_path / "state" / "model.safetensors").exists, quiet=20)
        os.kill(int((tmp_path / "start-0-0").read_text()), signal.SIGCONT)

    found = launched(tmp_path, "", "slow", "saving", "pausing", "tracking", how, epochs=6, meanwhile=hold_up)
    assert "A save is left to the replicas that went on without this one" in found["report"]
    check_tracked(tmp_path)
    check(found, tmp_path, 6, {}, main=1)


def test_a_replica_that_hangs_does_not_keep_the_launcher(tmp_path: Path) -> None:
    """One that makes no step for as long as a step may take is ended by name, where the others have come to the end."""

    def stop(run: subprocess.Popen[str]) -> None:
        assert limits.wait_until(lambda: all((tmp_path / f"read-{n}-0").exists() for n in (0, 1)), quiet=20)
        os.kill(int((tmp_path / "start-1-0").read_text()), signal.SIGSTOP)

    found = launched(tmp_path, "", "slow", "hasty", "brief", epochs=4, gone=1, meanwhile=stop)
    report = found["report"]
    assert "1 of 2 replicas came to the end of the script" in report
    assert "replica 1 hung, and was ended: it made no step for 7 s after others came to the end" in report
    assert found["0-0"]["weights"]["times"].tolist() == [4] * SAMPLES
    assert not (Path("/proc") / (tmp_path / "start-1-0").read_text()).exists()
