"""Pickles that both Accelerate and these modules can read.

A pickle names the module of a class. Those that people keep (`training_args.bin` holds a `PartialState` and a
`DistributedType`) name Accelerate's modules; so that both sides read each other's, these classes carry the old names
as soon as `accelerate` is imported. Pickles written before that name the engine's modules, which stay importable.
"""

import enum

from accel_core.host.availability import has_module
from accel_core.options import enums
from accel_core.options.engines import bring
from accel_core.plugins import (
    accumulation,
    compilation,
    fp8,
    handlers,
    loading,
    parallelism,
    project,
)
from accel_core.state import gradient, process, run
from accel_parallel.plugin import FullyShardedDataParallelPlugin  # its old path would look for engines

_HOMES = {
    "accelerate.state": (gradient.GradientState, process.PartialState, run.AcceleratorState),
    "accelerate.parallelism_config": (parallelism.ParallelismConfig,),
    "accelerate.utils.dataclasses": (
        *(
            kind
            for kind in vars(enums).values()
            # Arguments that people keep hold any of them.
            if isinstance(kind, enum.EnumMeta) and kind.__module__ == enums.__name__
        ),
        accumulation.GradientAccumulationPlugin,
        compilation.TorchDynamoPlugin,
        fp8.AORecipeKwargs,
        fp8.FP8RecipeKwargs,
        fp8.MSAMPRecipeKwargs,
        fp8.TERecipeKwargs,
        FullyShardedDataParallelPlugin,
        handlers.AutocastKwargs,
        handlers.DistributedDataParallelKwargs,
        handlers.GradScalerKwargs,
        handlers.InitProcessGroupKwargs,
        handlers.KwargsHandler,
        handlers.ProfileKwargs,
        loading.DataLoaderConfiguration,
        parallelism.DeepSpeedSequenceParallelConfig,
        parallelism.TorchContextParallelConfig,
        parallelism.TorchTensorParallelConfig,
        parallelism.TorchTensorParallelPlugin,
        project.ProjectConfiguration,
    ),
}

_OF_ENGINES = (
    ("accel_deepspeed.plugin", "DeepSpeedPlugin", "accelerate.utils.dataclasses"),
    ("accel_deepspeed.plugin_config", "HfDeepSpeedConfig", "accelerate.utils.deepspeed"),
    ("accel_deepspeed.stand_ins", "DummyOptim", "accelerate.utils.deepspeed"),
    ("accel_deepspeed.stand_ins", "DummyScheduler", "accelerate.utils.deepspeed"),
    ("accel_megatron.plugin", "MegatronLMPlugin", "accelerate.utils.dataclasses"),
)


def carry_old_names() -> None:
    """Name the classes that people pickle after Accelerate's modules, those of engines where they are installed."""
    for home, name, module in _OF_ENGINES:
        if has_module(home.partition(".")[0]):  # an engine need not be installed
            getattr(bring(home), name).__module__ = module
    for module, classes in _HOMES.items():
        for kind in classes:
            kind.__module__ = module  # pickle writes it, and looks there
