"""`import accel` offers every public name, and loads none of them before it is used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import accel
from accel_core.errors import MissingDependencyError
from accel_core.options.engines import absent

STUB = Path(accel.__file__).with_suffix(".pyi")


def stub_names() -> dict[str, str]:
    """Return every name of the stub with the module that it is imported from."""
    imports = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


@pytest.mark.parametrize("name", accel.__all__)
def test_a_name_is_the_object_of_its_package(name: str) -> None:
    """Each name is the very object that its own package defines, and not a copy."""
    home = importlib.import_module(stub_names()[name])
    assert getattr(accel, name) is getattr(home, name)


def test_every_documented_name_is_there() -> None:
    """What the pages of Accelerate's interface describe can be had from `accel`, and so can what is accel's own.

    A name of an engine that is not installed is the error with the package to install.
    """
    documented = (Path(__file__).parent / "documented_names.txt").read_text().split()
    packages = "|".join(known.package for known in absent())
    assert sorted(set(documented) - set(dir(accel) if packages else accel.__all__)) == []
    for name in sorted(set(documented) - set(accel.__all__)):
        with pytest.raises(MissingDependencyError, match=f"pip install ({packages})"):
            getattr(accel, name)
    own = {"already_sharded", "plan_device_map", "RestoreReport", "preemption", "TrackerKwargs", "AccelError", "beat"}
    assert own <= set(accel.__all__)


@pytest.mark.parametrize(
    "name", ["is_wandb_available", "prepare_sagemager_args_inputs", "merge_dicts", "is_habana_gaudi1"]
)
def test_names_that_only_old_code_knows_stay_out(name: str) -> None:
    """They are importable under `accelerate`, which keeps every name of old."""
    assert name not in accel.__all__


def test_the_stub_names_what_can_be_imported() -> None:
    """Type checkers and editors see the same names, from the same modules."""
    homes = {name: home for home, names in accel._NAMES.items() for name in names}
    assert stub_names() == {**homes, "__version__": "accel._version"}


def test_all_is_sorted_and_listed_by_dir() -> None:
    """`__all__` is in order, holds no name twice, and `dir()` shows all of it."""
    names = [name for name in accel.__all__ if name != "__version__"]
    assert names == sorted(set(names))
    assert set(accel.__all__) <= set(dir(accel))


def test_importing_it_loads_no_torch() -> None:
    """A program that only wants the version does not wait for torch."""
    code = "import sys, accel; print(accel.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "False"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    """A misspelled name fails like that of any module."""
    with pytest.raises(AttributeError, match=r"accel.*Acelerator"):
        accel.Acelerator  # noqa: B018
