"""What importing the drop-in leaves behind."""

import subprocess
import sys


def _new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def test_modules_count_as_old_at_once() -> None:
    """The next collection of young objects finds no module; what was garbage before the import was collected."""
    assert (
        _new_process(
            "import gc, weakref\n"
            "class Node: pass\n"
            "node = Node(); node.itself = node; gone = weakref.ref(node); del node\n"
            "frozen = gc.get_freeze_count()\n"  # Python 3.12 itself freezes some
            "import accelerate\n"
            "young = gc.get_objects(generation=0)\n"
            "print(gone() is None, gc.isenabled(), gc.get_freeze_count() - frozen)\n"
            "print(any(each is accelerate for each in young))"
        )
        == "True True 0\nFalse"
    )


def test_frozen_objects_stay_frozen_and_psutil_waits() -> None:
    """What the caller froze for a fork stays so; psutil comes when somebody asks how much memory is free."""
    assert (
        _new_process(
            "import gc, sys\n"
            "kept = [[] for _ in range(100_000)]; gc.freeze()\n"
            "import accelerate\n"
            "print(gc.get_freeze_count() >= len(kept), 'psutil' in sys.modules)\n"
            "print(accelerate.utils.get_max_memory()['cpu'] > 0, 'psutil' in sys.modules)"
        )
        == "True False\nTrue True"
    )


def test_nobody_looks_for_engines() -> None:
    """Rows of engines are read from the files of every distribution, which waits until an engine is asked for."""
    assert (
        _new_process(
            "from accel_core.options.engines import engines\n"
            "import accelerate, accelerate.utils\n"
            "print(engines.cache_info().currsize)\n"
            "print(accelerate.FullyShardedDataParallelPlugin.__module__)"
        )
        == "0\naccelerate.utils.dataclasses"
    )
