"""`AcceleratorState`: the run as users see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from accel_core._records import record
from accel_core.errors import ConfigurationError, StateError
from accel_core.host import environ
from accel_core.options.enums import OTHER_NAMES, PRECISIONS, DistributedType, PrecisionType, meant
from accel_core.plugins.handlers import in_use
from accel_core.process.world import World, current
from accel_core.state.process import PartialState
from accel_core.state.process_control import ProcessControl, SharedState

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from accel_core.mesh.layout import Layout
    from accel_core.plugins.parallelism import ParallelismConfig


@record(frozen=True)
class Decision:
    """What the first Accelerator of a process decided for those after it."""

    engine: object  # the engine that was asked for; `None` where the number of processes chose the strategy
    layout: Layout  # which rank does what
    flag: str  # variable that was set to tell libraries of the engine, or nothing


def is_initialized() -> bool:
    """Return whether an AcceleratorState, and so an Accelerator, was made in this process."""
    return AcceleratorState._shared_state != {}


def decided() -> Decision | None:
    """Return what was decided in this process; nothing, where the view of it is empty."""
    return AcceleratorState._decision if is_initialized() else None


def loss_part(world: World) -> int:
    """Return which part of the loss this rank computes in the present run; without a run, its rank."""
    known = decided()
    return world.rank if known is None else known.layout.loss_part


def first_tensor_parallel_rank(rank: int) -> int:
    """Return the first rank of a rank's tensor-parallel group, all of which draw the same random numbers."""
    known = decided()
    return rank if known is None else rank - known.layout.place(("tp",), rank)  # the last axis


def resolve_precision(wanted: str | None, cpu: bool = False, of_engine: str | None = None) -> str:
    """Return the number format of the process's runs, changing nothing.

    That of an engine's own configuration counts where neither the script nor the environment asks for one.

    Raises:
        ConfigurationError: The format is unknown, or the process trains in another one or on another device already.
    """
    wanted = None if wanted is None else str(wanted).lower()
    if is_initialized():
        resolved = AcceleratorState._precision
        if wanted not in (None, resolved):
            raise ConfigurationError(
                f"A process cannot change its mixed precision; got {wanted!r} in one that trains in {resolved!r}. "
                "Use one precision for all Accelerators, or train in another process."
            )
        world = current()
        if cpu and world is not None and world.device.type != "cpu":
            raise ConfigurationError(
                f"A process computes on one device; got cpu=True, and it computes on {world.device} already. "
                "Pass cpu=True where the first Accelerator is made."
            )
        return resolved
    launched = (environ.text("ACCELERATE_MIXED_PRECISION") or "no").lower()  # launchers write "no" where nobody chose
    wanted = (wanted or (launched if launched != "no" else of_engine) or "no").lower()
    if wanted not in PrecisionType:
        raise ConfigurationError(
            f"The mixed precision is not known; got {wanted!r}."
            f"{meant(wanted.removeprefix('torch.'), PRECISIONS, OTHER_NAMES)} Use one of {PrecisionType.list()} "
            "(the argument mixed_precision or ACCELERATE_MIXED_PRECISION)."
        )
    return wanted


class AcceleratorState(SharedState, ProcessControl):
    """The process and how it trains: precision, plugins, the label of the strategy.

    Every instance shares one state. An Accelerator makes the first one; users make others to read it. Arguments other
    than `mixed_precision` and `cpu` count in the first one alone.

    Args:
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`; `None` reads ACCELERATE_MIXED_PRECISION.
        cpu: Compute on the CPU whatever hardware is here.
        dynamo_plugin: How models are compiled.
        deepspeed_plugin: A DeepSpeed plugin, or several by name.
        fsdp_plugin: An FSDP plugin.
        torch_tp_plugin: A tensor-parallel plugin.
        megatron_lm_plugin: A Megatron-LM plugin.
        parallelism_config: The axes of an N-D mesh.
        **kwargs: Passed to `torch.distributed.init_process_group`.

    Raises:
        StateError: No Accelerator was made yet.
        ConfigurationError: An unknown precision, or one that contradicts the state that exists.

    Examples:
        >>> state = AcceleratorState()  # after an Accelerator was made
        >>> state.mixed_precision
        'no'
        >>> state.num_processes
        1
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _decision: ClassVar[Decision | None] = None  # what the first Accelerator decided for all of this process
    _precision: ClassVar[str] = "no"
    _plugin_attributes: ClassVar[tuple[str, ...]] = (
        "deepspeed_plugins",
        "fsdp_plugin",
        "megatron_lm_plugin",
        "torch_tp_plugin",
    )
    _known_attributes: ClassVar[tuple[str, ...]] = (
        *PartialState._known_attributes,
        *_plugin_attributes,
        "device_mesh",
        "dynamo_plugin",
        "mixed_precision",
        "parallelism_config",
    )

    deepspeed_plugins: dict[str, Any] | None
    device_mesh: DeviceMesh | None
    distributed_type: DistributedType
    parallelism_config: ParallelismConfig | None

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: object = None,
        deepspeed_plugin: object = None,
        fsdp_plugin: object = None,
        torch_tp_plugin: object = None,
        megatron_lm_plugin: object = None,
        parallelism_config: ParallelismConfig | None = None,
        _from_accelerator: bool = False,
        **kwargs: object,
    ) -> None:
        self.__dict__ = self._shared_state
        if not _from_accelerator and not self.initialized:
            raise StateError(
                "An AcceleratorState shows what an Accelerator decided; got no Accelerator yet. Make one first."
            )
        precision = resolve_precision(mixed_precision, cpu)
        is_set = self.initialized
        if PartialState._shared_state == {}:
            PartialState(cpu, **kwargs)
        # All but the label: that of the run stays, which the process alone may not know.
        self.__dict__.update({k: v for k, v in PartialState._shared_state.items() if k != "distributed_type"})
        self.__dict__.setdefault("distributed_type", PartialState().distributed_type)
        if is_set:
            return
        AcceleratorState._decision, AcceleratorState._precision = None, precision
        self.__dict__.update(
            dynamo_plugin=dynamo_plugin,
            deepspeed_plugins=_by_name(deepspeed_plugin),
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
            device_mesh=None,
            use_ipex=False,
        )
        PartialState._shared_state["distributed_type"] = self.distributed_type

    def _publish(
        self, decision: Decision, label: DistributedType, mains: tuple[bool, bool] | None = None, **facts: object
    ) -> None:
        """Keep what an Accelerator decided, and show what users may see of it."""
        AcceleratorState._decision = decision
        self.__dict__.update({name: value for name, value in facts.items() if value is not None})
        self.deepspeed_plugins = _by_name(self.__dict__.pop("deepspeed_plugin", self.deepspeed_plugins))
        self.distributed_type = label
        PartialState._shared_state.update(distributed_type=label, backend=self.backend)
        ProcessControl._mains = mains
        if self.deepspeed_plugins and not getattr(self.deepspeed_plugin, "selected", False):
            self.deepspeed_plugin.select(_from_accelerator_state=True)

    def __repr__(self) -> str:
        text = repr(PartialState()) + f"Mixed precision type: {self.mixed_precision}\n"
        if self.deepspeed_plugins:
            text += f"ds_config: {self.deepspeed_plugin.deepspeed_config}\n"
        return text

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Empty the shared state, and with `reset_partial_state` that of the process; the process group stays."""
        # The variable that the run's engine set for libraries goes too: it would choose the next run's engine.
        if AcceleratorState._decision is not None:
            environ.remove(AcceleratorState._decision.flag)
        AcceleratorState._decision = None
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """The number format of the forward pass: `no`, `fp16`, `bf16` or `fp8`."""
        if not self.initialized:
            raise AttributeError("mixed_precision")  # which `__getattr__` explains
        return AcceleratorState._precision

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook launcher forked this process."""
        return bool(PartialState().fork_launched)

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded in place (FSDP version 2)."""
        return self.fsdp_plugin is not None and self.fsdp_plugin.fsdp_version == 2

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed plugin in use, or `None`."""
        return in_use((self.deepspeed_plugins or {}).values())

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed plugin that was given under `name`.

        Args:
            name: Key of the plugin in `deepspeed_plugins`.

        Returns:
            The plugin.

        Raises:
            ConfigurationError: There is none of that name.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise ConfigurationError(f"No DeepSpeed plugin is called {name!r}; given were {sorted(plugins)}.")
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Put the DeepSpeed plugin called `name` to use, and the others out of it.

        Args:
            name: Key of the plugin in `deepspeed_plugins`.
        """
        chosen = self.get_deepspeed_plugin(str(name))
        for plugin in (self.deepspeed_plugins or {}).values():
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    def destroy_process_group(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Leave the process group; see `PartialState.destroy_process_group`.

        Args:
            group: The group to leave.
        """
        PartialState().destroy_process_group(group)


def _by_name(plugins: object) -> dict[str, Any] | None:
    """Return DeepSpeed plugins by name; one alone is called "default"."""
    return plugins if plugins is None or isinstance(plugins, dict) else {"default": plugins}
