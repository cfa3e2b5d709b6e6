"""Builds megatron-core's optimizer and schedule to match those that the user passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_core.errors import ConfigurationError, PreparationError
from accel_megatron import library
from accel_megatron.arguments import configured, number_format
from accel_megatron.plugin import MegatronLMDummyScheduler, MegatronLMPlugin
from accel_megatron.run import MegatronRun

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, ParamKey
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def refuse_kind(plugin: MegatronLMPlugin, optimizer: object) -> None:
    """Refuse an optimizer whose state `use_distributed_optimizer` cannot shard: any but an Adam."""
    if plugin.use_distributed_optimizer and "adam" not in type(optimizer).__name__.lower():
        raise PreparationError(
            f"megatron-core's distributed optimizer supports only Adam; got {type(optimizer).__name__}. Use "
            "torch.optim.AdamW, or set use_distributed_optimizer=False."
        )


def refuse_groups(optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameter groups that megatron-core's optimizer would not have.

    It creates two groups: biases and norms without weight decay, and all other weights with it.
    """
    groups = optimizer.param_groups
    decays = {group.get("weight_decay", 0) for group in groups} - {0}
    others = {
        name
        for group in groups
        for name, value in group.items()
        if name not in ("params", "weight_decay") and value != groups[0].get(name)
    }
    if others or len(decays) > 1:
        raise PreparationError(
            "megatron-core creates its own parameter groups, with and without weight decay; got groups of "
            f"{type(optimizer).__name__} that differ in {', '.join(sorted(others)) or 'weight_decay'}. Use one value, "
            "or no_wd_decay_cond, scale_lr_cond and lr_mult of MegatronLMPlugin."
        )


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the learning rate and weight decay of an optimizer's groups, which its defaults may not hold."""
    groups = optimizer.param_groups
    decays = [group["weight_decay"] for group in groups if group.get("weight_decay")]
    adam = "adam" in type(optimizer).__name__.lower()
    return {
        "lr": groups[0]["lr"],
        "weight_decay": decays[0] if decays else 0.0,
        # Torch's Adam adds weight decay to the gradient, AdamW to the weight.
        **({"decoupled_weight_decay": type(optimizer).__name__.lower() != "adam"} if adam else {}),
    }


def build_optimizer(run: MegatronRun, chunks: Sequence[nn.Module]) -> MegatronOptimizer:
    """Return megatron-core's optimizer for a model."""
    arguments, optimizers = run.arguments, library.core("optimizer")
    config = configured(
        optimizers.OptimizerConfig,
        arguments,
        params_dtype=number_format(arguments),
        clip_grad=float(arguments.clip_grad or 0.0),
    )
    overrides = _overrides(run, config)
    made = optimizers.get_megatron_optimizer(config, list(chunks), config_overrides=overrides)
    for own in made.chained_optimizers:
        if getattr(own, "init_state_fn", _momentum) is None:  # SGD comes without one
            own.init_state_fn = _momentum
    return made


def _momentum(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """Create the states that SGD creates at its first step: megatron-core loads into existing states only."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _overrides(run: MegatronRun, config: OptimizerConfig) -> dict[ParamKey, dict[str, Any]]:
    """Return how parameters are grouped: megatron-core's default, unless the plugin has conditions."""
    optimizers = library.core("optimizer")
    plugin = run.plugin
    found: dict[ParamKey, dict[str, Any]] = (
        {} if plugin.no_wd_decay_cond is not None else optimizers.get_standard_config_overrides(config=config)
    )
    keys = library.core("optimizer.optimizer_config")
    for name, condition, values in (
        ("no weight decay", plugin.no_wd_decay_cond, {"wd_mult": 0.0}),
        (
            "scaled rate",
            plugin.scale_lr_cond,
            {"max_lr": config.lr * plugin.lr_mult, "min_lr": (config.min_lr or 0.0) * plugin.lr_mult},
        ),
    ):
        if condition is not None:
            found[_key(keys, name, condition)] = values
    return found


def _key(keys: Any, name: str, condition: Callable[..., bool]) -> ParamKey:
    return keys.ParamKey(
        with_name_predicate=keys.ParamWithNamePredicate(name=name, fn=lambda parameter, own: condition(own, parameter))
    )


def refuse_schedule(schedule: object) -> None:
    """Refuse a schedule that megatron-core cannot build."""
    if not isinstance(schedule, MegatronLMDummyScheduler):
        raise ConfigurationError(
            f"Megatron schedules the learning rate itself; got {type(schedule).__name__}. Pass a "
            "MegatronLMDummyScheduler(optimizer, total_num_steps, warmup_num_steps), and set lr_decay_style of "
            "MegatronLMPlugin."
        )


def build_schedule(run: MegatronRun, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return megatron-core's schedule for an optimizer; it counts samples.

    Raises:
        ConfigurationError: The length of the run is not known, or megatron-core rejects the numbers.
    """
    arguments = run.arguments
    batch = arguments.global_batch_size
    samples = arguments.lr_decay_samples or arguments.train_samples
    steps = arguments.lr_decay_iters or arguments.train_iters
    decay = steps * batch if steps else samples  # megatron-core counts schedules in samples
    if not decay:
        raise ConfigurationError(
            "A Megatron schedule needs the length of the run; got none. Pass total_num_steps to "
            "MegatronLMDummyScheduler, or set train_iters or train_samples of MegatronLMPlugin."
        )
    warmup = arguments.lr_warmup_samples or (arguments.lr_warmup_iters or 0) * batch
    if arguments.lr_warmup_fraction is not None:
        warmup = arguments.lr_warmup_fraction * decay
    start, end = arguments.start_weight_decay, arguments.end_weight_decay
    if arguments.weight_decay_incr_style == "constant":  # megatron-core asserts that both ends are equal then
        start = end = arguments.weight_decay
    try:
        return library.core("optimizer_param_scheduler").OptimizerParamScheduler(
            optimizer,
            init_lr=arguments.lr_warmup_init,
            max_lr=arguments.lr,
            min_lr=arguments.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=decay,
            lr_decay_style=arguments.lr_decay_style,
            start_wd=start,
            end_wd=end,
            wd_incr_steps=(arguments.train_iters or 0) * batch or decay,
            wd_incr_style=arguments.weight_decay_incr_style,
        )
    except (AssertionError, TypeError) as error:
        raise ConfigurationError(
            "Megatron's schedule needs a warmup shorter than the decay, and min_lr at most lr; got "
            f"lr={arguments.lr}, min_lr={arguments.min_lr}, {warmup} samples of warmup in {decay}, weight decay from "
            f"{start} to {end}. Change MegatronLMPlugin or MegatronLMDummyScheduler."
        ) from error
