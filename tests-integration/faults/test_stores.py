"""Runs whose checkpoints lie in an object store: sharded ones, killed ones, and the commands that read them."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "accel-core" / "tests" / "stores"))
from store_server import FaultyProxy, serving, settings

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.address import Address, address_of
from accel_core.checkpoint.remote import commits, store
from accel_core.comm.objects import gather_object
from accel_core.errors import CheckpointDamagedError
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_parallel.pipeline.kwargs import PipelineKwargs
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import limits, requires, world

ROOT = Path(__file__).parents[2]
GRID = pytest.mark.full("another case of a grid")
ALONE = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # each rank on a machine of its own
STEPS = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from accel_core.accelerator import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (batch,) in loader:
    accelerator.backward(model(batch).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[FaultyProxy]:
    """Run one server for the tests of this file."""
    pytest.importorskip("s3fs")
    with serving() as proxy:
        yield proxy


@pytest.fixture
def bucket(s3: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the address of a fresh bucket, which clients in this process and its children find."""
    import s3fs

    for name, value in settings(s3).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{abs(hash(str(tmp_path))):x}"
    s3fs.S3FileSystem().mkdir(name)
    s3.begin()
    return f"s3://{name}"


def command(*words: object) -> list[str]:
    """Return a command line of the launcher."""
    return [sys.executable, "-m", "accel_launch", *map(str, words)]


def place_of(address: str) -> store.Store:
    """Return the store at an address."""
    found = address_of(address)
    assert isinstance(found, Address)
    return store.Store(found)


def sharded(seed: int, kind: str = "fsdp2") -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    """Return a model of which each rank holds a part, after one step."""
    given: dict[str, Any] = {"parallelism_config": ParallelismConfig(pp_size=ensure().size)}
    given["kwargs_handlers"] = [PipelineKwargs(loss_fn=lambda values, _: values.pow(2).mean(), microbatches=4)]
    if kind != "pp":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(kind[4]), state_dict_type="SHARDED_STATE_DICT")
        given = {"fsdp_plugin": plugin}
    accelerator = Accelerator(cpu=True, **given)
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    found = model(torch.ones(4, 256))
    accelerator.backward(found.loss if kind == "pp" else found.pow(2).mean())
    optimizer.step()
    return accelerator, model, optimizer


def fingerprint(accelerator: Accelerator, model: nn.Module) -> float:
    """Return a number that follows from all weights; every rank calls it."""
    state = accelerator.get_state_dict(model) or {}
    return float(gather_object([sum(float(value.double().abs().sum()) for value in state.values())])[0])


def save_sharded(variables: dict[str, str], temporary: str, address: str, told: Path, kind: str = "fsdp2") -> None:
    """Save a sharded run, and note what its weights are."""
    os.environ.update(variables)
    tempfile.tempdir = temporary
    accelerator, model, _ = sharded(1, kind)
    found = fingerprint(accelerator, model)
    accelerator.save_state(address)
    accelerator.save_state(f"{address}-model", parts=("model",))
    if accelerator.is_main_process:
        told.write_text(repr(found))


def load_sharded(variables: dict[str, str], temporary: str, address: str, told: Path, kind: str) -> None:
    """Load it on any number of ranks, each with the temporary files of its machine."""
    os.environ.update(variables)
    tempfile.tempdir = temporary
    accelerator, model, _ = sharded(2, kind)
    if accelerator.num_processes > int(os.environ["LOCAL_WORLD_SIZE"]):
        tempfile.tempdir = f"{temporary}/{accelerator.process_index}"
        os.makedirs(tempfile.tempdir, exist_ok=True)
    for at in (address, f"{address}-model"):
        accelerator.load_state(at)
        assert fingerprint(accelerator, model) == pytest.approx(float(told.read_text()), rel=1e-9)
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()


@pytest.mark.parametrize(
    ("kind", "saving", "loading", "machines"),
    [
        ("fsdp2", 2, 2, 1),
        ("fsdp2", 1, 4, 1),
        ("fsdp2", 2, 2, 2),
        ("fsdp1", 2, 2, 2),
        ("pp", 2, 2, 2),
        pytest.param("fsdp2", 4, 2, 2, marks=GRID),
        pytest.param("pp", 4, 2, 2, marks=GRID),
    ],
)
def test_sharded_runs_come_back_on_other_numbers_of_ranks(
    s3: FaultyProxy, bucket: str, tmp_path: Path, kind: str, saving: int, loading: int, machines: int
) -> None:
    """Ranks upload their shards, and any number of ranks, of one machine or two, loads them."""
    arguments = settings(s3), str(tmp_path), f"{bucket}/run", tmp_path / "told", kind
    world(saving, quiet=20)(save_sharded)(*arguments)
    world(loading, quiet=20, environment=ALONE if machines > 1 else {})(load_sharded)(*arguments)


def load_damaged(variables: dict[str, str], temporary: str, address: str) -> None:
    """Load on two machines what one of them reads a damaged piece of; all ranks raise, and nothing changes."""
    os.environ.update(variables)
    accelerator, model, _ = sharded(2)
    tempfile.tempdir = f"{temporary}/{accelerator.process_index}"
    os.makedirs(tempfile.tempdir, exist_ok=True)
    before = fingerprint(accelerator, model)
    with pytest.raises(CheckpointDamagedError, match=r"__0_0\.distcp"):
        accelerator.load_state(address)
    assert fingerprint(accelerator, model) == before


@pytest.mark.parametrize("saving", [2, 1])
def test_partial_reads_find_a_damaged_piece_of_a_shard(
    s3: FaultyProxy, bucket: str, tmp_path: Path, saving: int
) -> None:
    """A byte that changed in a shard, of which machines fetch all or pieces, is found before anything is restored."""
    import s3fs

    arguments = settings(s3), str(tmp_path), f"{bucket}/run", tmp_path / "told"
    world(saving, quiet=20)(save_sharded)(*arguments)
    fs = s3fs.S3FileSystem()
    (name,) = (each for each in fs.find(f"{bucket}/run") if each.endswith("optimizer_0/__0_0.distcp"))
    raw = bytearray(fs.cat_file(name))
    raw[len(raw) // 2] ^= 1
    fs.pipe_file(name, bytes(raw))
    world(2, quiet=20, environment=ALONE)(load_damaged)(*arguments[:3])


@pytest.mark.full("another case of a grid")
def test_check_resume_saves_to_a_store(s3: FaultyProxy, bucket: str, tmp_path: Path) -> None:
    """`check-resume --store` saves the interrupted run at an address, passes, and leaves nothing there."""
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    words = command("check-resume", "--cpu", "--at=2", "--steps=4", f"--store={bucket}/checked", script)
    assert "identical" in limits.run(words, quiet=60, check=True).stdout
    assert any("check-resume-" in path for _, path, _ in s3.seen)
    assert place_of(bucket).sizes("") == {}


def test_merge_weights_reads_and_writes_stores(s3: FaultyProxy, bucket: str, tmp_path: Path) -> None:
    """`merge-weights` reads the shards of a checkpoint at an address, and writes whole weights to another."""
    arguments = settings(s3), str(tmp_path), f"{bucket}/run", tmp_path / "told"
    world(2, quiet=20)(save_sharded)(*arguments)
    merge = command("merge-weights", f"{bucket}/run/pytorch_model_fsdp_0", f"{bucket}/merged")
    limits.run(merge, quiet=60, check=True)
    assert place_of(bucket).sizes("merged").keys() == {"model.safetensors"}


@requires("sklearn", "tensorboard")
@pytest.mark.full("a whole training")
def test_an_example_that_is_killed_goes_on_from_a_store(s3: FaultyProxy, bucket: str, tmp_path: Path) -> None:
    """`train_digits.py` is killed after its save to `s3://`, resumed, and ends with the weights of a run in one go."""
    example = [ROOT / "examples" / "train_digits.py", f"--folder={tmp_path / 'run'}"]
    words = command("launch", "--cpu", "--num-processes=2", *example)
    straight = limits.run([*words, f"--state={bucket}/straight"], quiet=120, check=True)
    killed = subprocess.Popen([*words, f"--state={bucket}/killed"], stderr=subprocess.DEVNULL, start_new_session=True)
    found, deadline = place_of(f"{bucket}/killed"), limits.Deadline(120)
    while commits.newest(found) is None:
        assert killed.poll() is None
        assert not deadline.is_over
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    resumed = limits.run([*words, f"--state={bucket}/killed", "--resume"], quiet=120, check=True)
    assert "equal to the uninterrupted run" in resumed.stdout
    accuracy = [re.search(r"test accuracy +(\S+)", each.stdout) for each in (straight, resumed)]
    assert None not in accuracy
    assert len({found[1] for found in accuracy if found}) == 1
    print(resumed.stdout)
