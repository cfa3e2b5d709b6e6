"""The import paths of Accelerate 1.15.0, over the packages of accel."""

# ruff: noqa: E402, I001

from accelerate import _foundation, _version

_foundation.check()  # first: imports from packages of other versions fail in words that help nobody

from accel_core import _lazy

with _lazy.while_loading():  # collections while modules load are a good part of what the import costs
    from accelerate import _defaults, _loggers, _pickles, _rebinding
    from accel_bigmodel.checkpoint.load import load_checkpoint_in_model as load_checkpoint_in_model
    from accel_bigmodel.device_map.infer import infer_auto_device_map as infer_auto_device_map
    from accel_bigmodel.dispatch import cpu_offload as cpu_offload
    from accel_bigmodel.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from accel_bigmodel.dispatch import disk_offload as disk_offload
    from accel_bigmodel.dispatch import dispatch_model as dispatch_model
    from accel_bigmodel.dispatch import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from accel_bigmodel.meta import init_empty_weights as init_empty_weights
    from accel_bigmodel.meta import init_on_device as init_on_device
    from accel_bigmodel.pipeline import prepare_pippy as prepare_pippy
    from accel_core.accelerator import Accelerator as Accelerator
    from accel_core.data.skip import skip_first_batches as skip_first_batches
    from accel_core.devices.memory import find_executable_batch_size as find_executable_batch_size
    from accelerate._availability import is_rich_available as is_rich_available
    from accel_core.options.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_core.options.enums import DistributedType as DistributedType
    from accel_parallel.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel_core.plugins.handlers import AutocastKwargs as AutocastKwargs
    from accel_core.plugins.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel_core.plugins.handlers import GradScalerKwargs as GradScalerKwargs
    from accel_core.plugins.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_core.plugins.handlers import ProfileKwargs as ProfileKwargs
    from accel_core.plugins.loading import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_core.plugins.parallelism import ParallelismConfig as ParallelismConfig
    from accel_core.random import synchronize_rng_states as synchronize_rng_states
    from accel_core.state.process import PartialState as PartialState
    from accelerate import accelerator as accelerator
    from accelerate import big_modeling as big_modeling
    from accelerate import checkpointing as checkpointing
    from accelerate import data_loader as data_loader
    from accelerate import hooks as hooks
    from accelerate import inference as inference
    from accelerate import launchers as launchers
    from accelerate import logging as logging
    from accelerate import optimizer as optimizer
    from accelerate import parallelism_config as parallelism_config
    from accelerate import scheduler as scheduler
    from accelerate import state as state
    from accelerate import tracking as tracking
    from accelerate import utils as utils

__version__ = _version.__version__.partition("+")[0]  # libraries compare it; marks of a local build would confuse some
_pickles.carry_old_names()  # once the classes are all there
_loggers.govern_records()
_defaults.choose()


_LATER = {
    "accel_deepspeed": ["DeepSpeedPlugin"],  # an engine, for the few runs that use it
    "accel_launch.notebook": [  # what starts processes, of no use in those that were started
        "debug_launcher",
        "notebook_launcher",
    ],
}
_rebinding.write_through(__name__, _LATER)
