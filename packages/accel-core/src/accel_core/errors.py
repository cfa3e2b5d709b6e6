"""The errors of accel: one tree, every message in three parts.

A message says what is wrong, what was found and what to do. Each error also inherits the builtin that a caller would
expect, so that `except ValueError` keeps working.

    AccelError
    ├── ConfigurationError (ValueError)          an argument, option or plugin that is not valid
    ├── DeviceMapError (ValueError)              a placement that misses, doubles or does not hold a tensor
    ├── DeviceUnavailableError (RuntimeError)    hardware that was asked for is not here
    ├── EngineUnavailableError (NotImplementedError)  an engine that was asked for is not built
    ├── LaunchError (RuntimeError)               a run could not be started or failed
    ├── MissingDependencyError (ImportError)     an optional library is not installed
    │   └── TorchVersionError (ValueError)           the installed torch lacks what a feature needs
    ├── OffloadError (RuntimeError)              a weight used, moved or trained while it lives elsewhere
    │   └── OffloadFolderError (ValueError)          weights go to the disk, and no folder was given
    ├── OutOfMemoryError (RuntimeError)          no batch is small enough for the memory that is there
    ├── PreparationError (ValueError)            objects that `prepare` cannot put together
    ├── QuantizationError (ValueError)           weights that cannot be packed as asked
    ├── StateError (RuntimeError, ValueError)    process, run or step state asked for in the wrong order
    │   └── StateResetError (AttributeError)         an attribute of a state that was reset
    ├── TrackerError (RuntimeError)              an experiment tracker failed
    │   └── TrackerInterfaceError (NotImplementedError)  a tracker's class lacks what every tracker has
    ├── UnsupportedTypeError (TypeError)         a value of a type that an operation cannot take
    ├── CheckpointError (RuntimeError)
    │   ├── CheckpointDamagedError (ValueError)      truncated, altered, or not ours
    │   ├── CheckpointMismatchError (ValueError)     whole, but does not fit what it is loaded into
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   └── UnsafeCheckpointError (ValueError)       would run code, or leads outside its folder
    ├── CollectiveError (RuntimeError)
    │   ├── RankDisagreementError                    ranks brought different shapes, dtypes or operations
    │   └── RemoteRankError                          another rank failed
    └── DataError (ValueError)
        ├── DoubleShardingError                      a loader that is already split by rank
        └── UnknownBatchSizeError (AttributeError)   a size of batches that have no fixed one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import NamedTuple

_PLAIN = (str, bytes, int, float, list, tuple, dict)
_SHORT = 40


class AccelError(Exception):
    """Root of every error that accel raises on purpose."""


class ConfigurationError(AccelError, ValueError):
    """An argument, option, environment variable or plugin that is not valid.

    Correct the value that the message names; it lists those that are allowed.
    """


class DeviceMapError(AccelError, ValueError):
    """A placement that misses a tensor, names it twice, or gives a device more than it holds.

    Correct the entries that it lists, raise `max_memory`, or name "cpu" or "disk" among the devices.
    """


class DeviceUnavailableError(AccelError, RuntimeError):
    """Hardware, or an ability of it, that was asked for is not here.

    Leave the device out, or install torch's build for it; `accel env` lists what was found.
    """


class EngineUnavailableError(AccelError, NotImplementedError):
    """A training engine that was asked for is not part of the installed version.

    Train with the alternative that the message names, or without the engine.
    """


class LaunchError(AccelError, RuntimeError):
    """A run could not be started, or one of its processes failed.

    Look at the traceback of the process that failed first, which the message ends with or names a file of.
    """


class MissingDependencyError(AccelError, ImportError):
    """An optional library is needed and not installed.

    Install what the message names.
    """


class TorchVersionError(MissingDependencyError, ValueError):
    """The installed torch lacks what a feature needs.

    Install the version of torch that the message names, or do what it names instead.
    """


class OffloadError(AccelError, RuntimeError):
    """A weight was used, moved or trained while it lives on another device or on disk.

    List the class that uses the weight in `preload_module_classes`, keep the weight on a device, or change it before
    the dispatch or under `align_module_device`.
    """


class OffloadFolderError(OffloadError, ValueError):
    """Weights have to be written to the disk, and no folder was given for them.

    Pass `offload_folder` or `offload_dir`.
    """


class OutOfMemoryError(AccelError, RuntimeError):
    """No batch is small enough for the memory that is there.

    Free memory, take a smaller model or a lower precision, or shard it.
    """


class PreparationError(AccelError, ValueError):
    """Objects that cannot be prepared together, or not in this order.

    Pass the objects to `prepare` in the way that the message names.
    """


class QuantizationError(AccelError, ValueError):
    """Weights or a configuration that cannot be quantized as asked.

    Change what the message names in the quantization's configuration, or leave the layer out by `skip_modules`.
    """


class StateError(AccelError, RuntimeError, ValueError):
    """Process, run or step state was asked for before it exists or after it ended.

    Make the `Accelerator` or `PartialState` first, or start a new process.
    """


class StateResetError(StateError, AttributeError):
    """An attribute was read of a state object that was reset while it lived; `hasattr` and `getattr` understand it.

    Make a new object of the state.
    """


class TrackerError(AccelError, RuntimeError):
    """An experiment tracker failed, or was asked for something that it cannot do.

    Fix what the tracker's library reports; what it missed is in a file of JSON lines in the logging directory.
    """


class TrackerInterfaceError(TrackerError, NotImplementedError):
    """The class of an experiment tracker lacks an attribute or method that every tracker has.

    Define the attribute or method in the tracker's class.
    """


class UnsupportedTypeError(AccelError, TypeError):
    """A value of a type, or arguments, that an operation cannot take.

    Convert the value to one of the types that the message lists.
    """


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint could not be written or read.

    Free space on the disk, or correct the permissions, as the message says; what was saved before is still there.
    """


class CheckpointDamagedError(CheckpointError, ValueError):
    """A checkpoint file is truncated, altered, or in another format than its name says.

    Fetch the checkpoint again, or load an older one.
    """


class CheckpointMismatchError(CheckpointError, ValueError):
    """A whole checkpoint that does not fit the objects that it is loaded into.

    Make the model, optimizer or number of ranks what it was, or pass `strict=False` to load what fits.
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError, ValueError):
    """No complete checkpoint where one was expected.

    Correct the path, or begin without a checkpoint.
    """


class UnsafeCheckpointError(CheckpointError, ValueError):
    """A checkpoint that would run code when read, or that leads outside its folder.

    Do not load it. If it holds objects of a class of your own, declare the class with
    `torch.serialization.add_safe_globals`.
    """


class CollectiveError(AccelError, RuntimeError):
    """An operation across processes failed.

    Look for the first error in the output of the other ranks.
    """


class PartView(NamedTuple):
    """One part of what a rank brought to an operation.

    Attributes:
        kind: Dtype of a tensor, such as `float32`; for anything else, what it is.
        shape: Shape of a tensor; `None` for anything else.
    """

    kind: str
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.kind if self.shape is None else f"{self.kind}{list(self.shape)}"


class RankView(NamedTuple):
    """What a rank saw of an operation in which ranks did not agree.

    Attributes:
        operation: The operation that the rank was in.
        site: The line of the program that called it, as `file:line in function`.
        parts: What it brought, by the path of each part, such as `['image'][0]`.
    """

    operation: str
    site: str
    parts: Mapping[str, PartView]


class RankDisagreementError(CollectiveError):
    """Ranks brought different structures, shapes, dtypes or operations to one collective.

    Make every rank call the same operations in the same order: look for a branch on the rank.

    Args:
        message: What is wrong, what was found, what to do.
        views: What each rank saw, by rank, where that is known.
    """

    def __init__(self, message: str, views: Sequence[RankView] = ()) -> None:
        super().__init__(message)
        self.views = tuple(views)


class RemoteRankError(CollectiveError):
    """Another rank failed in an operation that all ranks do together.

    Look at that rank's own error, which came first.
    """


class DataError(AccelError, ValueError):
    """A data source or loader that cannot be read as asked.

    Correct the loader or its configuration as the message says.
    """


class DoubleShardingError(DataError):
    """A loader that already gives each rank its own part would be split by rank again.

    Remove your own split, or declare it with `already_sharded(loader)`.
    """


class UnknownBatchSizeError(DataError, AttributeError):
    """The batches of a loader have no fixed size; `hasattr` and `getattr` with a default understand that.

    Give the loader a `batch_size`, or do not ask for the size.
    """


@contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Undo what was begun where the block raises, whatever that is."""
    try:
        yield
    except BaseException:
        undo()
        raise


def expect(fits: bool, value: object, needed: str, todo: str) -> None:
    """Raise an error for an argument of the wrong type, in place of the Python error that it led to.

    Raises:
        UnsupportedTypeError: `fits` is false; the message says what is needed, what was found and what to do.
    """
    if not fits:
        raise UnsupportedTypeError(f"{needed}; got {_shown(value)}. {todo}") from None


def expect_one_of(choices: Iterable[object], name: str, value: object, source: str = "") -> None:
    """Refuse a value that is not one of its choices.

    Raises:
        ConfigurationError: It is none of them; the message says which there are.
    """
    allowed = list(choices)
    if value not in allowed:
        raise ConfigurationError(f"{name} is not one of its choices; got {value!r}{source}. Use one of {allowed}.")


def expect_flags(kind: type, values: Mapping[str, object]) -> None:
    """Refuse, for the fields of a dataclass that are declared `bool`, what only counts as true, such as the text "no".

    0, 1 and scalars of array libraries pass, and `None`, which stands for a default.

    Raises:
        UnsupportedTypeError: A value is neither true nor false.
    """
    for field in fields(kind):
        value = values.get(field.name)
        if field.type in ("bool", "bool | None") and value is not True and value is not False:
            fits = not getattr(value, "shape", ()) and value in (None, 0, 1)
            expect(fits, value, f"{field.name} is True or False", f"Write {field.name}=True or {field.name}=False.")


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name, text = type(value).__name__, repr(value) if isinstance(value, _PLAIN) else ""
    if value is None or 0 < len(text) <= _SHORT:
        return "None" if value is None else f"{text} ({name})"
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
