"""The engines that accel knows, one row each; torch-free, so that the launcher reads the same rows.

What stands in a row is which library an engine needs, from which version on, how to install it and which variable asks
for it. The code of an engine looks here for all of that, and `accel env` and `accel launch --explain` show it.
"""

from __future__ import annotations

import importlib.metadata

from accel_core._records import record
from accel_core.errors import MissingDependencyError
from accel_core.host.availability import OLDEST_TORCHAO
from accel_core.host.versions import compare_versions

__all__ = ["ENGINES", "Engine", "Presence", "named"]


@record(frozen=True)
class Presence:
    """Whether an engine can be used here.

    Attributes:
        version: Version of its library; `None` where that is not installed.
        problem: What is missing, empty where nothing is.
        remedy: The command that mends it, empty where nothing is missing.
    """

    version: str | None
    problem: str = ""
    remedy: str = ""


@record(frozen=True)
class Engine:
    """One way to train, or to compute.

    Attributes:
        name: A short word for it.
        title: What people call it.
        library: The distribution that it stands on.
        oldest: First version of the library that serves; empty where any does.
        extras: What else `pip` is asked for when the library is installed.
        install: How `pip` calls the library, where that is more than its name.
        variable: The environment variable that asks for the engine; empty where none does.
    """

    name: str
    title: str
    library: str
    oldest: str = ""
    extras: str = ""
    install: str = ""
    variable: str = ""

    @property
    def requirement(self) -> str:
        """What `pip install` is given."""
        return " ".join(word for word in (self.install or self.library, self.extras) if word)

    def presence(self) -> Presence:
        """Return whether the library is installed and new enough, from its metadata; nothing is imported."""
        try:
            version = importlib.metadata.version(self.library)
        except importlib.metadata.PackageNotFoundError:
            return Presence(None, f"{self.library} is not installed", f"pip install {self.requirement}")
        if self.oldest and _is_older(version, self.oldest):
            return Presence(
                version, f"{self.library} {version} is older than {self.oldest}", f"pip install -U {self.requirement}"
            )
        return Presence(version)

    def require(self) -> None:
        """Refuse a run with this engine where its library is missing or too old, without importing it.

        Raises:
            MissingDependencyError: The library is not installed, or is too old.
        """
        found = self.presence()
        if found.problem:
            raise MissingDependencyError(
                f"{self.title} needs {self.library}{f' {self.oldest} or newer' if self.oldest else ''}; "
                f"got {found.version or 'none that is installed'}. Run `{found.remedy}`."
            )


def _is_older(version: str, oldest: str) -> bool:
    from packaging.version import parse  # where versions are compared, not at every start

    return compare_versions(parse(version), "<", oldest)


_DEEPSPEED = "0.18.2"
"""The first that accumulates gradients as a run asks for it."""

ENGINES: tuple[Engine, ...] = (
    Engine("ddp", "DistributedDataParallel", "torch"),
    Engine("fsdp1", "FSDP 1", "torch", variable="ACCELERATE_USE_FSDP"),
    Engine("fsdp2", "FSDP 2", "torch", "2.6", variable="ACCELERATE_USE_FSDP"),
    Engine("tp", "tensor parallel", "torch"),
    Engine("cp", "context parallel", "torch"),
    Engine("sp", "sequence parallel (Ulysses)", "deepspeed", _DEEPSPEED, "ninja einops"),
    Engine("deepspeed", "DeepSpeed", "deepspeed", _DEEPSPEED, "ninja", variable="ACCELERATE_USE_DEEPSPEED"),
    Engine("megatron", "Megatron-LM", "megatron-core", "0.16.0", "transformers", variable="ACCELERATE_USE_MEGATRON_LM"),
    Engine("xla", "PyTorch/XLA", "torch_xla", install="'torch_xla[tpu]'"),
    Engine("fp8-ao", "fp8 by torchao", "torchao", OLDEST_TORCHAO),
    Engine("fp8-te", "fp8 by Transformer Engine", "transformer-engine", install="'transformer-engine[pytorch]'"),
    Engine("fp8-msamp", "fp8 by MS-AMP", "ms-amp"),
)
"""In the order in which they are shown."""


def named(name: str) -> Engine:
    """Return an engine by its short name.

    Raises:
        KeyError: There is no engine of that name.
    """
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise KeyError(name)
