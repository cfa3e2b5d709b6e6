"""What importing costs."""

import subprocess
import sys


def _new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout


def test_import_loads_no_torch() -> None:
    """`import accel_core` and its torch-free parts, asked of libraries and versions, leave torch and those alone."""
    loaded = _new_process(
        "import sys, accel_core, accel_core.errors, accel_core.host.environ, accel_core.options.enums\n"
        "from accel_core.host import availability, affinity, ports, versions\n"
        "availability.has_library('wandb'), availability.has_library('tensorboard')\n"
        "versions.is_torch_version('>=', '2.0')\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    ).split()
    assert not {"torch", "numpy", "tqdm", "wandb", "tensorboard"} & set(loaded)


def test_accelerator_loads_no_optional_library() -> None:
    """The whole engine comes without any library that is optional, and leaves the garbage collector on."""
    loaded = _new_process(
        "import torch, sys, gc; before = set(sys.modules)\n"
        "from accel_core import Accelerator\n"
        "assert gc.isenabled()\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    ).split()
    optional = {
        "tensorboard",
        "torchao",
        "torchdata",
        "transformers",
        "deepspeed",
        "bitsandbytes",
        "tqdm",
        "rich",
        "psutil",
    }
    assert not optional & set(loaded)


def test_what_saves_comes_with_the_first_save() -> None:
    """A run that neither saves nor loads starts without what does, to a folder or to a store."""
    loaded = _new_process(
        "import sys\n"
        "from accel_core import Accelerator\n"
        "Accelerator(cpu=True)\n"
        "print(*(name for name in sys.modules if name.startswith('accel_core.checkpoint.')))"
    ).split()
    assert "accel_core.checkpoint.names" in loaded
    late = {f"accel_core.checkpoint.{name}" for name in ("save", "load", "background", "remote", "selection")}
    assert not late & set(loaded)


def test_every_public_name_is_there() -> None:
    """Each name of __all__ can be imported, and the list is sorted."""
    import accel_core

    assert accel_core.__all__[:-1] == sorted(accel_core.__all__[:-1])
    assert all(getattr(accel_core, name) is not None for name in accel_core.__all__)
    assert set(accel_core.__all__) <= set(dir(accel_core))
