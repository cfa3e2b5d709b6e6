"""The training loop of accel: processes, devices, data, precision, checkpoints.

Importing this package loads nothing; a name brings its module, and torch where that needs it, when it is first used.
"""

import sys
import warnings
from importlib.util import find_spec

from accel_core._lazy import attach
from accel_core._version import __version__

if "torch" not in sys.modules and find_spec("numpy") is None:
    # torch tells that it found no NumPy when it is imported; accel is where it comes in here, and needs none.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)

_NAMES = {
    "accel_core.accelerator": ["Accelerator"],
    "accel_core.data.prepare": ["prepare_data_loader"],
    "accel_core.data.skip": ["skip_first_batches"],
    "accel_core.devices.memory": ["find_executable_batch_size", "release_memory"],
    "accel_core.logging": ["get_logger"],
    "accel_core.optim.local_sgd": ["LocalSGD"],
    "accel_core.options.enums": ["DDPCommunicationHookType", "DistributedType"],
    "accel_core.plugins.accumulation": ["GradientAccumulationPlugin"],
    "accel_core.plugins.compilation": ["TorchDynamoPlugin"],
    "accel_core.plugins.deepspeed": ["DeepSpeedPlugin"],
    "accel_core.plugins.fsdp": ["FullyShardedDataParallelPlugin"],
    "accel_core.plugins.handlers": [
        "AutocastKwargs",
        "DistributedDataParallelKwargs",
        "GradScalerKwargs",
        "InitProcessGroupKwargs",
        "MeterKwargs",
        "ProfileKwargs",
    ],
    "accel_core.plugins.loading": ["DataLoaderConfiguration"],
    "accel_core.plugins.parallelism": ["ParallelismConfig"],
    "accel_core.plugins.project": ["ProjectConfiguration"],
    "accel_core.random": ["set_seed", "synchronize_rng_states"],
    "accel_core.state.gradient": ["GradientState"],
    "accel_core.state.process": ["PartialState"],
    "accel_core.state.run": ["AcceleratorState"],
    "accel_core.tqdm": ["tqdm"],
}

__getattr__, __dir__, _all = attach(__name__, {name: home for home, names in _NAMES.items() for name in names})
# A star import takes what is installed; asking for a plugin by name says which package has it.
_moved = {"accel_deepspeed": "DeepSpeedPlugin", "accel_parallel": "FullyShardedDataParallelPlugin"}
_gone = {name for package, name in _moved.items() if find_spec(package) is None}
__all__ = [*(name for name in _all if name not in _gone), "__version__"]
