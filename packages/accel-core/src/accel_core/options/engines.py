"""The engines, one row each; torch-free, so that the launcher reads the same rows.

A package adds engines by the entry-point group `accel.engines`, which leads to a row. Whoever needs to know an engine
(the choice of the strategy, the views for users, checkpoints, the launcher) asks `engines()`, and names none.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from accel_core._records import record
from accel_core.errors import MissingDependencyError
from accel_core.host import environ, installed
from accel_core.host.availability import OLDEST_TORCHAO, has_module, imported
from accel_core.host.versions import compare_versions

GROUP = "accel.engines"
"""Entry-point group under which packages announce engines."""

_FLAG = "ACCELERATE_USE_"
_NO_ENGINES = {"ACCELERATE_USE_CPU", "ACCELERATE_USE_PARALLELISM_CONFIG"}


@record(frozen=True)
class Presence:
    """Whether an engine can be used here."""

    version: str | None  # version of its library; `None` where that is not installed
    problem: str = ""  # what is missing, empty where nothing is
    remedy: str = ""  # the command that fixes it, empty where nothing is missing


@record(frozen=True)
class Engine:
    """One way to train, or to compute. What stands in `module:name` is imported when it is first needed.

    Attributes:
        name: A short word for it.
        title: What people call it.
        library: The distribution that it stands on; empty for one that is not shown.
        oldest: First version of the library that serves; empty where any does.
        extras: What else `pip` is asked for when the library is installed.
        install: How `pip` calls the library, where that is more than its name.
        strategy: `module:Class` of its strategy, or `module:function` that returns that for the plugin, or `None`, and
            for the axes of the mesh; empty where a package has it.
        plugin: `module:Class` of its plugin; giving one claims the run.
        argument: Argument of the Accelerator that takes the plugin, and attribute of `AcceleratorState` that has it.
        flag: Variable `ACCELERATE_USE_…` that claims the run instead of the plugin; set where a plugin claimed it.
        claims: `module:function` that says from a request whether this is the one; empty leaves it to plugin and flag.
        containers: `module:Class` of the wrappers that the engine puts around models.
        files: Pattern of the names that only this engine writes into a checkpoint, folder and all; a folder's name
            begins with `pytorch_model` or `optimizer`.
        label: Name of the run's `DistributedType`, which configuration files say too.
        labels_process: Whether a process has the label as soon as the flag is set, and joins others where it is alone.
        switch: Setting of the launcher that turns the engine on.
        excludes: Switches of other engines that cannot be on besides.
        takes_axes: Whether the axes in a configuration file are those of a run with it.
        options: `module:Class` of its table of options.
        settings: `module:NAME` of settings that the launcher has beyond the options.
        questions: `module:function` that puts the questions of `accel config` around those of the options.
        checks: `module:function` that refuses settings before a process starts.
        decides: `module:function` that returns the settings which a file of the engine's own decides.
        environment: `module:function` that returns more variables for the processes.
        mesh: `module:function` that returns the axes of settings and a number of processes, outermost first.
        batch: `module:function` that returns samples of a step, of a process, and batches of a step, each or `None`.
        launcher: `module:Class` of a launcher of its own.
        merges: `module:function` that returns what reads the whole weights of a model from a folder that only this
            engine writes; `None` for any other folder.
        extension: `module:Class` of what takes part in a run where ACCELERATE_RUNTIME names the engine.
        takes: `module:function` that is given a `Runtime` and models of which some arrive spread over ranks, and
            returns the strategy with which the run goes on.
    """

    name: str
    title: str
    library: str = ""
    oldest: str = ""
    extras: str = ""
    install: str = ""
    strategy: str = ""
    plugin: str = ""
    argument: str = ""
    flag: str = ""
    claims: str = ""
    containers: tuple[str, ...] = ()
    files: str = ""
    label: str = ""
    labels_process: bool = False
    switch: str = ""
    excludes: tuple[str, ...] = ()
    takes_axes: bool = False
    options: str = ""
    settings: str = ""
    questions: str = ""
    checks: str = ""
    decides: str = ""
    environment: str = ""
    mesh: str = ""
    batch: str = ""
    launcher: str = ""
    merges: str = ""
    extension: str = ""
    takes: str = ""

    @property
    def requirement(self) -> str:
        """What `pip install` is given."""
        return " ".join(word for word in (self.install or self.library, self.extras) if word)

    def own(self, plugins: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the plugins that belong to this engine."""
        kind = imported(self.plugin) or ()  # nobody can have made a plugin whose module was never imported
        return tuple(plugin for plugin in plugins if isinstance(plugin, kind))

    def presence(self) -> Presence:
        """Return whether the library is installed and new enough, from its metadata; nothing is imported."""
        version = installed.version_of(self.library)
        if version is None:
            return Presence(None, f"{self.library} is not installed", f"pip install {self.requirement}")
        if self.oldest and _is_older(version, self.oldest):
            return Presence(
                version, f"{self.library} {version} is older than {self.oldest}", f"pip install -U {self.requirement}"
            )
        return Presence(version)

    def require(self) -> None:
        """Refuse a run with this engine where its library is missing or too old, without importing it."""
        found = self.presence()
        if found.problem:
            raise MissingDependencyError(
                f"{self.title} needs {self.library}{f' {self.oldest} or newer' if self.oldest else ''}; "
                f"got {found.version or 'none that is installed'}. Run `{found.remedy}`."
            )


def _is_older(version: str, oldest: str) -> bool:
    from packaging.version import parse  # where versions are compared, not at every start

    return compare_versions(parse(version), "<", oldest)


def load(path: str) -> Any:
    """Import what `module:name` names; the name may lead through a class, and without one it is the module."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return operator.attrgetter(name)(found) if name else found


_XLA_FSDP = (
    "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel:XlaFullyShardedDataParallel",
    "torch_xla.experimental.spmd_fully_sharded_data_parallel:SpmdFullyShardedDataParallel",
)

BUILT_IN: tuple[Engine, ...] = (
    Engine(
        "xla",
        "PyTorch/XLA",
        "torch_xla",
        install="'torch_xla[tpu]'",
        claims="accel_core.strategies.registry:on_xla",
        containers=_XLA_FSDP,
    ),
    Engine(
        "ddp",
        "DistributedDataParallel",
        "torch",
        strategy="accel_core.strategies.ddp:DataParallelStrategy",
        plugin="accel_core.plugins.handlers:DistributedDataParallelKwargs",
        claims="accel_core.strategies.registry:has_several_processes",
    ),
    Engine(
        "single",
        "one process",
        strategy="accel_core.strategies.single:SingleStrategy",
        claims="accel_core.strategies.registry:is_any",
    ),
    Engine("fp8-ao", "fp8 by torchao", "torchao", OLDEST_TORCHAO),
    Engine("fp8-te", "fp8 by Transformer Engine", "transformer-engine", install="'transformer-engine[pytorch]'"),
    Engine("fp8-msamp", "fp8 by MS-AMP", "ms-amp"),
)
"""Engines that come with accel-core: those with `claims` are chosen by hardware and processes alone."""


@record(frozen=True)
class Public:
    """An engine that Accelerate's API knows by name, whether its package is installed or not.

    Attributes:
        word: Name in `WORD_plugin`, `ACCELERATE_USE_WORD`, `--use_WORD` and `WORD_config`.
        package: The distribution that has it.
        title: What people call it.
        files: Names that only this engine writes into a checkpoint.
        beside: Names that count as its own beside such files; anybody may use them.
        options: Options of the launcher that are its own beside those that begin with `WORD_`.
    """

    word: str
    package: str
    title: str
    files: str = ""
    aliases: str = ""
    options: str = ""

    @property
    def module(self) -> str:
        """Name under which the package is imported."""
        return self.package.replace("-", "_")


PUBLIC: tuple[Public, ...] = (
    Public(
        "deepspeed",
        "accel-deepspeed",
        "DeepSpeed",
        r"pytorch_model(_\d+)?/[^/]+_states\.pt",
        r"latest|zero_to_fp32\.py",
        r"zero_stage|zero3_\w+|offload_\w+|gradient_(clipping|accumulation_steps)",
    ),
    Public(
        "fsdp",
        "accel-parallel",
        "FSDP",
        r"pytorch_model_fsdp(_\d+)?(_rank\d+)?\.bin|(pytorch_model_fsdp|optimizer)_\d+/(\.metadata|[^/]+\.distcp)",
    ),
    Public(
        "megatron_lm",
        "accel-megatron",
        "Megatron",
        r"pytorch_model_megatron/(common\.pt|random_\d+\.pt|metadata\.json|\.metadata|[^/]+\.distcp)",
    ),
    Public("torch_tp", "accel-parallel", "tensor and context parallel"),
    Public("xla", "accel-parallel", "training on XLA devices"),
)


@functools.cache
def engines() -> dict[str, Engine]:
    """Return all engines by name: those of installed packages in the order of their names, then the built-in ones."""
    announced = {name: load(path) for name, path in installed.points_of(GROUP).items()}
    return announced | {engine.name: engine for engine in BUILT_IN if engine.name not in announced}


def flagged() -> list[Engine]:
    """Return the engines whose variables are set; packages are looked for only where one may be.

    Raises:
        ConfigurationError: A variable is neither yes nor no.
        MissingDependencyError: The package of an engine is not installed.
    """
    if not any(environ.with_prefix(_FLAG).keys() - _NO_ENGINES):
        return []
    for known in PUBLIC:
        if environ.flag(f"{_FLAG}{known.word.upper()}"):
            require(known.word, f"{_FLAG}{known.word.upper()} in the environment")
    return [engine for engine in engines().values() if engine.flag and environ.flag(engine.flag)]


def absent(*words: str) -> list[Public]:
    """Return the engines of Accelerate's API whose packages are not installed, of `words` or of all."""
    asked = [known for known in PUBLIC if not words or known.word in words]
    rows = [engine for engine in engines().values() if engine.strategy] if asked else []
    here = {word for engine in rows for word in (engine.name, engine.argument.removesuffix("_plugin"))}
    return [known for known in asked if known.word not in here]


def require(word: str, asked: str) -> None:
    """Refuse an engine of Accelerate's API whose package is not installed; any other word passes."""
    for known in absent(word):
        raise MissingDependencyError(
            f"{known.package} is not installed, which has {known.title}; got {asked}. "
            f"Run `pip install {known.package}`."
        )


def require_switched(settings: Mapping[str, Any]) -> None:
    """Refuse engines of Accelerate's API that settings of the launcher turn on and whose package is missing."""
    for known in PUBLIC:
        if settings.get(f"use_{known.word}"):
            require(known.word, f"the setting use_{known.word}")


def bring(path: str) -> ModuleType:
    """Import a module, which may be of an engine's package; name the package if it is not installed."""
    package = path.partition(".")[0]
    for known in PUBLIC:
        if known.module == package and not has_module(package):
            require(known.word, path)
    return importlib.import_module(path)


def attach_moved(path: str, word: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module whose names are those of an engine's plugin, in the engine's package."""

    def getattr_(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        require(word, f"{path}.{name}")
        plugin = next(engine.plugin for engine in engines().values() if engine.argument == f"{word}_plugin")
        return getattr(importlib.import_module(plugin.partition(":")[0]), name)

    return getattr_
