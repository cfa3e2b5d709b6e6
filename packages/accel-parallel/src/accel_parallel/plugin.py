"""How a model is sharded by torch's FSDP, in its first version or its second."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from accel_core._records import record
from accel_core.errors import ConfigurationError, expect_flags
from accel_core.host import environ
from accel_core.options.option import Option, boolean, option_named, options_of
from accel_parallel import plugin_policies as policies
from accel_parallel.options import FSDP2_STATE_DICT_TYPE, FsdpOptions

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import fsdp

_logger = logging.getLogger(__name__)


def enable_fsdp_ram_efficient_loading() -> None:
    """Let only one process load the weights of a pretrained model, from here on.

    Examples:
        >>> import os
        >>> enable_fsdp_ram_efficient_loading()
        >>> os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]
        'True'
    """
    environ.write("ACCELERATE_USE_FSDP", True)
    environ.write("FSDP_CPU_RAM_EFFICIENT_LOADING", True)


def disable_fsdp_ram_efficient_loading() -> None:
    """Let every process load the weights of a pretrained model, from here on.

    Examples:
        >>> import os
        >>> disable_fsdp_ram_efficient_loading()
        >>> os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]
        'False'
    """
    environ.write("FSDP_CPU_RAM_EFFICIENT_LOADING", False)


_VERSION_OF = {
    "backward_prefetch": 1,
    "forward_prefetch": 1,
    "param_init_fn": 1,
    "reshard_after_forward": 2,  # version 1 takes it as another name of its strategy, and reads no variable for it
    "sync_module_states": 1,
    "use_orig_params": 1,
}
"""Fields that only one version has, with that version."""

_READ_IF_NEEDED = ("sharding_strategy", "transformer_cls_names_to_wrap", "min_num_params")
"""Fields whose variables are read only beside certain values of other fields."""


def _option(field: str) -> Option:
    return option_named(FsdpOptions, field)


@record
class FullyShardedDataParallelPlugin:
    """Arguments of FSDP; a field left at `None` is read from FSDP_*.

    Version 1 is `torch.distributed.fsdp.FullyShardedDataParallel`, version 2 `torch.distributed.fsdp.fully_shard`.
    A field that the chosen version does not have is set to `None`, with a warning where it was asked for.

    Args:
        fsdp_version: 1 or 2.
        sharding_strategy: What version 1 shards: a `ShardingStrategy`, its name or its number.
        reshard_after_forward: Whether version 2 frees gathered parameters between forward and backward. Version 1
            takes a `ShardingStrategy` or its name here, in place of `sharding_strategy`.
        backward_prefetch: When version 1 gathers the next parameters: a `BackwardPrefetch`, its name or number, or
            "NO_PREFETCH".
        mixed_precision_policy: Number formats: the version's policy object, a name ("fp16", "bf16", "fp8", "fp32"),
            or a dict of its dtypes.
        auto_wrap_policy: How to choose the modules that are sharded one by one: a function as torch takes it, or
            "transformer_based_wrap", "size_based_wrap", "no_wrap".
        cpu_offload: Whether parameters and gradients live in CPU memory: a boolean or the version's policy object.
        ignored_modules: Modules left unsharded, or a regular expression over their names.
        state_dict_type: Layout of checkpoints: a `StateDictType`, its name or number.
        state_dict_config: Settings of that layout; made to fit where `None`.
        optim_state_dict_config: The same for optimizer states.
        limit_all_gathers: Whether version 1 keeps the device from running ahead of the gathers.
        use_orig_params: Has no effect: version 1 always keeps the original parameters visible.
        param_init_fn: Called by version 1 with a module whose weights are on the meta device.
        sync_module_states: Whether version 1 sends the weights of rank 0 to all ranks.
        forward_prefetch: Whether version 1 gathers the next parameters in the forward pass.
        activation_checkpointing: Whether activations are recomputed in the backward pass.
        activation_checkpointing_offload: Whether the tensors that this keeps are in CPU memory; version 2 only.
        cpu_ram_efficient_loading: Whether only one process loads the weights of a pretrained model. Setting it writes
            FSDP_CPU_RAM_EFFICIENT_LOADING, which the library that loads the model reads.
        transformer_cls_names_to_wrap: Class names of the blocks to shard one by one: a list, or text with commas.
        min_num_params: Smallest number of parameters for which the size-based policy shards a module on its own.

    Raises:
        ConfigurationError: A value is unknown, or the version does not support it.

    Examples:
        >>> plugin = FullyShardedDataParallelPlugin(
        ...     fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        ... )
        >>> accelerator = Accelerator(fsdp_plugin=plugin)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
    """

    fsdp_version: int | None = None
    sharding_strategy: str | fsdp.ShardingStrategy | None = None
    reshard_after_forward: str | fsdp.ShardingStrategy | bool | None = None
    backward_prefetch: str | fsdp.BackwardPrefetch | None = None
    mixed_precision_policy: dict[str, Any] | str | fsdp.MixedPrecision | fsdp.MixedPrecisionPolicy | None = None
    auto_wrap_policy: Callable[..., Any] | Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"] | None = None
    cpu_offload: bool | fsdp.CPUOffload | fsdp.OffloadPolicy | None = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: str | fsdp.StateDictType | None = None
    state_dict_config: fsdp.FullStateDictConfig | fsdp.ShardedStateDictConfig | None = None
    optim_state_dict_config: fsdp.FullOptimStateDictConfig | fsdp.ShardedOptimStateDictConfig | None = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        """Fill what is left open, turn names into torch's objects and check them against the version."""
        if self.fsdp_version is None:
            self.fsdp_version = _option("fsdp_version").read()
        # First, as all others depend on it.
        self.fsdp_version = _option("fsdp_version").parse(str(self.fsdp_version), "the argument fsdp_version")
        given = self.cpu_ram_efficient_loading is not None
        self._read_environment()
        if given:
            # transformers reads it where it loads.
            environ.write("FSDP_CPU_RAM_EFFICIENT_LOADING", self.cpu_ram_efficient_loading)
        if self._second:
            self._check_second_version()
        else:
            self._check_first_version()
        expect_flags(type(self), vars(self))
        self._set_wrapping()
        self._check_activation_checkpointing()
        self.set_cpu_offload()
        self.set_state_dict_type()
        if self.mixed_precision_policy is not None:
            self.set_mixed_precision(self.mixed_precision_policy, override=True)

    @property
    def _second(self) -> bool:
        return self.fsdp_version == 2

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The number format in which gathered parameters compute; `None` for their own."""
        policy: Any = self.mixed_precision_policy
        return None if policy is None else policy.param_dtype

    @property
    def offloads(self) -> bool:
        """Whether parameters and gradients live in CPU memory."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

        given = self.cpu_offload
        return given.offload_params if isinstance(given, CPUOffload) else isinstance(given, CPUOffloadPolicy)

    def _read_environment(self) -> None:
        """Read the fields that are left open from their variables, and texts for numbers and flags as those."""
        for option in options_of(FsdpOptions):
            name, value = option.field, getattr(self, option.field)
            is_ours = _VERSION_OF.get(name, self.fsdp_version) == self.fsdp_version
            if is_ours and isinstance(value, str) and option.parser in (int, boolean):
                setattr(self, name, option.parse(value, f"the argument {name}"))
            elif is_ours and value is None and name not in _READ_IF_NEEDED:
                setattr(self, name, option.read())

    def _check_first_version(self) -> None:
        from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

        if isinstance(self.reshard_after_forward, bool):
            raise ConfigurationError(
                f"FSDP1 takes a ShardingStrategy as reshard_after_forward; got {self.reshard_after_forward!r}. "
                "Use 'FULL_SHARD' or 'SHARD_GRAD_OP', or fsdp_version=2."
            )
        given: object = self.sharding_strategy
        if self.reshard_after_forward is not None:
            self.reshard_after_forward = policies.member(
                "sharding_strategy", self.reshard_after_forward, ShardingStrategy
            )
            given = self.reshard_after_forward if given is None else given
        if given is None:
            given = _option("sharding_strategy").read()
        self.sharding_strategy = policies.member("sharding_strategy", given, ShardingStrategy)
        if self.reshard_after_forward not in (None, self.sharding_strategy):
            raise ConfigurationError(
                f"Two strategies for one model: sharding_strategy={self.sharding_strategy} and "
                f"reshard_after_forward={self.reshard_after_forward}. Give one of them."
            )
        prefetch = self.backward_prefetch
        none = isinstance(prefetch, str) and _option("backward_prefetch").parser(prefetch) == "NO_PREFETCH"
        self.backward_prefetch = None if none else policies.member("backward_prefetch", prefetch, BackwardPrefetch)
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            _logger.warning(
                "cpu_ram_efficient_loading leaves weights on one rank only, so sync_module_states is switched on."
            )
            self.sync_module_states = True

    def _check_second_version(self) -> None:
        if self.sharding_strategy is not None:
            _logger.warning("FSDP2 has no sharding_strategy; it is ignored. Use reshard_after_forward.")
            self.sharding_strategy = None
        if not isinstance(self.reshard_after_forward, bool):
            raise ConfigurationError(
                f"FSDP2 needs True or False as reshard_after_forward; got {self.reshard_after_forward!r}. "
                "Use True to free parameters after the forward pass, False to keep them."
            )
        if self.forward_prefetch:
            raise ConfigurationError(
                "FSDP2 has no forward_prefetch; got forward_prefetch=True. Leave it out, or use fsdp_version=1."
            )
        for name, version in _VERSION_OF.items():
            if version == 1 and getattr(self, name) is not None:
                _logger.warning("FSDP2 has no %s; it is ignored.", name)
                setattr(self, name, None)

    def _set_wrapping(self) -> None:
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        self.auto_wrap_policy = policies.wrap_policy(self.auto_wrap_policy)
        if isinstance(self.transformer_cls_names_to_wrap, str):
            option = _option("transformer_cls_names_to_wrap")
            self.transformer_cls_names_to_wrap = list(option.parser(self.transformer_cls_names_to_wrap))
        if self.auto_wrap_policy is transformer_auto_wrap_policy and self.transformer_cls_names_to_wrap is None:
            named = _option("transformer_cls_names_to_wrap").read()
            self.transformer_cls_names_to_wrap = None if named is None else list(named)
        if self.auto_wrap_policy is size_based_auto_wrap_policy and self.min_num_params is None:
            self.min_num_params = _option("min_num_params").read()

    def _check_activation_checkpointing(self) -> None:
        if not self.activation_checkpointing_offload:
            return
        if not self.activation_checkpointing:
            raise ConfigurationError(
                "Only what activation checkpointing keeps can be offloaded; got activation_checkpointing=False. "
                "Set activation_checkpointing=True, or activation_checkpointing_offload=False."
            )
        if not self._second:
            raise ConfigurationError(
                "FSDP1 cannot offload what activation checkpointing keeps; got fsdp_version=1. Use fsdp_version=2."
            )

    def set_cpu_offload(self) -> None:
        """Turn `cpu_offload` into the policy object of the version."""
        given = _option("cpu_offload").read() if self.cpu_offload is None else self.cpu_offload
        self.cpu_offload = policies.cpu_offload(given, self._second)  # type: ignore[assignment]
        self.validate_cpu_offload()

    def validate_cpu_offload(self) -> None:
        """Check that `cpu_offload` is the policy object of the version.

        Raises:
            ConfigurationError: It is that of the other version, or none at all.
        """
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        kind = OffloadPolicy if self._second else CPUOffload
        policies.check_kind("cpu_offload", self.cpu_offload, kind, self.fsdp_version, "True, False")

    def set_state_dict_type(self, state_dict_type: str | fsdp.StateDictType | None = None) -> None:
        """Choose the layout of checkpoints, and settings that fit it.

        Args:
            state_dict_type: The layout; the one configured where `None`.

        Raises:
            ConfigurationError: The layout does not exist, or not in this version.
        """
        from torch.distributed.fsdp import StateDictType

        given = state_dict_type or self.state_dict_type or _option("state_dict_type").read()
        if given is None:
            given = "SHARDED_STATE_DICT" if self._second else "FULL_STATE_DICT"
        kind = policies.member("state_dict_type", given, StateDictType)
        if self._second and kind.name not in FSDP2_STATE_DICT_TYPE:
            raise ConfigurationError(
                f"FSDP2 cannot write every layout of state dicts; got {kind.name}. "
                f"Use one of {FSDP2_STATE_DICT_TYPE} as state_dict_type."
            )
        self.state_dict_type = kind
        self.state_dict_config, self.optim_state_dict_config = policies.state_dict_configs(
            kind, self.state_dict_config, self.optim_state_dict_config
        )

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Bind the wrapping policy to the classes, or the size, that a model needs.

        Args:
            model: The model that will be sharded. Its `_no_split_modules` names the blocks where the user does not.

        Raises:
            ConfigurationError: A named class does not occur in the model.
        """
        self.auto_wrap_policy = policies.bind_wrap_policy(
            self.auto_wrap_policy, model, self.transformer_cls_names_to_wrap, self.min_num_params
        )

    def set_mixed_precision(
        self,
        mixed_precision: dict[str, Any] | str | torch.dtype | fsdp.MixedPrecision | fsdp.MixedPrecisionPolicy | None,
        buffer_autocast: bool = False,
        override: bool = False,
    ) -> None:
        """Choose the number formats of the version's policy object.

        Args:
            mixed_precision: A name ("fp16", "bf16", "fp8", "fp32"), a dtype, a dict of the policy's dtypes, a policy
                object, or `None` for torch's defaults.
            buffer_autocast: Keep buffers in 32 bits; version 1 only.
            override: Replace a policy that is already there.

        Raises:
            ConfigurationError: A name, key or dtype is unknown.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        policy = policies.mixed_precision(mixed_precision, self._second, buffer_autocast)
        self.mixed_precision_policy = policy  # type: ignore[assignment]
        self.validate_mixed_precision_policy()

    def validate_mixed_precision_policy(self) -> None:
        """Check that `mixed_precision_policy` is the policy object of the version.

        Raises:
            ConfigurationError: It is that of the other version, or something else.
        """
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        kind: type[Any] = MixedPrecisionPolicy if self._second else MixedPrecision
        policies.check_kind(
            "mixed_precision_policy", self.mixed_precision_policy, kind, self.fsdp_version, "'bf16', 'fp16'"
        )
