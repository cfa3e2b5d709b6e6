"""What a DeepSpeed configuration leaves open is filled here, and what contradicts the run is refused."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_core._records import record
from accel_core.errors import ConfigurationError, PreparationError
from accel_deepspeed.plugin_config import HfDeepSpeedConfig
from accel_deepspeed.stand_ins import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    import torch

    from accel_core.strategies.parts import Parts

_logger = logging.getLogger(__name__)

_MICRO, _GLOBAL, _STEPS = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"
_CLIPPING = "gradient_clipping"
_FORMATS = ("fp16", "bf16")
_OPEN = {_CLIPPING: "auto", _STEPS: "auto"}
"""Keys that are open where they are left out: without them, DeepSpeed clips to 1, and steps on every batch."""
_OF_MODEL = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def fill(config: HfDeepSpeedConfig, key: str, values: Mapping[str, Any]) -> list[str]:
    """Fill a key whose value is "auto", or compare one that is set."""
    node, last = config.find_config_node(key)
    if node is None:
        return []
    if node.get(last) == "auto":
        if key not in values:
            raise ConfigurationError(
                f"The DeepSpeed configuration has 'auto' for {key!r}, and no value is known; got {sorted(values)}. "
                "Write a value into the configuration, or pass one."
            )
        node[last] = values[key]
    elif key in values and node.get(last) not in (None, values[key]):
        return [f"- ds {key}={node[last]} vs arg {key}={values[key]}"]
    return []


def fill_all(config: HfDeepSpeedConfig, part: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> list[str]:
    """Fill every "auto" value in a part of a configuration, or refuse it, and compare the others."""
    return [line for key in list(_keys_of(part, prefix)) for line in fill(config, key, values)]


def _keys_of(part: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values that are not dicts."""
    for key, value in part.items():
        if isinstance(value, dict):
            yield from _keys_of(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def set_number_format(config: HfDeepSpeedConfig, name: str) -> None:
    """Write the run's number format into a configuration, and compare it with what is there."""
    parts = config.config
    other = {"fp16": "bf16", "bf16": "fp16"}.get(name)
    if other is not None:
        if name not in parts:
            parts[name] = {"enabled": True, "auto_cast": True} if name == "fp16" else {"enabled": True}
        if config.is_true(f"{other}.enabled") and config.get_value(f"{other}.enabled") != "auto":
            raise ConfigurationError(
                f"The run uses {name} and the DeepSpeed configuration {other}; got {parts[other]}. Make them agree."
            )
    for each in _FORMATS:
        part = parts.setdefault(each, {"enabled": False})
        if part.get("enabled") == "auto":
            part["enabled"] = each == name


@record(frozen=True)
class Members:
    """The objects from which an engine is built."""

    model: torch.nn.Module
    optimizer: Any = None
    schedule: Any = None
    sizes: Sequence[int | None] = ()
    smallest: bool = True  # whether the smallest of these batch sizes counts, or the largest


class Filling:
    """Fills in the configuration of a plugin for each model that is prepared, and remembers which keys were 'auto'."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._filled: dict[int, tuple[object, dict[str, Any]]] = {}
        self._warned = False

    def plan(self, given: HfDeepSpeedConfig, members: Members) -> dict[str, Any]:
        """Return the configuration of an engine, without changing the one given.

        Raises:
            ConfigurationError: The configuration contradicts the run, or an 'auto' value cannot be determined.
        """
        trial = self._opened(given)
        config = trial.config
        config.update({**_OPEN, **config})
        set_number_format(trial, self._parts.precision.name)
        if members.optimizer is not None and not isinstance(members.optimizer, DummyOptim):
            # Else DeepSpeed refuses optimizers it does not know.
            config.setdefault("zero_allow_untested_optimizer", True)
        fill_all(trial, config, self._values(trial, members), "")  # differences are compared below, where they matter
        self._count_readers(config)
        return config

    def _count_readers(self, config: dict[str, Any]) -> None:
        """Recompute a total that counts every process, as transformers does, for those that read data."""
        micro, total, steps = config.get(_MICRO), config.get(_GLOBAL), config.get(_STEPS, 1)
        # As transformers writes it.
        if isinstance(micro, int) and total == micro * steps * self._parts.layout.world_size:
            config[_GLOBAL] = micro * steps * self._parts.layout.replicas

    def fill(self, given: HfDeepSpeedConfig, members: Members) -> dict[str, Any]:
        """Write the configuration that `plan` returns into the one given, and return a copy of it."""
        filled = self.plan(given, members)
        before = self._opened(given)
        before.config = {**_OPEN, **before.config}
        waiting = [key for key in _keys_of(before.config) if before.get_value(key) == "auto"]
        self._tell_of_clipping(waiting)
        given.config.clear()  # changed in place, because others hold this dict too
        given.config.update(copy.deepcopy(filled))
        self._filled[id(given.config)] = (given.config, {key: given.get_value(key) for key in waiting})
        return filled

    def _opened(self, given: HfDeepSpeedConfig) -> HfDeepSpeedConfig:
        """Return a copy with 'auto' restored where an earlier model filled in a value that nobody changed since."""
        opened = copy.copy(given)
        opened.config = copy.deepcopy(given.config)
        config, filled = self._filled.get(id(given.config), (None, {}))
        if config is given.config:  # an id may be reused by another dict
            for key, value in filled.items():
                node, last = opened.find_config_node(key)
                if node is not None and node.get(last) == value:  # unless somebody set another value since
                    node[last] = "auto"
        return opened

    def _values(self, trial: HfDeepSpeedConfig, members: Members) -> dict[str, Any]:
        config, optimizer, schedule = trial.config, members.optimizer, members.schedule
        steps = steps_of(trial, self._parts.accumulation.gradient_state.num_steps)
        values: dict[str, Any] = {
            _STEPS: steps,
            # The script clips, with clip_grad_norm_; 0 keeps DeepSpeed from clipping as well.
            _CLIPPING: 0.0,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        }
        if _MICRO not in config and _GLOBAL not in config:
            config[_MICRO] = "auto"
        sizes = members.sizes
        if optimizer is None:  # a model that is only evaluated has no batch size of its own
            sizes = [1] if config.get(_MICRO) == "auto" else []
        micro = _micro_batch(config, sizes, min if members.smallest else max)
        if micro is not None:
            values |= {_MICRO: micro, _GLOBAL: micro * steps * self._parts.layout.replicas}
        if any(trial.get_value(f"zero_optimization.{key}") == "auto" for key in _OF_MODEL):
            values |= _sizes_of(members.model)
        if isinstance(optimizer, DummyOptim):
            values |= {f"optimizer.params.{key}": value for key, value in optimizer.kwargs.items()}
            values |= {"optimizer.params.lr": optimizer.lr, "optimizer.params.weight_decay": optimizer.weight_decay}
        if isinstance(schedule, DummyScheduler):
            values |= self._schedule_values(optimizer, schedule)
        return values

    def _schedule_values(self, optimizer: Any, schedule: DummyScheduler) -> dict[str, Any]:
        # Warmup ends at the optimizer's own rate.
        rate = optimizer.lr if isinstance(optimizer, DummyOptim) else optimizer.defaults["lr"]
        values = {f"scheduler.params.{key}": value for key, value in schedule.kwargs.items()}
        values |= {
            "scheduler.params.warmup_min_lr": 0,
            "scheduler.params.warmup_max_lr": rate,
            # Newer versions refuse 0, which older ones took for 2, as they do 1.
            "scheduler.params.warmup_num_steps": max(1, schedule.warmup_num_steps),
        }
        if schedule.total_num_steps is not None:
            # The script counts steps as one process takes them; DeepSpeed moves the schedule once when all step.
            times = 1 if self._parts.data.split_batches else self._parts.layout.replicas
            values["scheduler.params.total_num_steps"] = math.ceil(schedule.total_num_steps / times)
        return values

    def _tell_of_clipping(self, waiting: Sequence[str]) -> None:
        if _CLIPPING in waiting and not self._warned and self._parts.world.is_main:
            self._warned = True
            _logger.warning(
                "gradient_clipping is 'auto' or left out: gradients are clipped where the script calls "
                "clip_grad_norm_, and nowhere else (Accelerate clips them to 1.0). Set gradient_clipping to a number, "
                "or to 0.0."
            )


def steps_of(config: HfDeepSpeedConfig, asked: int) -> int:
    """Return the number of batches per step; where the script leaves it at 1, the configuration decides."""
    found = config.get_value(_STEPS)
    if found in (None, "auto"):
        return asked
    if asked not in (1, found):  # 1 is the default: the script may not have said anything
        raise ConfigurationError(
            "The script and the DeepSpeed configuration need the same number of accumulation steps; got "
            f"gradient_accumulation_steps={asked} in the script and {_STEPS}={found} in the DeepSpeed configuration. "
            "Set the latter to 'auto'."
        )
    return int(found)


def refuse_contradictions(config: HfDeepSpeedConfig) -> None:
    """Refuse a configuration that contradicts itself."""
    on = formats_of(config)
    if len(on) > 1:
        raise ConfigurationError(
            "A DeepSpeed configuration may enable only one precision; got fp16.enabled and bf16.enabled. Keep one."
        )
    stage = config.get_value("zero_optimization.stage", 0)
    for part, least in (("offload_optimizer", 1), ("offload_param", 3)):
        place = config.get_value(f"zero_optimization.{part}.device")
        if place not in (None, "none", "auto") and isinstance(stage, int) and stage < least:
            raise ConfigurationError(
                f"Only what is sharded can be offloaded; got {part}.device={place!r} with "
                f"zero_optimization.stage={stage}. Use stage {least} or higher, or device 'none'."
            )


def formats_of(config: HfDeepSpeedConfig) -> list[str]:
    """Return the 16-bit formats that the configuration switches on."""
    return [name for name in _FORMATS if config.get_value(f"{name}.enabled") not in (None, False, "auto")]


def refuse_format(config: HfDeepSpeedConfig, name: str) -> None:
    """Refuse a configuration that says another precision than the run."""
    wrong = [f"{each}.enabled=true" for each in formats_of(config) if each != name]
    if name in _FORMATS and config.is_false(f"{name}.enabled"):
        wrong.append(f"{name}.enabled=false")
    if wrong:
        raise ConfigurationError(
            f"The run and the DeepSpeed configuration need the same precision; got mixed_precision={name!r} and "
            f"{wrong[0]}. Set {wrong[0].partition('=')[0]} to 'auto', or leave mixed_precision out."
        )


def refuse_stand_ins(config: dict[str, Any], optimizer: object, schedule: object) -> None:
    """Refuse an optimizer or schedule that is defined twice or not at all."""
    for given, kind, stand_in in ((optimizer, "optimizer", DummyOptim), (schedule, "scheduler", DummyScheduler)):
        stands_in = isinstance(given, stand_in)
        if given is not None and not stands_in and kind in config:
            raise PreparationError(
                f"The {kind} is defined twice; got {type(given).__name__} in the script and "
                f"{config[kind].get('type')} in the DeepSpeed configuration. Pass {stand_in.__name__}, or remove "
                f"'{kind}' from the configuration."
            )
        # Then no section is needed.
        makes_itself = isinstance(given, DummyScheduler) and given.lr_scheduler_callable is not None
        if stands_in and kind not in config and not makes_itself:
            raise PreparationError(
                f"{stand_in.__name__} takes the place of the {kind} in the DeepSpeed configuration; got one "
                f"without '{kind}', only {sorted(config)}. Add it there, or pass a real one."
            )


def _micro_batch(
    config: dict[str, Any], sizes: Sequence[int | None], chosen: Callable[[Sequence[int]], int]
) -> int | None:
    """Return the batch size of this rank; `None` where the configuration gives only the total."""
    size = config.get(_MICRO)
    known = [each for each in sizes if each is not None]
    if isinstance(size, int):
        if known and size not in known:
            raise ConfigurationError(
                f"Loaders need the batch size of the configuration; got {_MICRO}={size} and loaders of "
                f"{', '.join(map(str, known))}. Set {_MICRO} to 'auto'."
            )
        return size
    if size is None:
        return None
    if not known or len(known) < len(sizes):
        raise ConfigurationError(
            f"{_MICRO} is 'auto' and is taken from the loaders; got {len(sizes)} loaders, {len(known)} of them with a "
            "batch_size. Pass a DataLoader to the same prepare(), or write a number into the configuration: "
            f"accelerator.deepspeed_plugin.deepspeed_config['{_MICRO}'] = 8."
        )
    return chosen(known)


def _sizes_of(model: torch.nn.Module) -> dict[str, int]:
    """Return the buffer sizes that depend on the hidden size of a model."""
    config = getattr(model, "config", None)
    sources = [config, getattr(config, "text_config", None)]
    widths = [getattr(source, "hidden_size", None) for source in sources]
    # Models with several widths: a buffer has to hold the largest layer.
    widths += [max(found) for source in sources if (found := getattr(source, "hidden_sizes", None))]
    width = next((each for each in widths if isinstance(each, int)), None)
    if width is None:
        raise ConfigurationError(
            f"{', '.join(_OF_MODEL)} are derived from the hidden size of the model if they are 'auto'; got "
            f"{type(model).__name__} without config.hidden_size or config.hidden_sizes. Write numbers into the "
            "configuration."
        )
    found = (width * width, int(0.9 * width * width), 10 * width)  # the formulas that transformers and Accelerate use
    return {f"zero_optimization.{key}": size for key, size in zip(_OF_MODEL, found, strict=True)}
