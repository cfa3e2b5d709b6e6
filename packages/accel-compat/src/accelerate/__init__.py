"""The import paths of Accelerate 1.15.0, over the packages of accel."""

# ruff: noqa: E402, I001

from accelerate import _foundation, _version

_foundation.check()

from accel_core._lazy import without_collection

with without_collection():
    from accelerate import _defaults, _loggers, _pickles
    from accelerate._rebinding import write_through
    from accel_bigmodel.checkpoint.load import (
        load_checkpoint_in_model,
    )
    from accel_bigmodel.device_map.infer import (
        infer_auto_device_map,
    )
    from accel_bigmodel.dispatch import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        load_checkpoint_and_dispatch,
    )
    from accel_bigmodel.meta import (
        init_empty_weights,
        init_on_device,
    )
    from accel_bigmodel.pipeline import (
        prepare_pippy,
    )
    from accel_core.accelerator import (
        Accelerator,
    )
    from accel_core.data.skip import (
        skip_first_batches,
    )
    from accel_core.devices.memory import (
        find_executable_batch_size,
    )
    from accelerate._availability import (
        is_rich_available,
    )
    from accel_core.options.enums import (
        DDPCommunicationHookType,
        DistributedType,
    )
    from accel_core.plugins.deepspeed import (
        DeepSpeedPlugin,
    )
    from accel_core.plugins.fsdp import (
        FullyShardedDataParallelPlugin,
    )
    from accel_core.plugins.handlers import (
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from accel_core.plugins.loading import (
        DataLoaderConfiguration,
    )
    from accel_core.plugins.parallelism import (
        ParallelismConfig,
    )
    from accel_core.random import (
        synchronize_rng_states,
    )
    from accel_core.state.process import (
        PartialState,
    )
    from accel_launch.notebook import (
        debug_launcher,
        notebook_launcher,
    )
    from accelerate import (
        accelerator as accelerator,
        big_modeling as big_modeling,
        checkpointing as checkpointing,
        data_loader as data_loader,
        hooks as hooks,
        inference as inference,
        launchers as launchers,
        logging as logging,
        optimizer as optimizer,
        parallelism_config as parallelism_config,
        scheduler as scheduler,
        state as state,
        tracking as tracking,
        utils as utils,
    )

__version__ = _version.__version__.partition("+")[0]
_pickles.carry_old_names()
_loggers.govern_records()
_defaults.choose()

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "__version__",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "prepare_pippy",
    "skip_first_batches",
    "synchronize_rng_states",
]

write_through(__name__)
