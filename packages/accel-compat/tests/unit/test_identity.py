"""The drop-in holds the very objects of the engine, under names that import, pickle and show their source."""

import base64
import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import accel
import accel_core.accelerator
import accelerate
import accelerate.commands
import accelerate.data_loader
import accelerate.state
import accelerate.utils
import accelerate.utils.dataclasses
from accel_core.options.enums import DistributedType
from accel_core.state.process import PartialState
from accelerate import _foundation


def _modules() -> list[str]:
    return [
        "accelerate",
        *(found.name for found in pkgutil.walk_packages(accelerate.__path__, "accelerate.") if "._" not in found.name),
    ]


def test_it_is_found_as_the_original() -> None:
    """Version and home page are Accelerate's, followed by ours, and a real file is behind the package.

    sentence-transformers and setfit look for the owner of the original in the home page, transformers for the file.
    """
    assert accelerate.__version__ == "1.15.0"
    assert importlib.metadata.version("accelerate").startswith("1.15.0+accel.")
    home_page = importlib.metadata.metadata("accelerate")["Home-page"]
    assert home_page.endswith("/huggingface/accelerate")
    assert "accel.invalid" in home_page
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    assert spec.origin.endswith("__init__.py")


def test_objects_are_those_of_the_engine() -> None:
    """Classes are the engine's, not copies."""
    assert accelerate.Accelerator is accel.Accelerator is accel_core.accelerator.Accelerator
    assert accelerate.utils.DistributedType is accelerate.state.DistributedType is DistributedType


@pytest.mark.parametrize("name", _modules())
def test_modules_hold_their_names(name: str) -> None:
    """Every public module imports, nothing in it is lazy, and a star import brings all that a library may read."""
    module = importlib.import_module(name)
    assert "__getattr__" not in vars(module)
    space: dict[str, object] = {}
    exec(f"from {name} import *", space)
    held = {public for public, value in vars(module).items() if not inspect.ismodule(value)}
    assert {public for public in held if not public.startswith("_")} - {"write_through"} <= space.keys()


def test_tqdm_is_a_function_and_a_module() -> None:
    """`from accelerate.utils import tqdm` gives the function, whichever comes first; helpers of tests stay out."""
    code = (
        "import {first}; import accelerate.utils.tqdm; from accelerate.utils import tqdm\n"
        "from accelerate.utils.tqdm import tqdm as same\n"
        "import sys; sys.exit(not (callable(tqdm) and tqdm is same) or 'accelerate.test_utils' in sys.modules)"
    )
    for first in ("accelerate.utils.tqdm", "accelerate"):
        assert subprocess.run([sys.executable, "-c", code.format(first=first)], check=False).returncode == 0


def test_source_can_be_read() -> None:
    """The source of functions and methods is found, as libraries that rewrite them need."""
    assert "def prepare_data_loader(" in inspect.getsource(accelerate.data_loader.prepare_data_loader)
    assert "def fsdp2_prepare_model(" in inspect.getsource(accelerate.utils.fsdp2_prepare_model)
    assert "def prepare(" in inspect.getsource(accelerate.Accelerator.prepare)
    assert "class Accelerator" in inspect.getsource(accelerate.Accelerator)


_OLD_PATHS = {
    "accelerate.state": ["AcceleratorState", "GradientState", "PartialState"],
    "accelerate.utils.dataclasses": [
        "DistributedType",
        "DynamoBackend",
        "FullyShardedDataParallelPlugin",
        "InitProcessGroupKwargs",
        "RNGType",
    ],
    "accelerate.parallelism_config": ["ParallelismConfig"],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in _OLD_PATHS.items() for name in names])
def test_classes_pickle_under_old_names(module: str, name: str) -> None:
    """A class is written under the name that Accelerate gives it, and either name loads."""
    kind = getattr(importlib.import_module(module), name)
    written = pickle.dumps(kind)
    assert module.encode() in written
    assert pickle.loads(written) is kind


def test_a_pickle_by_the_engines_name_loads() -> None:
    """A pickle that names the engine's module gives the same class."""

    class Finder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            return super().find_class(module, name)

    stream = io.BytesIO(b"caccel_core.options.enums\nDistributedType\n.")
    assert Finder(stream).load() is DistributedType


def test_a_state_and_its_label_survive(fresh_state: None) -> None:
    """What `training_args.bin` holds, a process state and a label, can be pickled and copied."""
    state = PartialState(cpu=True)
    loaded, label = pickle.loads(pickle.dumps((state, DistributedType.MULTI_GPU)))
    assert label is DistributedType.MULTI_GPU
    assert loaded.device == state.device
    assert loaded.distributed_type is state.distributed_type
    assert copy.deepcopy(state).num_processes == state.num_processes


_ORIGINAL = (
    "gASVjQEAAAAAAAAojBBhY2NlbGVyYXRlLnN0YXRllIwMUGFydGlhbFN0YXRllJOUKYGUfZQojARfY3B1lIiMB2JhY2tlbmSUTowG"
    "ZGV2aWNllIwFdG9yY2iUjAZkZXZpY2WUk5SMA2NwdZSFlFKUjAVkZWJ1Z5SJjBBkaXN0cmlidXRlZF90eXBllIwcYWNjZWxlcmF0"
    "ZS51dGlscy5kYXRhY2xhc3Nlc5SMD0Rpc3RyaWJ1dGVkVHlwZZSTlIwCTk+UhZRSlIwNbnVtX3Byb2Nlc3Nlc5RLAYwNcHJvY2Vz"
    "c19pbmRleJRLAIwTbG9jYWxfcHJvY2Vzc19pbmRleJRLAIwNZm9ya19sYXVuY2hlZJSJdWJoEowJTVVMVElfR1BVlIWUUpRoAmgQ"
    "jBZJbml0UHJvY2Vzc0dyb3VwS3dhcmdzlJOUKYGUfZQoaAaMBGdsb2+UjAtpbml0X21ldGhvZJROjAd0aW1lb3V0lIwIZGF0ZXRp"
    "bWWUjAl0aW1lZGVsdGGUk5RLAE0IB0sAh5RSlHVidJQu"
)
"""What Accelerate 1.15.0 wrote: a PartialState on a CPU, a label, the class PartialState, and a plugin for gloo."""


def test_an_original_pickle_loads(fresh_state: None) -> None:
    """A pickle that Accelerate wrote gives the engine's objects, with their values."""
    state, label, kind, plugin = pickle.loads(base64.b64decode(_ORIGINAL))
    assert isinstance(state, PartialState)
    assert (state.num_processes, state.process_index, str(state.device)) == (1, 0, "cpu")
    assert label is DistributedType.MULTI_GPU
    assert kind is PartialState
    assert plugin == accelerate.InitProcessGroupKwargs(backend="gloo")


def test_other_versions_underneath_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package of another version, or none, is refused by name with the command that mends it; those here fit."""
    _foundation.check()

    def install(name: str, version: str, requires: Sequence[str] = ()) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        head += [f"Requires-Dist: {text}" for text in requires]
        (folder / "METADATA").write_text("\n".join([*head, "", "Version: 9 is what a description may say", ""]))

    for name in ("accelerate", "accel-all"):
        install(name, "0.1.5", importlib.metadata.requires(name) or ())
    for name in ("accel-bigmodel", "accel-launch", "accel-parallel", "accel-plan", "accel-trackers"):
        install(name, "0.1.5")
    install("accel-core", "0.2.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found, mended = r"accel-core 0.2.0 \(needs >=0.1,<0.2\), no accel-quant", "'accel-trackers>=0.1,<0.2'.* together"
    with pytest.raises(ImportError, match=f"{found}.*{mended}, in one pip command"):
        _foundation.check()
