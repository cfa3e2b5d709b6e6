"""One model or optimizer of FSDP, of either version, in the files and folders that Accelerate names for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from accel_core.checkpoint import commit, names, plain
from accel_core.checkpoint.format import Source
from accel_core.checkpoint.model import StateOnlyModel
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.report import Restoration, RestoreReport
from accel_core.comm.control import in_step
from accel_core.errors import CheckpointError, CheckpointNotFoundError, EngineUnavailableError, PartView
from accel_core.modules.unwrap import canonical_name, extract_model_from_parallel
from accel_core.process.world import ensure
from accel_core.strategies.recipe import inside
from accel_parallel.checkpoint import models as stored_models
from accel_parallel.checkpoint import optimizers as stored_optimizers
from accel_parallel.checkpoint import writer
from accel_parallel.fsdp1 import states
from accel_parallel.fsdp1.format import named_optimizer
from accel_parallel.sharding.gather import gather

_WHOLE = "FULL_STATE_DICT"


def save_model(kind: str, model: nn.Module, folder: Path, index: int, *, adapter_only: bool) -> None:
    """Write a model's weights: whole into one file, or in shards; every rank calls it.

    Raises:
        CheckpointError: Writing failed; what was there before is intact.
        EngineUnavailableError: Another kind.
    """
    wrapper = _wrapper(kind, model)
    _write(
        "save_fsdp_model",
        lambda: _chosen(model, states.own_state(model, wrapper), adapter_only),
        folder / _name(kind, names.FSDP_MODEL_NAME, index),
        "model" if kind != _WHOLE else "",
        model,
    )


def load_model(kind: str, model: nn.Module, folder: Path, index: int, *, adapter_only: bool) -> object:
    """Load what `save_model`, or Accelerate, wrote into a model, once it is known to fit; every rank calls it.

    Raises:
        CheckpointError: It is missing, damaged, unsafe or does not fit; every rank raises, and nothing was changed.
        EngineUnavailableError: As for `save_model`.
    """
    wrapper = _wrapper(kind, model)
    state: dict[str, Any] = {}
    full: dict[str, str] = {}
    stand = StateOnlyModel(state)

    def look(source: Source, rank: int) -> Restoration:
        state.update(states.own_state(model, wrapper))
        known = {id(value): name for name, value in state.items()}
        stand.state = _chosen(model, dict(state), adapter_only)
        full.update({name: known[id(value)] for name, value in stand.state.items()})
        return stored_models.restoration(stand, index, source, rank)

    def finish() -> None:
        given = {full[name]: value for name, value in stand.state.items()}
        if wrapper is not None:
            states.load_state(wrapper, state | given)
            return
        bare = extract_model_from_parallel(model, keep_torch_compile=False)
        fitting = {key: given[name] for key in bare.state_dict() if (name := canonical_name(key)) in given}
        bare.load_state_dict(fitting, strict=False)  # what is left out was not asked for, as of an adapter

    _read("load_fsdp_model", look, finish, folder, _name(kind, names.FSDP_MODEL_NAME, index), model)
    return nn.Module().load_state_dict({})  # what torch returns where all keys match


def save_optimizer(kind: str, optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path, index: int) -> None:
    """Write the state of an optimizer by the names of its parameters; arguments and errors as for `save_model`."""
    state = partial(states.own_optimizer_state, optimizer, [model], _wrapper(kind, model))
    key = "optimizer" if kind != _WHOLE else ""
    _write("save_fsdp_optimizer", state, folder / _name(kind, names.OPTIMIZER_NAME, index), key, model)


def load_optimizer(kind: str, optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path, index: int) -> None:
    """Load what `save_optimizer`, or Accelerate, wrote into an optimizer; errors as for `load_model`."""
    wrapper = _wrapper(kind, model)

    def look(source: Source, rank: int) -> Restoration:
        own = named_optimizer(optimizer, [model], wrapper)
        return stored_optimizers.restoration(own, index, source, rank)

    _read("load_fsdp_optimizer", look, lambda: None, folder, _name(kind, names.OPTIMIZER_NAME, index), model)


def _wrapper(kind: str, model: nn.Module) -> nn.Module | None:
    """Return what FSDP1 wraps a model in; refuse a layout that is neither written nor read here."""
    if kind not in (_WHOLE, "SHARDED_STATE_DICT"):
        raise EngineUnavailableError(
            f"A single model is saved whole or in shards; got state_dict_type={kind}. Use 'SHARDED_STATE_DICT', or "
            "save_state."
        )
    found = inside(model)
    return found if isinstance(found, FullyShardedDataParallel) else None


def _chosen(model: nn.Module, state: dict[str, Any], adapter_only: bool) -> dict[str, Any]:
    """Return a state, or of a model of peft's what belongs to its adapter, under the names that peft gives that."""
    peft = sys.modules.get("peft")
    bare = extract_model_from_parallel(model, keep_torch_compile=False)
    if not adapter_only or peft is None or not isinstance(bare, peft.PeftModel):
        return state
    adapter: str = bare.active_adapter
    with _without_wrappers(bare):
        chosen: dict[str, Any] = peft.get_peft_model_state_dict(bare, state_dict=state, adapter_name=adapter)
    if not chosen:
        raise CheckpointError(
            f"peft found none of the weights of the adapter {adapter!r} among {len(state)}; got nothing to save or "
            "load. Pass adapter_only=False, or use save_state."
        )
    return chosen


@contextmanager
def _without_wrappers(model: nn.Module) -> Iterator[None]:
    """Take the parts of a model out of what FSDP1 wraps them in, in the block."""
    # peft looks for the names that modules have, and finds none of a state under the bare model's names.
    wrapped_parts = [
        (parent, name, part)
        for parent in model.modules()
        for name, part in parent.named_children()
        if isinstance(part, FullyShardedDataParallel)
    ]
    for parent, name, part in wrapped_parts:
        parent._modules[name] = part.module
    try:
        yield
    finally:
        for parent, name, part in wrapped_parts:
            parent._modules[name] = part


def _name(kind: str, stem: str, index: int) -> str:
    return names.numbered(stem, index) if kind == _WHOLE else names.sharded(stem, index)


def _parts_of(model: nn.Module) -> dict[str, PartView]:
    return {name: PartView("parameter") for name, _ in model.named_parameters()}


def _write(operation: str, collect: Callable[[], dict[str, Any]], path: Path, key: str, model: nn.Module) -> None:
    """Write a state into a file, or under a key into a folder of shards."""
    world = ensure()
    ranks = Ranks(world, operation)
    state: dict[str, Any] = {}
    with ranks.together(f"Collecting the state for {str(path)!r}"), in_step(world, operation, _parts_of(model)):
        state = collect() if key else gather(collect(), keep=world.is_main)
    if key:
        _write_shards({key: state}, path, ranks, on_this_disk=world.is_local_main)
        return
    with ranks.together(f"Writing {str(path)!r}"):
        if world.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            plain.save(state, path)


def _write_shards(state: dict[str, Any], target: Path, ranks: Ranks, *, on_this_disk: bool) -> None:
    """Write a folder of shards beside its place, and put it there when it is complete."""
    doing = f"Writing {str(target)!r}"
    folder, identity = target.parent, ranks.broadcast(names.fresh_id())
    staging = commit.staging_of(folder, identity)
    leads = False
    try:
        # The first rank makes the folder on its disk, then those of machines that have disks of their own.
        for makes in (ranks.rank == 0, on_this_disk):
            with ranks.together(doing):
                if target.exists() and not target.is_dir():
                    raise CheckpointError(f"Shards need a folder; got the file {str(target)!r}. Rename it.")
                if makes and not staging.is_dir():
                    leads = True
                    commit.stage(folder, identity)
        with ranks.together(doing) as exchange:
            (part,) = writer.plan({target.name: state}, ranks.rank, exchange)
            part.write(staging, ranks.rank)
            notes = exchange(part.note)
        with ranks.together(doing):
            if leads:
                part.conclude(staging, ranks.rank, notes)
                before = {f"{target.name}/{name}" for name in commit.files_in(target)} if target.exists() else set()
                commit.publish(staging, folder, stale=before - commit.files_in(staging).keys(), last=[])
    finally:
        if leads:
            commit.clear(staging)


def _read(
    operation: str,
    look: Callable[[Source, int], Restoration],
    finish: Callable[[], None],
    folder: Path,
    name: str,
    model: nn.Module,
) -> None:
    """Compare what lies in a folder under a name with what is there, and restore it if it fits on all ranks."""
    world = ensure()
    ranks, path = Ranks(world, operation), folder / name
    with ranks.together(f"Reading {str(path)!r}"):
        if not path.exists():
            raise CheckpointNotFoundError(
                f"There is no {name} in {str(folder)!r}; got nothing to read. Pass the folder that was saved, and the "
                "same state_dict_type."
            )
    plan = Restoration(name)
    with ranks.together(f"Reading {str(path)!r}"), in_step(world, operation, _parts_of(model)):
        plan = look(Source(folder, None, ranks.size, {}, {}, only=name), ranks.rank)
    # Several ranks find the same.
    found = dict.fromkeys(each for findings in ranks.exchange(plan.findings) for each in findings)
    report = RestoreReport(path, ranks.size, findings=list(found))
    error = report.error()
    if error is not None:
        raise type(error)(
            f"The checkpoint {str(path)!r} does not fit, and nothing was changed; got:\n{report}\nLoad a checkpoint "
            "of this model and optimizer."
        )
    with ranks.together(f"Restoring from {str(path)!r}", "It is only partly restored; start the run again."):
        plan.apply()
        finish()
