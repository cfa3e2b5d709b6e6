"""Turns values of the FSDP plugin into torch's enumerations, policies and configurations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from accel_core.errors import ConfigurationError
from accel_core.options.option import option_named
from accel_parallel.options import FSDP_AUTO_WRAP_POLICY, FsdpOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

_WORDS = ("fp16", "bf16", "fp8", "fp32")


def member(field: str, value: object, enumeration: Any) -> Any:
    """Return the member of a torch enumeration for a name, a number or the member itself."""
    if isinstance(value, enumeration):
        return value
    word = option_named(FsdpOptions, field).parse(str(value), f"the argument {field}")
    # torch's name is private, the launcher's is not.
    return enumeration["_HYBRID_SHARD_ZERO2" if word == "HYBRID_SHARD_ZERO2" else word]


def check_kind(field: str, value: object, kind: type[Any], version: object, instead: str) -> None:
    """Refuse an object of another class than the version needs."""
    if not isinstance(value, kind):
        raise ConfigurationError(
            f"{field} does not fit FSDP{version}; got {value!r}. "
            f"Use {instead} or a torch.distributed.fsdp.{kind.__name__}."
        )


def cpu_offload(value: object, second: bool) -> object:
    """Return the offload policy for a boolean; a policy object is returned unchanged."""
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    if isinstance(value, str):
        value = option_named(FsdpOptions, "cpu_offload").parse(value, "the argument cpu_offload")
    if not isinstance(value, bool):
        return value
    if second:
        return CPUOffloadPolicy() if value else OffloadPolicy()
    return CPUOffload(offload_params=value)


def mixed_precision(value: Any, second: bool, buffer_autocast: bool) -> object:
    """Return the mixed-precision policy for a name, a dtype or a dict of dtypes; a policy object stays as it is.

    Raises:
        ConfigurationError: A name, key or dtype is unknown.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    kind: type[Any] = MixedPrecisionPolicy if second else MixedPrecision
    keys = ("param_dtype", "reduce_dtype", "output_dtype" if second else "buffer_dtype")
    if isinstance(value, dict):
        if not set(value) <= set(keys):
            raise ConfigurationError(
                f"FSDP{2 if second else 1} does not know every key of the policy; got {sorted(value)}. "
                f"Use {list(keys)}."
            )
        return kind(**{key: _dtype(dtype) for key, dtype in value.items()})
    if value is not None and not isinstance(value, (str, torch.dtype)):
        return value
    dtypes: dict[str, Any] = dict.fromkeys(keys, None if value is None else _dtype(value))
    if buffer_autocast and not second:
        dtypes["buffer_dtype"] = torch.float32
    return kind(**dtypes)


def _dtype(value: object) -> torch.dtype:
    import torch

    if isinstance(value, torch.dtype):
        return value
    if str(value) not in _WORDS:
        raise ConfigurationError(f"The precision is unknown; got {value!r}. Use one of {sorted(_WORDS)} or a dtype.")
    return {"fp16": torch.float16, "fp32": torch.float32}.get(str(value), torch.bfloat16)


def state_dict_configs(kind: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return settings for model and optimizer state dicts that fit a layout; given settings that fit are kept."""
    import torch
    from torch.distributed import fsdp

    # Moved to CPU memory only where there is another device to move them from.
    offload = {"offload_to_cpu": torch.accelerator.is_available()}
    kinds: tuple[type[Any], type[Any]]
    if kind is fsdp.StateDictType.FULL_STATE_DICT:
        kinds, arguments = (fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig), {**offload, "rank0_only": True}
    elif kind is fsdp.StateDictType.SHARDED_STATE_DICT:
        kinds, arguments = (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig), offload
    else:
        return model, optimizer
    return (
        model if isinstance(model, kinds[0]) else kinds[0](**arguments),
        optimizer if isinstance(optimizer, kinds[1]) else kinds[1](**arguments),
    )


def wrap_policy(value: object) -> Any:
    """Return torch's function for the name of a wrapping policy; a function is returned unchanged."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    if not isinstance(value, str):
        return value
    word = option_named(FsdpOptions, "auto_wrap_policy").parser(value)
    if word not in FSDP_AUTO_WRAP_POLICY:
        raise ConfigurationError(
            f"The wrapping policy is not known; got {value!r}. Use one of {FSDP_AUTO_WRAP_POLICY}."
        )
    policies: dict[str, Callable[..., Any]] = {
        "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
        "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
    }
    return policies.get(word)


def bind_wrap_policy(policy: Any, model: nn.Module, names: Iterable[str] | None, least: int | None) -> Any:
    """Return a wrapping policy with the classes or the size that a model needs; `None` where it names no blocks.

    Raises:
        ConfigurationError: A named class does not occur in the model, or the policy is not a function.
    """
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    if policy is transformer_auto_wrap_policy:
        classes = _classes(model, names)
        return functools.partial(policy, transformer_layer_cls=classes) if classes else None
    if policy is size_based_auto_wrap_policy:
        return functools.partial(policy, min_num_params=least) if least else None
    if policy is not None and not callable(policy):
        raise ConfigurationError(
            f"A wrap policy is a function of a module, as torch's size_based_auto_wrap_policy is; got {policy!r}. "
            "Pass such a function, or 'transformer_based_wrap' or 'size_based_wrap'."
        )
    return policy


def _classes(model: nn.Module, names: Iterable[str] | None) -> set[type[nn.Module]]:
    """Return the classes that the user names, all of which occur, or those of the model's own that do."""
    by_name = {type(part).__name__: type(part) for part in model.modules()}
    if names is None:
        own = getattr(model, "_no_split_modules", None) or ()
        return {by_name[name] for name in own if name in by_name}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ConfigurationError(
            f"A class to be sharded on its own does not occur in the model {type(model).__name__}; got {missing}. "
            f"Use some of {sorted(by_name)} in transformer_cls_names_to_wrap."
        )
    return {by_name[name] for name in names}
