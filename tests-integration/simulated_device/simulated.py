"""Builds the simulated accelerator and makes it known to torch under the name "simgpu"."""

import fcntl
import json
import os
import sys
import tempfile
import traceback
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load

NAME = "simgpu"
COLLECTIVES = "simccl"
"""Name of the process-group backend that moves its tensors."""
SOURCE = Path(__file__).with_name("device.cpp")


def build_folder() -> Path:
    """Name the folder that the built extension is kept in, one for each torch; it is built again when it changes."""
    installed = zlib.crc32(torch.__file__.encode())
    folder = Path(tempfile.gettempdir()) / f"accel-simulated-device-{os.getuid()}-{torch.__version__}-{installed:08x}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def build() -> Any:
    """Compile and load the extension, one process at a time."""
    folder = build_folder()
    with open(folder / "turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        # torch's own lock is a file that a killed process leaves for ever; here its holder is known to be gone.
        (folder / "lock").unlink(missing_ok=True)
        return load(
            "accel_simulated_device",
            [str(SOURCE)],
            build_directory=str(folder),
            extra_cflags=["-O0"],
            verbose=False,
        )


def leave(main: Callable[[], object]) -> None:
    """Run a program, and leave with its status: a backend that is torn down with the interpreter may abort."""
    status = 0
    try:
        main()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def tell(main: Callable[[], dict[str, Any]]) -> None:
    """Print what a program found as a line of JSON, and leave."""
    leave(lambda: sys.stdout.write(json.dumps(main()) + "\n"))


def make_known() -> None:
    """Let accel compute on the device where it is asked for by its name."""
    # The original, which the device serves too, has no accel_core beside it.
    from accel_core.devices import registry
    from accel_core.options.enums import DistributedType
    from accel_core.options.hardware import Hardware

    row = Hardware(NAME, "simulated accelerator", DistributedType.MULTI_GPU, COLLECTIVES)
    registry.HARDWARE = (*registry.HARDWARE, row)
    registry.ORDER = (*registry.ORDER, NAME)


def set_up(count: int = 2, limit: int = 1 << 30) -> Any:
    """Load the devices into this process.

    Args:
        count: How many.
        limit: Bytes that each of them has.

    Returns:
        torch's module of the backend, with `native` for what tests ask of it.
    """
    native = build()
    native.set_up(count, limit)
    torch.utils.rename_privateuse1_backend(NAME)

    def number(device: Any = None) -> int:
        if device is None:
            return int(native.current())
        index = device if isinstance(device, int) else torch.device(device).index
        return int(native.current()) if index is None else int(index)

    module: Any = types.ModuleType(f"torch.{NAME}")
    module.native = native
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = native.count
    module.current_device = native.current
    module.set_device = lambda device: native.select(number(device))

    class Current:
        """The device that is current inside a block, as `torch.cuda.device`."""

        def __init__(self, device: Any) -> None:
            self.wanted = number(device)

        def __enter__(self) -> None:
            self.before = native.current()
            native.select(self.wanted)

        def __exit__(self, *details: object) -> None:
            native.select(self.before)

    module.device = Current
    generators = [torch.Generator() for _ in range(count)]
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in generators]
    module.manual_seed = lambda seed: generators[number()].manual_seed(seed)
    module.get_rng_state = lambda device=None: generators[number(device)].get_state()
    module.get_rng_state_all = lambda: [generator.get_state() for generator in generators]
    module.set_rng_state = lambda state, device=None: generators[number(device)].set_state(state)
    module.memory_allocated = lambda device=None: native.used(number(device))
    module.max_memory_allocated = lambda device=None: native.peak(number(device))
    module.reset_peak_memory_stats = lambda device=None: native.reset_peak(number(device))
    module.mem_get_info = lambda device=None: (native.limit() - native.used(number(device)), native.limit())
    module.empty_cache = lambda: None
    module.synchronize = lambda device=None: None
    dist.Backend.register_backend(
        COLLECTIVES,
        lambda store, rank, size, timeout: native.collectives(
            dist.ProcessGroupGloo(store, rank, size, timeout), rank, size
        ),
        devices=[NAME],
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module
