"""Saving and restoring a whole run in one process."""

import os
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import build, differences, everything

from accel_core.checkpoint import background, commit, names, pickles, tensor_file
from accel_core.checkpoint.format import FilePart
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.errors import (
    AccelError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
    UnsafeCheckpointError,
)
from accel_testing import limits

FILES = [
    "accel_manifest.json",
    "accel_progress.json",
    "custom_checkpoint_0.pkl",
    "model.safetensors",
    "optimizer.bin",
    "random_states_0.pkl",
    "scaler.pt",
    "scheduler.bin",
]
pytestmark = pytest.mark.usefixtures("fresh_state")


def full(*args: Any, **kwargs: Any) -> None:
    """Stand for a write to a disk that is full."""
    raise OSError(28, "No space left on device")


def test_a_blocking_save_starts_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written one after the other, by the thread that saves."""
    writers, write = set[int](), FilePart.write
    monkeypatch.setattr(FilePart, "write", lambda *given: (writers.add(threading.get_ident()), write(*given))[1])
    save_state(build(), tmp_path / "checkpoint")
    assert writers == {threading.get_ident()}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
def test_everything_comes_back(safe: bool, blocking: bool, tmp_path: Path) -> None:
    """Parameters, buffers, optimizer, schedule, scaler, random states, counters and objects, bit for bit."""
    run = build(1)
    before, dice = everything(run), random.getstate()
    saved = save_state(run, tmp_path / "ckpt", safe_serialization=safe, blocking=blocking)
    if not blocking:
        assert saved.wait() == tmp_path / "ckpt"
        assert saved.done()
    other = build(2)
    assert differences(before, everything(other))
    report = load_state(other, tmp_path / "ckpt")
    assert differences(before, everything(other)) == []
    assert random.getstate() == dice
    assert report.findings == []
    expected = FILES if safe else sorted({*FILES, "pytorch_model.bin"} - {"model.safetensors"})
    assert sorted(os.listdir(tmp_path / "ckpt")) == expected


def test_a_save_and_a_load_say_which_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At INFO, as in Accelerate, where people look them up in their logs."""
    run = build()
    with caplog.at_level("INFO", logger="accel_core.checkpoint"):
        save_state(run, tmp_path / "ckpt")
        load_state(run, tmp_path / "ckpt")
    place = tmp_path / "ckpt"
    assert caplog.messages[:2] == [f"Saving current state to {place}", f"Loading states from {place}"]


def test_saving_again_replaces_parts_and_keeps_foreign_files(tmp_path: Path) -> None:
    """A second save into the folder drops what the first wrote and keeps what others wrote, which is not read.

    A file of another size under a name that the first save wrote is one of others too.
    """
    run, foreign, other = build(1), tmp_path / "ckpt" / "model.safetensors", build(3)
    save_state(run, tmp_path / "ckpt", safe_serialization=False)
    save_state(build(2, steps=5), tmp_path / "other")
    shutil.move(tmp_path / "other" / "model.safetensors", foreign)
    shutil.rmtree(tmp_path / "other")
    load_state(other, tmp_path / "ckpt")
    assert torch.equal(other.models[0][0].weight, run.models[0][0].weight)
    foreign.unlink()
    theirs = ["README", "optimizer_7.bin", "pytorch_model.bin"]
    for name in theirs:
        (tmp_path / "ckpt" / name).write_text("mine")
    run.custom_objects.clear()
    save_state(run, tmp_path / "ckpt")
    assert sorted(os.listdir(tmp_path / "ckpt")) == sorted({*FILES, *theirs} - {"custom_checkpoint_0.pkl"})
    assert {(tmp_path / "ckpt" / name).read_text() for name in theirs} == {"mine"}
    assert os.listdir(tmp_path) == ["ckpt"]
    load_state(run, tmp_path / "ckpt")


@pytest.mark.slow
def test_a_checkpoint_is_found_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a link, as ".", relative, and through a folder that is not there; whole, and as crashes left it."""
    run = build(1)
    monkeypatch.chdir(tmp_path)
    save_state(run, "missing/../ckpt")
    (tmp_path / "link").symlink_to("ckpt")
    spellings = ["ckpt", "missing/../ckpt", str(tmp_path / "link"), "link", "./ckpt/."]
    for spelling in spellings:
        assert load_state(run, spelling).findings == []
    pending = tmp_path / "ckpt" / f"{names.HIDDEN}committed"
    shutil.copytree(tmp_path / "ckpt", tmp_path / "copy")
    (tmp_path / "copy").rename(pending)
    (tmp_path / "ckpt" / "model.safetensors").write_bytes(b"a mixture")
    monkeypatch.chdir(tmp_path / "ckpt")
    assert load_state(run, ".").folder == pending
    assert load_state(run, tmp_path / "link").folder == pending


def test_what_the_manifest_does_not_list_is_not_read(tmp_path: Path) -> None:
    """Files copied into a checkpoint are named, whatever component they would be, and the run is as it was."""
    small = BareRun([build(1).models[0]])
    save_state(small, tmp_path / "ckpt")
    save_state(build(2), tmp_path / "other")
    for name in ("optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl", "scaler.pt"):
        shutil.copy(tmp_path / "other" / name, tmp_path / "ckpt" / name)
    run = build(3)
    before = everything(run)
    with pytest.raises(CheckpointMismatchError, match="manifest does not list it") as caught:
        load_state(run, tmp_path / "ckpt")
    for name in ("optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl", "scaler.pt"):
        assert name in str(caught.value)
    assert differences(before, everything(run)) == []


@pytest.mark.parametrize("moment", ["optimizer", "model", "hooks"])
def test_a_save_of_another_process_while_one_is_read(
    moment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is an error on its own, and nothing was changed; the next load gives the new save."""
    save_state(build(1), tmp_path / "ckpt")
    second, saved, generators = build(2, steps=5), list[str](), torch.get_rng_state()

    def save_once() -> None:
        if not saved:
            saved.append("second")
            own = torch.get_rng_state()
            with monkeypatch.context() as patch:
                patch.setattr(background, "finish", lambda: None)
                torch.set_rng_state(generators)
                save_state(second, tmp_path / "ckpt")
            torch.set_rng_state(own)

    run = build(3)
    before = everything(run)
    with monkeypatch.context() as patch:
        if moment == "hooks":
            run.load_state_pre_hooks[0] = lambda models, input_dir: save_once()
        else:
            owner, name = {"optimizer": (pickles, "read_object"), "model": (tensor_file.TensorFile, "__init__")}[moment]
            original = getattr(owner, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                save_once()
                return result

            patch.setattr(owner, name, watched)
        with pytest.raises(CheckpointError, match=r"was replaced while it was read|cannot be restored"):
            load_state(run, tmp_path / "ckpt")
    assert saved == ["second"]
    assert differences(before, everything(run)) == []
    load_state(run, tmp_path / "ckpt")
    torch.set_rng_state(generators)
    assert run.step == 2


@pytest.mark.slow
def test_damage_to_any_file_is_named_and_changes_nothing(tmp_path: Path) -> None:
    """Each file truncated, altered, removed, or taken from another run: a named error, and the run as it was."""
    save_state(build(1), tmp_path / "ckpt")
    save_state(build(2, steps=5), tmp_path / "foreign")
    run = build(3)
    before = everything(run)
    for name in FILES:
        for harm in ("truncate", "remove", "exchange", *range(0, 100, 9)):
            shutil.copytree(tmp_path / "ckpt", tmp_path / "harmed")
            path = tmp_path / "harmed" / name
            raw = bytearray(path.read_bytes())
            if harm == "truncate":
                path.write_bytes(raw[: len(raw) // 2])
            elif isinstance(harm, int):  # changed after so many hundredths of its bytes
                raw[len(raw) * harm // 100] ^= 1
                path.write_bytes(raw)
            elif harm == "remove":
                path.unlink()
            else:
                path.write_bytes((tmp_path / "foreign" / name).read_bytes())
            mentioned = names.MANIFEST_NAME if name == names.MANIFEST_NAME and harm != "exchange" else "harmed"
            # a bit in the name of a class reads as a class that no checkpoint holds
            with pytest.raises((CheckpointDamagedError, UnsafeCheckpointError), match=mentioned) as caught:
                load_state(run, tmp_path / "harmed")
            assert name in str(caught.value) or harm == "exchange"
            assert isinstance(caught.value, CheckpointDamagedError) or f"{name}: damaged" in str(caught.value)
            assert differences(before, everything(run)) == []
            shutil.rmtree(tmp_path / "harmed")


def test_what_does_not_fit_is_listed_and_changes_nothing(tmp_path: Path) -> None:
    """Names, shapes, dtypes and groups are compared; one error lists them all."""
    save_state(build(1), tmp_path / "ckpt")
    run = build(2)
    run.models[0].append(torch.nn.Linear(4, 4))
    run.models[0][1] = torch.nn.Linear(1, 1)
    run.models[0][3] = torch.nn.BatchNorm1d(3)
    run.models[0][2].bias.data = run.models[0][2].bias.data.double()
    run.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    run.schedulers = [torch.optim.lr_scheduler.ExponentialLR(run.optimizers[0], 0.5)]
    before = everything(run)
    with pytest.raises(CheckpointMismatchError, match="nothing was changed") as caught:
        load_state(run, tmp_path / "ckpt")
    for words in (
        "model 0: missing: 4.weight",
        "model 0: mismatch: 3.running_mean has shape (4,) instead of (3,)",
        "model 0: mismatch: 2.bias has dtype torch.float32 instead of torch.float64",
        "optimizer 0: mismatch: 1 parameter groups instead of 2",
        "scheduler 0: mismatch",
        "(rank 0)",
    ):
        assert words in str(caught.value)
    assert differences(before, everything(run)) == []


def test_without_strict_what_fits_is_restored(tmp_path: Path) -> None:
    """strict=False takes matching tensors and whole components, and says what it left."""
    saved = build(1)
    save_state(saved, tmp_path / "ckpt")
    (tmp_path / "ckpt" / "scheduler.bin").write_bytes(b"broken")
    run = build(2)
    run.models[0][3] = torch.nn.BatchNorm1d(3)
    report = load_state(run, tmp_path / "ckpt", strict=False)
    assert torch.equal(run.models[0][0].weight, saved.models[0][0].weight)
    assert report.partial == ["model 0"]
    assert "scheduler 0" not in report.restored
    assert {"optimizer 0", "scaler", "random states"} <= set(report.restored)
    assert {found.component for found in report.damaged} == {"scheduler.bin", "scheduler 0"}
    assert all("3." in found.detail for found in report.mismatched)


def test_readers_take_the_options_of_the_caller(tmp_path: Path) -> None:
    """map_location, load_kwargs and assign reach those who read; another place than two words is a TypeError."""
    run = build(1)
    before = everything(run)
    save_state(run, tmp_path / "ckpt")
    other = build(2)
    weight = other.models[0][0].weight
    load_state(other, tmp_path / "ckpt", load_kwargs={"weights_only": False}, map_location="on_device", assign=True)
    assert differences(before, everything(other)) == []
    assert other.models[0][0].weight is not weight
    for place in ("cuda", torch.device("cpu"), {"cuda": "cpu"}):
        with pytest.raises(TypeError, match='Pass None, "cpu" or "on_device"'):
            load_state(build(3), tmp_path / "ckpt", map_location=place)


def test_generators_are_read_to_the_cpu_wherever_optimizers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on_device` reaches the reader of optimizers alone: a generator's state, and a position, cannot lie elsewhere."""
    run = build(1)
    before = everything(run)
    save_state(run, tmp_path / "ckpt")
    told: dict[str, Any] = {}
    read = pickles.read_object

    def watched(place: Path, name: str, **options: Any) -> Any:
        told[name] = options.get("map_location")
        return read(place, name, **options)

    monkeypatch.setattr(pickles, "read_object", watched)
    other = build(2)
    load_state(other, tmp_path / "ckpt", map_location="on_device")
    assert {name for name, place in told.items() if place is not None} == {"optimizer.bin"}
    assert differences(before, everything(other)) == []


def test_components_that_the_run_lacks_are_reported_only(tmp_path: Path) -> None:
    """A model alone is loaded from a full checkpoint, with a message; a run with more than a checkpoint is refused."""
    saved = build(1)
    save_state(saved, tmp_path / "ckpt")
    run = BareRun([build(2).models[0]])
    report = load_state(run, tmp_path / "ckpt")
    assert torch.equal(run.models[0][0].weight, saved.models[0][0].weight)
    left = {found.component for found in report.unexpected}
    assert left == {"optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl", "scaler.pt"}
    save_state(run, tmp_path / "ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"optimizer 0: missing: optimizer.bin is not there"):
        load_state(build(2), tmp_path / "ckpt")


@pytest.mark.slow
def test_hostile_files_are_refused_in_a_folder_of_accelerate(tmp_path: Path) -> None:
    """Without a manifest too, nothing is executed, no link leads out, and a FIFO does not hang."""
    save_state(build(1), tmp_path / "ckpt")
    for name in (names.MANIFEST_NAME, names.PROGRESS_NAME):
        (tmp_path / "ckpt" / name).unlink()
    run = build(2)
    path = tmp_path / "ckpt" / "optimizer.bin"
    whole = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnsafeCheckpointError, match=r"optimizer\.bin' is a FIFO"):
        load_state(run, tmp_path / "ckpt")
    path.unlink()
    (tmp_path / "outside").write_bytes(whole)
    path.symlink_to("../outside")
    with pytest.raises(UnsafeCheckpointError, match="leads out of its folder"):
        load_state(run, tmp_path / "ckpt")
    path.unlink()
    path.write_bytes(whole)
    load_state(run, tmp_path / "ckpt")


def test_hooks_see_and_change_what_is_saved_and_loaded(tmp_path: Path) -> None:
    """A save hook's files enter the manifest; weights and models that hooks remove are left alone."""
    run = build(1)

    def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        assert os.path.isdir(output_dir)
        os.makedirs(os.path.join(output_dir, "adapter"))
        Path(output_dir, "adapter", "own.txt").write_text("own")
        weights.pop()

    run.save_state_pre_hooks[0] = save_hook
    save_state(run, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt" / "model.safetensors").exists()
    other, seen = build(2), []
    weight = other.models[0][0].weight.clone()

    def load_hook(models: list[Any], input_dir: str) -> None:
        seen.append(Path(input_dir, "adapter", "own.txt").read_text())
        models.pop()

    other.load_state_pre_hooks[0] = load_hook
    load_state(other, tmp_path / "ckpt")
    assert seen == ["own"]
    assert torch.equal(other.models[0][0].weight, weight)
    (tmp_path / "ckpt" / "adapter" / "own.txt").write_text("oww")
    with pytest.raises(CheckpointDamagedError, match=r"adapter/own\.txt"):
        load_state(other, tmp_path / "ckpt")
    assert seen == ["own"]


def test_automatic_names_count_on_after_a_resume(tmp_path: Path) -> None:
    """Names are numbered, the limit holds, the latest is loaded, and numbering goes on behind it."""
    run = build(1)
    run.project.set_directories(str(tmp_path))
    run.project.automatic_checkpoint_naming, run.project.total_limit = True, 2
    for _ in range(3):
        save_state(run, "not used")
        run.step += 1
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    again = build(2)
    again.project.set_directories(str(tmp_path))
    again.project.automatic_checkpoint_naming = True
    again.project.iteration = 1
    with pytest.raises(ConfigurationError, match="exists already"):
        save_state(again)
    load_state(again)
    assert again.step == 3
    assert again.project.iteration == 3
    assert commit.find(commit.numbered(tmp_path / "checkpoints")[-1]) == tmp_path / "checkpoints" / "checkpoint_2"


def test_nowhere_to_save_to_or_load_from(tmp_path: Path) -> None:
    """Missing folders and arguments are told apart, and a checkpoint does not replace a file."""
    run = build(1)
    with pytest.raises(ConfigurationError, match="output_dir is None"):
        save_state(run)
    with pytest.raises(ConfigurationError, match="input_dir is None"):
        load_state(run)
    with pytest.raises(CheckpointNotFoundError, match="No checkpoint at") as caught:
        load_state(run, tmp_path / "nothing")
    assert isinstance(caught.value, ValueError)
    run.project.automatic_checkpoint_naming = True
    with pytest.raises(ConfigurationError, match="project_dir is None"):
        save_state(run)
    run.project.project_dir = str(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint"):
        load_state(run)
    run.project.automatic_checkpoint_naming = False
    (tmp_path / "file").write_text("mine")
    for target in ("file", "file/below"):
        with pytest.raises(CheckpointError):
            save_state(run, tmp_path / target)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_save_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing fails half-way, nothing is left of it, and the run can save again."""
    run = build(1)
    before = everything(run)
    save_state(run, tmp_path / "ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(pickles, "write_object", full)
        place = rf"Writing the checkpoint '{tmp_path}/ckpt' failed; got OSError"
        with pytest.raises(CheckpointError, match=rf"{place}.*No space left on device. Remove the cause"):
            save_state(build(2), tmp_path / "ckpt")
    assert os.listdir(tmp_path) == ["ckpt"]
    other = build(3)
    load_state(other, tmp_path / "ckpt")
    assert differences(before, everything(other)) == []
    save_state(other, tmp_path / "ckpt")


@pytest.mark.parametrize(
    ("cause", "kind", "text"),
    [
        (RuntimeError("no"), CheckpointError, "RuntimeError: no"),
        (OSError(28, "No space left on device"), CheckpointError, "OSError: [Errno 28] No space left on device"),
        (CheckpointMismatchError("It has too few rows."), CheckpointMismatchError, "It has too few rows"),
    ],
)
def test_a_component_that_cannot_be_restored_is_named(
    cause: Exception, kind: type[CheckpointError], text: str, tmp_path: Path
) -> None:
    """An error of the restore itself names folder, component and what was restored, and says what to do."""
    save_state(build(1), tmp_path / "ckpt")
    other = build(2)

    def fail(state: object) -> None:
        raise cause

    other.custom_objects[0].load_state_dict = fail
    with pytest.raises(CheckpointError) as caught:
        load_state(other, tmp_path / "ckpt")
    assert type(caught.value) is kind
    assert str(caught.value) == (
        f"The checkpoint {str(tmp_path / 'ckpt')!r} fits the run, and its registered object 0 could not be restored; "
        f"got {text}. Restored before it: model 0, scaler, optimizer 0, scheduler 0. Remove the cause, and start the "
        "run again, as it is restored in part only."
    )


def test_an_object_that_could_not_be_restored_is_not_saved(tmp_path: Path) -> None:
    """A registered object whose state needs code to come back is refused when it is saved."""
    run = build(1)
    run.custom_objects[0].state_dict = lambda: {"device": object()}
    with pytest.raises(AccelError, match="registered object 0"):
        save_state(run, tmp_path / "ckpt")
    assert os.listdir(tmp_path) == []


def test_changes_after_a_background_save_are_not_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot is of the moment of the call, though writing begins later and buffers are used again."""
    gate, write = threading.Event(), tensor_file.write_tensors

    def slow(*args: Any, **kwargs: Any) -> Any:
        gate.wait(limits.limit())
        return write(*args, **kwargs)

    monkeypatch.setattr(tensor_file, "write_tensors", slow)
    run = build(1)
    for round_number in range(2):
        gate.clear()
        before = everything(run)
        handle = save_state(run, tmp_path / f"ckpt{round_number}", blocking=False)
        assert not handle.done()
        with pytest.raises(TimeoutError, match="still under way"):
            handle.wait(0.01)
        with torch.no_grad():
            for parameter in run.models[0].parameters():
                parameter.add_(1)
        run.optimizers[0].step()
        gate.set()
        handle.wait()
        other = build(2)
        load_state(other, tmp_path / f"ckpt{round_number}")
        restored = everything(other)
        assert differences(before, restored) == []


def test_an_error_in_the_background_surfaces_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: at wait() or at the next save or load."""
    run = build(1)
    with monkeypatch.context() as patch:
        patch.setattr(pickles, "write_object", full)
        save_state(run, tmp_path / "ckpt", blocking=False)
        with pytest.raises(CheckpointError, match="No space left"):
            save_state(run, tmp_path / "ckpt")
        handle = save_state(run, tmp_path / "ckpt", blocking=False)
        with pytest.raises(CheckpointError, match="No space left"):
            handle.wait()
    background.finish()
    save_state(run, tmp_path / "ckpt")


def test_additional_ranks_derive_their_random_states(tmp_path: Path) -> None:
    """A rank that the checkpoint does not know gets random states of its own, the same at every load."""
    save_state(build(1), tmp_path / "ckpt")
    drawn = []
    for rank in (0, 1, 2, 1):
        run = build(2)
        run.world = replace(run.world, rank=rank)
        load_state(run, tmp_path / "ckpt")
        drawn.append((torch.rand(1).item(), random.random()))
    assert drawn[1] == drawn[3]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("given", ["background", "max_shard_size", "client_state", "kwargs", "exchange"])
def test_a_keyword_that_nobody_reads_is_refused_by_a_save(given: str, tmp_path: Path) -> None:
    """A save names it, writes nothing and counts nothing; what DeepSpeed's own save takes is no error elsewhere."""
    run = build()
    with pytest.raises(ConfigurationError, match=rf"got {given}, which has no effect\. Pass blocking=False"):
        save_state(run, tmp_path / "ckpt", **{given: True})
    assert os.listdir(tmp_path) == []
    save_state(run, tmp_path / "ckpt", save_latest=True, exclude_frozen_parameters=True)


def test_a_keyword_that_no_model_takes_is_refused_by_a_load(tmp_path: Path) -> None:
    """A load names it before anything changes, and passes on what `load_state_dict` takes."""
    save_state(build(1), tmp_path / "ckpt")
    run = build(2)
    before = everything(run)
    with pytest.raises(
        ConfigurationError, match=r"got nonsense, .* unexpected keyword argument 'nonsense'\)\. Pass the folder"
    ):
        load_state(run, tmp_path / "ckpt", nonsense=1)
    assert differences(before, everything(run)) == []
    load_state(run, tmp_path / "ckpt", assign=False)
    assert differences(before, everything(run))
