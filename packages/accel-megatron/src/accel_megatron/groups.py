"""Megatron's numbering of ranks, its process groups and its random generators."""

from __future__ import annotations

import torch
from torch import distributed as dist

from accel_core.comm import control
from accel_core.errors import StateError
from accel_core.mesh.layout import Layout
from accel_megatron import library
from accel_megatron.arguments import Degrees, degrees_of
from accel_megatron.run import MegatronRun


def lay_out(rank: int, world_size: int, degrees: Degrees) -> Layout:
    """Return the layout of the ranks in megatron-core's order: tensor fastest, then context, data and pipeline."""
    replicas = world_size // (degrees.tensor * degrees.pipeline * degrees.context)
    # The order in which megatron-core numbers ranks, outermost axis first.
    sizes = {"pp": degrees.pipeline, "dp_replicate": replicas, "cp": degrees.context, "tp": degrees.tensor}
    return Layout(rank, tuple(sizes.items()))


def join(run: MegatronRun) -> None:
    """Create megatron-core's process groups, once per process; every rank calls it.

    Raises:
        StateError: The process already has groups of other sizes.
    """
    state = library.core("parallel_state")
    degrees = degrees_of(run.plugin, run.world.size)
    if state.model_parallel_is_initialized():
        _refuse_other_groups(degrees)
        return
    state.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tensor,
        pipeline_model_parallel_size=degrees.pipeline,
        virtual_pipeline_model_parallel_size=run.arguments.virtual_pipeline_model_parallel_size,
        context_parallel_size=degrees.context,
        expert_model_parallel_size=degrees.expert,
        expert_tensor_parallel_size=degrees.expert_tensor,
    )


def _refuse_other_groups(degrees: Degrees) -> None:
    state = library.core("parallel_state")
    there = (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
    )
    asked = (degrees.tensor, degrees.pipeline, degrees.context, degrees.expert)
    if there != asked:
        raise StateError(
            "A process can create Megatron's groups only once; got tensor, pipeline, context and expert degrees "
            f"{asked} after {there}. Start a new process to change them."
        )


def seed_of(run: MegatronRun) -> int:
    """Return the seed of the run: the `seed` argument, or else the seed of rank 0; the same on every rank."""
    if run.arguments.seed is not None:
        return int(run.arguments.seed)
    own = torch.initial_seed() % (1 << 31)
    if run.world.size == 1 or not dist.is_initialized():
        return own
    return int(control.Channel(run.world, "megatron seed").exchange(own)[0])  # ranks may be seeded differently
