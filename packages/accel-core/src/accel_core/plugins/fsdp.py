"""How a model is sharded by torch's FSDP, in its first version or its second."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from accel_core.errors import ConfigurationError
from accel_core.host import environ
from accel_core.options.fsdp import FSDP2_STATE_DICT_TYPE, FSDP_AUTO_WRAP_POLICY, FsdpOptions
from accel_core.options.option import Option, option_named

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import fsdp

__all__ = [
    "FullyShardedDataParallelPlugin",
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "get_module_class_from_name",
]

_logger = logging.getLogger(__name__)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of that name among a module and everything below it.

    Args:
        module: Where to look.
        name: Name of the class, without its module.

    Returns:
        The class, or `None` where nothing of that name is found.
    """
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def enable_fsdp_ram_efficient_loading() -> None:
    """Let only one process load the weights of a pretrained model, from here on."""
    environ.write("ACCELERATE_USE_FSDP", True)
    environ.write("FSDP_CPU_RAM_EFFICIENT_LOADING", True)


def disable_fsdp_ram_efficient_loading() -> None:
    """Let every process load the weights of a pretrained model, from here on."""
    environ.write("FSDP_CPU_RAM_EFFICIENT_LOADING", False)


def _option(field: str) -> Option:
    return option_named(FsdpOptions, field)


@dataclass
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
        mixed_precision_policy: Number formats: the version's policy object, a word ("fp16", "bf16", "fp8", "fp32"),
            or a dict of its dtypes.
        auto_wrap_policy: How the modules that are sharded one by one are chosen: a function as torch takes it, or
            "transformer_based_wrap", "size_based_wrap", "no_wrap".
        cpu_offload: Whether parameters and gradients live in CPU memory: a truth value or the version's policy object.
        ignored_modules: Modules left unsharded, or a regular expression over their names.
        state_dict_type: Layout of checkpoints: a `StateDictType`, its name or number.
        state_dict_config: Settings of that layout; made to fit where `None`.
        optim_state_dict_config: The same for optimizer states.
        limit_all_gathers: Whether version 1 keeps the device from running ahead of the gathers.
        use_orig_params: Whether version 1 keeps the original parameters visible.
        param_init_fn: Called by version 1 with a module whose weights are on the meta device.
        sync_module_states: Whether version 1 sends the weights of rank 0 to all ranks.
        forward_prefetch: Whether version 1 gathers the next parameters in the forward pass.
        activation_checkpointing: Whether activations are computed again in the backward pass.
        activation_checkpointing_offload: Whether what that keeps lives in CPU memory; version 2 only.
        cpu_ram_efficient_loading: Whether only one process loads the weights of a pretrained model. Setting it writes
            FSDP_CPU_RAM_EFFICIENT_LOADING, which the library that loads the model reads.
        transformer_cls_names_to_wrap: Class names of the blocks to shard one by one.
        min_num_params: Number of parameters from which the size-based policy shards a module on its own.

    Raises:
        ConfigurationError: A value that is not known, or that the version cannot have.
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
        """Fill what is left open, turn words into torch's objects and check them against the version."""
        if self.fsdp_version is None:
            self.fsdp_version = _option("fsdp_version").read()
        self.fsdp_version = _option("fsdp_version").parse(str(self.fsdp_version), "the argument fsdp_version")
        for field in ("activation_checkpointing", "activation_checkpointing_offload", "ignored_modules"):
            if getattr(self, field) is None:
                setattr(self, field, _option(field).read())
        self._set_strategy()
        self._set_backward_prefetch()
        self._set_wrapping()
        self._set_activation_checkpointing()
        self._set_loading()
        self._set_first_version_flags()
        self.set_cpu_offload()
        self.set_state_dict_type()
        if self.mixed_precision_policy is not None:
            self.set_mixed_precision(self.mixed_precision_policy, override=True)

    @property
    def _second(self) -> bool:
        return self.fsdp_version == 2

    def _member(self, field: str, value: object, enumeration: Any) -> Any:
        """Return the torch enumeration's member that a word, a number or a member names."""
        if isinstance(value, enumeration):
            return value
        word = _option(field).parse(str(value), f"the argument {field}")
        return enumeration["_HYBRID_SHARD_ZERO2" if word == "HYBRID_SHARD_ZERO2" else word]

    def _set_strategy(self) -> None:
        from torch.distributed.fsdp import ShardingStrategy

        if self._second:
            if self.sharding_strategy is not None:
                _logger.warning("FSDP2 has no sharding_strategy; it is passed over. Use reshard_after_forward.")
                self.sharding_strategy = None
            if self.reshard_after_forward is None:
                self.reshard_after_forward = _option("reshard_after_forward").read()
            if isinstance(self.reshard_after_forward, str):
                self.reshard_after_forward = _option("reshard_after_forward").parse(
                    self.reshard_after_forward, "the argument reshard_after_forward"
                )
            if not isinstance(self.reshard_after_forward, bool):
                raise ConfigurationError(
                    f"FSDP2 takes a truth value as reshard_after_forward; got {self.reshard_after_forward!r}. "
                    "Use True to free parameters after the forward pass, False to keep them."
                )
            return
        if isinstance(self.reshard_after_forward, bool):
            raise ConfigurationError(
                f"FSDP1 takes a ShardingStrategy as reshard_after_forward; got {self.reshard_after_forward!r}. "
                "Use 'FULL_SHARD' or 'SHARD_GRAD_OP', or fsdp_version=2."
            )
        given: object = self.sharding_strategy
        if self.reshard_after_forward is not None:
            self.reshard_after_forward = self._member("sharding_strategy", self.reshard_after_forward, ShardingStrategy)
            given = self.reshard_after_forward if given is None else given
        if given is None:
            given = _option("sharding_strategy").read()
        self.sharding_strategy = self._member("sharding_strategy", given, ShardingStrategy)
        if self.reshard_after_forward not in (None, self.sharding_strategy):
            raise ConfigurationError(
                f"Two strategies for one model: sharding_strategy={self.sharding_strategy} and "
                f"reshard_after_forward={self.reshard_after_forward}. Give one of them."
            )

    def _set_backward_prefetch(self) -> None:
        from torch.distributed.fsdp import BackwardPrefetch

        if self._second:
            if self.backward_prefetch is not None:
                _logger.warning("FSDP2 has no backward_prefetch; it is passed over.")
            self.backward_prefetch = None
            return
        given = self.backward_prefetch
        if given is None:
            given = _option("backward_prefetch").read()
        none = isinstance(given, str) and _option("backward_prefetch").parser(given) == "NO_PREFETCH"
        self.backward_prefetch = None if none else self._member("backward_prefetch", given, BackwardPrefetch)

    def _set_wrapping(self) -> None:
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        given = self.auto_wrap_policy
        if given is None:
            given = _option("auto_wrap_policy").read()
        if isinstance(given, str):
            word = _option("auto_wrap_policy").parser(given)
            if word not in FSDP_AUTO_WRAP_POLICY:
                raise ConfigurationError(
                    f"The wrapping policy is not known; got {given!r}. Use one of {FSDP_AUTO_WRAP_POLICY}."
                )
            policies: dict[str, Callable[..., Any]] = {
                "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
                "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
            }
            self.auto_wrap_policy = policies.get(word)
        if isinstance(self.transformer_cls_names_to_wrap, str):
            self.transformer_cls_names_to_wrap = [self.transformer_cls_names_to_wrap]
        if self.auto_wrap_policy is transformer_auto_wrap_policy and self.transformer_cls_names_to_wrap is None:
            named = _option("transformer_cls_names_to_wrap").read()
            self.transformer_cls_names_to_wrap = None if named is None else list(named)
        if self.auto_wrap_policy is size_based_auto_wrap_policy and self.min_num_params is None:
            self.min_num_params = _option("min_num_params").read()

    def _set_activation_checkpointing(self) -> None:
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

    def _set_loading(self) -> None:
        if self.cpu_ram_efficient_loading is None:
            self.cpu_ram_efficient_loading = _option("cpu_ram_efficient_loading").read()
        else:
            environ.write("FSDP_CPU_RAM_EFFICIENT_LOADING", self.cpu_ram_efficient_loading)

    def _set_first_version_flags(self) -> None:
        if self._second:
            if self.forward_prefetch:
                raise ConfigurationError(
                    "FSDP2 has no forward_prefetch; got forward_prefetch=True. Leave it out, or use fsdp_version=1."
                )
            for field in ("use_orig_params", "sync_module_states", "forward_prefetch", "param_init_fn"):
                if getattr(self, field) is not None:
                    _logger.warning("FSDP2 has no %s; it is passed over.", field)
                    setattr(self, field, None)
            return
        for field in ("use_orig_params", "sync_module_states", "forward_prefetch"):
            if getattr(self, field) is None:
                setattr(self, field, _option(field).read())
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            _logger.warning(
                "cpu_ram_efficient_loading leaves weights on one rank only, so sync_module_states is switched on."
            )
            self.sync_module_states = True
        if self.sync_module_states and self.param_init_fn is None:
            self.param_init_fn = _empty_on_device

    def set_cpu_offload(self) -> None:
        """Turn `cpu_offload` into the policy object of the version."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        if self.cpu_offload is None:
            self.cpu_offload = _option("cpu_offload").read()
        if isinstance(self.cpu_offload, str):
            self.cpu_offload = _option("cpu_offload").parse(self.cpu_offload, "the argument cpu_offload")
        if isinstance(self.cpu_offload, bool):
            if self._second:
                self.cpu_offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
            else:
                self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)
        self.validate_cpu_offload()

    def validate_cpu_offload(self) -> None:
        """Check that `cpu_offload` is the policy object of the version.

        Raises:
            ConfigurationError: It is that of the other version, or none at all.
        """
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        wanted = OffloadPolicy if self._second else CPUOffload
        if not isinstance(self.cpu_offload, wanted):
            raise ConfigurationError(
                f"cpu_offload does not fit FSDP{self.fsdp_version}; got {self.cpu_offload!r}. "
                f"Use True, False or a torch.distributed.fsdp.{wanted.__name__}."
            )

    def set_state_dict_type(self, state_dict_type: str | fsdp.StateDictType | None = None) -> None:
        """Choose the layout of checkpoints, and settings that fit it.

        Settings given by the user are kept where they fit. Full state dicts are moved to CPU memory only where there
        is another device to move them from.

        Args:
            state_dict_type: The layout; the one configured where `None`.

        Raises:
            ConfigurationError: The layout does not exist, or not in this version.
        """
        import torch
        from torch.distributed.fsdp import (
            FullOptimStateDictConfig,
            FullStateDictConfig,
            ShardedOptimStateDictConfig,
            ShardedStateDictConfig,
            StateDictType,
        )

        given = state_dict_type or self.state_dict_type or _option("state_dict_type").read()
        if given is None:
            given = "SHARDED_STATE_DICT" if self._second else "FULL_STATE_DICT"
        kind = self._member("state_dict_type", given, StateDictType)
        if self._second and kind.name not in FSDP2_STATE_DICT_TYPE:
            raise ConfigurationError(
                f"FSDP2 cannot write state dicts as {kind.name}. Use one of {FSDP2_STATE_DICT_TYPE} as state_dict_type."
            )
        self.state_dict_type = kind
        offload = torch.accelerator.is_available()
        if kind is StateDictType.FULL_STATE_DICT:
            if not isinstance(self.state_dict_config, FullStateDictConfig):
                self.state_dict_config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
            if not isinstance(self.optim_state_dict_config, FullOptimStateDictConfig):
                self.optim_state_dict_config = FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True)
        elif kind is StateDictType.SHARDED_STATE_DICT:
            if not isinstance(self.state_dict_config, ShardedStateDictConfig):
                self.state_dict_config = ShardedStateDictConfig(offload_to_cpu=offload)
            if not isinstance(self.optim_state_dict_config, ShardedOptimStateDictConfig):
                self.optim_state_dict_config = ShardedOptimStateDictConfig(offload_to_cpu=offload)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Bind the wrapping policy to the classes, or the size, that a model needs.

        Args:
            model: The model that will be sharded. Its `_no_split_modules` names the blocks where the user does not.

        Raises:
            ConfigurationError: A class that is named does not occur in the model.
        """
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            names = self.transformer_cls_names_to_wrap
            if names is None:
                names = list(getattr(model, "_no_split_modules", None) or [])
            if not names:
                _logger.warning("No class is named to be sharded on its own. Set transformer_cls_names_to_wrap.")
            self.auto_wrap_policy = functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls={self._class(model, name) for name in names}
            )
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            self.auto_wrap_policy = (
                functools.partial(size_based_auto_wrap_policy, min_num_params=self.min_num_params)
                if self.min_num_params
                else None
            )

    @staticmethod
    def _class(model: nn.Module, name: str) -> type[nn.Module]:
        found = get_module_class_from_name(model, name)
        if found is None:
            classes = sorted({type(part).__name__ for part in model.modules()})
            raise ConfigurationError(
                f"A class to be sharded on its own does not occur in the model; got {name!r}. Use one of {classes}."
            )
        return found

    def set_mixed_precision(
        self,
        mixed_precision: dict[str, Any] | str | torch.dtype | fsdp.MixedPrecision | fsdp.MixedPrecisionPolicy | None,
        buffer_autocast: bool = False,
        override: bool = False,
    ) -> None:
        """Choose the number formats of the version's policy object.

        Args:
            mixed_precision: A word ("fp16", "bf16", "fp8", "fp32"), a dtype, a dict of the policy's dtypes, a policy
                object, or `None` for torch's defaults.
            buffer_autocast: Keep buffers in 32 bits; version 1 only.
            override: Replace a policy that is already there.

        Raises:
            ConfigurationError: A word, key or dtype that is not known.
        """
        import torch
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        if self.mixed_precision_policy is not None and not override:
            return
        kind: type[Any] = MixedPrecisionPolicy if self._second else MixedPrecision
        keys = ("param_dtype", "reduce_dtype", "output_dtype" if self._second else "buffer_dtype")
        if isinstance(mixed_precision, dict):
            if not set(mixed_precision) <= set(keys):
                raise ConfigurationError(
                    f"FSDP{self.fsdp_version} does not know every key of the policy; got {sorted(mixed_precision)}. "
                    f"Use {list(keys)}."
                )
            dtypes: dict[str, Any] = {key: _dtype(value) for key, value in mixed_precision.items()}
            self.mixed_precision_policy = kind(**dtypes)
        elif mixed_precision is None or isinstance(mixed_precision, (str, torch.dtype)):
            dtypes = dict.fromkeys(keys, None if mixed_precision is None else _dtype(mixed_precision))
            if buffer_autocast and not self._second:
                dtypes["buffer_dtype"] = torch.float32
            self.mixed_precision_policy = kind(**dtypes)
        else:
            self.mixed_precision_policy = mixed_precision
        self.validate_mixed_precision_policy()

    def validate_mixed_precision_policy(self) -> None:
        """Check that `mixed_precision_policy` is the policy object of the version.

        Raises:
            ConfigurationError: It is that of the other version, or something else.
        """
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        wanted: type[Any] = MixedPrecisionPolicy if self._second else MixedPrecision
        if not isinstance(self.mixed_precision_policy, wanted):
            raise ConfigurationError(
                f"mixed_precision_policy does not fit FSDP{self.fsdp_version}; got {self.mixed_precision_policy!r}. "
                f"Use 'bf16', 'fp16' or a torch.distributed.fsdp.{wanted.__name__}."
            )


def _dtype(value: object) -> torch.dtype:
    import torch

    if isinstance(value, torch.dtype):
        return value
    words = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}
    if str(value) not in words:
        raise ConfigurationError(f"A number format is not known; got {value!r}. Use one of {sorted(words)} or a dtype.")
    return words[str(value)]


def _empty_on_device(module: nn.Module) -> None:
    """Give a module's own meta tensors memory on the run's device, without values."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    module.to_empty(device=device, recurse=False)
