"""Pipelines whose stages FSDP2 shards: each rank holds a shard of its own blocks."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard

from accel_core.errors import ConfigurationError, EngineUnavailableError
from accel_core.mesh.tensor import is_spread
from accel_core.options.enums import DistributedType
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import Parts
from accel_parallel.context.strategy import SequenceStrategy
from accel_parallel.fsdp2.in_place import arguments_of
from accel_parallel.pipeline.stages import SPLIT_BACKWARD
from accel_parallel.pipeline.strategy import PipelineStrategy
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding.mesh import sharding_part
from accel_parallel.sharding.recomputing import recompute


class ShardedPipelineStrategy(PipelineStrategy):
    """Blocks are sharded over the ranks that run the same stages; what is outside of blocks is whole on each."""

    name = "fsdp2_pipeline"
    shards = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.plugin: FullyShardedDataParallelPlugin = parts.plugins[0]
        self._refuse()
        self.mesh = sharding_part(parts.mesh)  # type: ignore[arg-type]

    def _refuse(self) -> None:
        """Refuse what is not combined."""
        if self.layout.size("dp_shard") < 2:
            raise ConfigurationError(
                "FSDP shards the stages of a pipeline over the axis dp_shard; got "
                f"{dict(self.layout.sizes)}. Set dp_shard_size to 2 or more, or leave fsdp_plugin out."
            )
        wrong = {
            "cpu_offload": self.plugin.offloads,
            "mixed_precision_policy": self.plugin.param_dtype is not None,
            "ignored_modules": self.plugin.ignored_modules is not None,
            f"schedule={self.settings.schedule!r}": self.settings.schedule in SPLIT_BACKWARD,
        }
        found = [name for name, given in wrong.items() if given]
        if found:
            raise EngineUnavailableError(
                f"FSDP2 is combined with a pipeline without these; got {', '.join(found)}. Leave them out: blocks are "
                "those of the pipeline, and mixed_precision of the Accelerator casts by autocast."
            )

    def label(self) -> DistributedType:
        """Return the label of FSDP."""
        return DistributedType.FSDP

    def check(self, bundle: Bundle) -> None:
        """Refuse what cannot be trained this way; parameters along an axis for shards are not among that."""
        SequenceStrategy.check(self, bundle)

    def _averaged(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        return [each for each in model.parameters() if not is_spread(each)]

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the blocks of this rank's stages, and average gradients of all else over those who run the same."""
        bare = self._bare(model)
        pipeline = self.pipeline_of(bare)
        own = [block for block in pipeline.blocks.values() if block not in pipeline.foreign]
        if self.plugin.activation_checkpointing:
            recompute(own, offload=bool(self.plugin.activation_checkpointing_offload))
        for block in own:
            sharded = fully_shard(block, **arguments_of(self.plugin, self.mesh, self.world.device))
            if self.world.device.type == "cpu":
                sharded.set_force_sum_reduction_for_comms(True)
        return super().distribute(model)
