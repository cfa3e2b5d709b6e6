"""How DeepSpeed shards a run, from fields or from DeepSpeed's own configuration."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from accel_core._records import record
from accel_core.errors import ConfigurationError, StateError
from accel_core.host import availability, environ
from accel_core.options.fp8 import Fp8Options
from accel_core.options.option import option_named
from accel_core.plugins.blocks import get_module_class_from_name
from accel_deepspeed.configuration import fill, fill_all, set_number_format
from accel_deepspeed.options import PLACES, DeepSpeedOptions
from accel_deepspeed.plugin_config import HfDeepSpeedConfig
from accel_deepspeed.row import ENGINE
from accel_deepspeed.stand_ins import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DeepSpeedPlugin", "DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"]


@record
class DeepSpeedPlugin:
    """Arguments of DeepSpeed; a field left at `None` is read from ACCELERATE_DEEPSPEED_*.

    Args:
        hf_ds_config: DeepSpeed's own configuration: a dict, a path, text, or a `HfDeepSpeedConfig`.
            It takes precedence over the fields below, which fill its "auto" values.
        gradient_accumulation_steps: Number of batches per optimizer step, or "auto".
        gradient_clipping: Gradient norm to clip to, or "auto"; 0 turns clipping off.
        zero_stage: What is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        is_train_batch_min: Whether the run uses the smallest batch size of several loaders; otherwise the largest.
        offload_optimizer_device: Where optimizer states live outside the device: "none", "cpu" or "nvme".
        offload_param_device: The same for parameters; stage 3 only.
        offload_optimizer_nvme_path: Folder for optimizer states that are offloaded to NVMe.
        offload_param_nvme_path: Folder for parameters that are offloaded to NVMe.
        zero3_init_flag: Whether models are sharded while they are built; only in stage 3, where it is the default.
        zero3_save_16bit_model: Whether stage 3 gathers 16-bit weights when a model is saved.
        transformer_moe_cls_names: Class names of mixture-of-experts layers, separated by commas.
        enable_msamp: Whether MS-AMP computes in 8 bits.
        msamp_opt_level: "O1" or "O2".

    Attributes:
        deepspeed_config: The configuration as DeepSpeed gets it.

    Raises:
        ConfigurationError: A value is unknown, or values contradict each other.

    Examples:
        >>> plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0)
        >>> plugin.deepspeed_config["zero_optimization"]["stage"]
        2
        >>> accelerator = Accelerator(deepspeed_plugin=plugin)  # doctest: +SKIP
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        """Fill what is left open, read or make the configuration, and check it."""
        self._selected = False
        self._fill_fields()
        if self.hf_ds_config is None:
            self.hf_ds_config = HfDeepSpeedConfig(self._described())
        else:
            self._read_config()
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = math.inf
        if self.zero3_init_flag is None:
            self.zero3_init_flag = self.hf_ds_config.is_zero3()
        elif self.zero3_init_flag and not self.hf_ds_config.is_zero3():
            warnings.warn(
                "Models are sharded while they are built in ZeRO stage 3 only; zero3_init_flag is set to False.",
                stacklevel=3,
            )
            self.zero3_init_flag = False
        self._set_msamp()

    def _fill_fields(self) -> None:
        if self.hf_ds_config is None:
            path = option_named(DeepSpeedOptions, "hf_ds_config").read()
            self.hf_ds_config = None if path in (None, "none") else path
        for field in (*PLACES, "zero3_init_flag"):
            option = option_named(DeepSpeedOptions, field)
            if getattr(self, field) is None:
                setattr(self, field, option.read())
        self.zero_stage = option_named(DeepSpeedOptions, "zero_stage").parse(
            str(self.zero_stage), "the argument zero_stage"
        )
        for field in ("offload_optimizer_device", "offload_param_device"):
            option_named(DeepSpeedOptions, field).check(getattr(self, field), f"the argument {field}")
        if self.transformer_moe_cls_names is None:
            named = option_named(DeepSpeedOptions, "transformer_moe_cls_names").read()
            self.transformer_moe_cls_names = None if named is None else ",".join(named)
        if self.enable_msamp is None:
            self.enable_msamp = option_named(Fp8Options, "backend").read() == "MSAMP"
        if self.msamp_opt_level is None:
            level = option_named(Fp8Options, "opt_level")
            self.msamp_opt_level = level.read() if self.enable_msamp and environ.text(level.environment) else "O1"

    def _described(self) -> dict[str, Any]:
        """Return the configuration that the fields describe."""

        def place(device: str | None, path: str | None) -> dict[str, Any]:
            return {"device": device, "nvme_path": path if device == "nvme" else None}

        return {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            # Always present: without the key, DeepSpeed clips to a norm of 1.
            "gradient_clipping": self.gradient_clipping or 0.0,
            "zero_optimization": {
                "stage": self.zero_stage,
                "offload_optimizer": place(self.offload_optimizer_device, self.offload_optimizer_nvme_path),
                "offload_param": place(self.offload_param_device, self.offload_param_nvme_path),
                "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
            },
        }

    def _read_config(self) -> None:
        self._refuse_fields_beside_a_file()
        given = self.hf_ds_config
        found = given if isinstance(given, HfDeepSpeedConfig) else HfDeepSpeedConfig(given)
        self.hf_ds_config = found
        config = found.config
        if "zero_optimization" not in config:
            raise ConfigurationError(
                f"A DeepSpeed configuration needs the key 'zero_optimization'; got {sorted(config)}. "
                'Add it, for example {"zero_optimization": {"stage": 2}}.'
            )
        for field, key in PLACES.items():
            node, last = found.find_config_node(key)
            value = None if node is None else node.get(last)
            if node is not None and value == "auto":
                node[last] = getattr(self, field)
            elif value is not None:
                setattr(self, field, value)
        found.set_stage_and_offload()

    def _refuse_fields_beside_a_file(self) -> None:
        """Refuse options that the launcher set beside a DeepSpeed file, where they would have no effect."""
        given = [field for field in (environ.text("ACCELERATE_CONFIG_DS_FIELDS") or "").split(",") if field]
        both = [field for field in given if field in (*PLACES, "mixed_precision")]
        if "deepspeed_config_file" in given and both:
            raise ConfigurationError(
                f"A DeepSpeed file replaces these options, which would be ignored; got {both}. Take them out of the "
                "configuration or the command line, or leave the DeepSpeed file out."
            )

    def _set_msamp(self) -> None:
        if not self.enable_msamp:
            return
        if self.hf_ds_config.is_zero3():
            raise ConfigurationError(
                "MS-AMP cannot compute with sharded parameters; got zero_stage=3. Use stage 0, 1 or 2, or set "
                "enable_msamp=False."
            )
        self.deepspeed_config.setdefault("msamp", {"enabled": True, "opt_level": self.msamp_opt_level})

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return the value of a dotted key of the configuration, or `default`.

        Args:
            ds_key_long: The key, such as `zero_optimization.stage`.
            default: What is returned where the configuration does not have the key.
        """
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a dotted key exists and its value is "auto".

        Args:
            ds_key_long: The key, such as `train_batch_size`.
        """
        return bool(self.get_value(ds_key_long) == "auto")

    def fill_match(
        self,
        ds_key_long: str,
        mismatches: list[str] | None = None,
        must_match: bool = True,
        **kwargs: object,
    ) -> None:
        """Fill a key whose value is "auto", or compare one that is set; see `configuration.fill`.

        Args:
            ds_key_long: A dotted key; nothing happens if it is missing.
            mismatches: Where a difference is noted.
            must_match: Whether a difference is noted.
            **kwargs: Values by dotted key.

        Raises:
            ConfigurationError: The value is "auto", and none is given.
        """
        noted = fill(self.hf_ds_config, ds_key_long, kwargs)
        if must_match and mismatches is not None:
            mismatches += noted

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: object,
    ) -> None:
        """Fill every "auto" value of the configuration, and compare the others with what the run uses.

        Args:
            prefix: Dotted key of `config`, ending in a dot, where it is a part of the configuration.
            mismatches: Where differences are noted.
            config: A part of the configuration; all of it where `None`.
            must_match: Whether differences are errors.
            **kwargs: Values by dotted key.

        Raises:
            ConfigurationError: No value is given for an "auto", or values differ.
        """
        notes: list[str] = [] if mismatches is None else mismatches
        noted = fill_all(self.hf_ds_config, self.deepspeed_config if config is None else config, kwargs, prefix)
        notes += noted if must_match else []
        if notes and not prefix:
            listed = "\n".join(notes)
            raise ConfigurationError(
                f"The DeepSpeed configuration and the run contradict each other; got\n{listed}\nSet these keys of the "
                "configuration to 'auto'."
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write the run's number format into the configuration, and compare it with what is there.

        Args:
            mixed_precision: "no", "fp16", "bf16" or "fp8".

        Raises:
            ConfigurationError: The configuration switches another format on.
        """
        set_number_format(self.hf_ds_config, mixed_precision)

    @property
    def selected(self) -> bool:
        """Whether this is the plugin in use, of several."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this the plugin in use; called by the state, which unselects the others.

        Raises:
            StateError: Called by anything else.
        """
        if not _from_accelerator_state:
            raise StateError(
                "Only the state selects a plugin, because it unselects the others; got a direct call. "
                "Call `accelerator.state.select_deepspeed_plugin(name)`."
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False

    def is_zero3_init_enabled(self) -> bool:
        """Return whether models are sharded while they are built."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Return a context in which models are, or are not, sharded while they are built.

        Args:
            enable: Whether they are.
        """
        before = self.zero3_init_flag
        self._switch_zero3_init(enable)
        try:
            yield
        finally:
            self._switch_zero3_init(before)

    def _switch_zero3_init(self, flag: bool | None) -> None:
        self.zero3_init_flag = flag
        self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Tell transformers, where it and DeepSpeed are installed, which configuration its models are built for.

        Batch sizes that are still to be filled are set to 1 in the copy that transformers gets: it needs numbers
        there to build a model, not to train it.
        """
        if not (availability.is_transformers_available() and availability.is_deepspeed_available()):
            return
        if not self.zero3_init_flag and self.hf_ds_config.is_zero3():
            config = {**self.deepspeed_config, "zero_optimization": {**self.deepspeed_config["zero_optimization"]}}
            config["zero_optimization"]["stage"] = 0
        else:
            config = dict(self.deepspeed_config)
        for key, value in (("gradient_accumulation_steps", 1), ("train_micro_batch_size_per_gpu", 1)):
            if config.get(key, "auto") == "auto":
                config[key] = value
        if config.get("train_batch_size", "auto") == "auto":
            config.pop("train_batch_size", None)
        integration = importlib.import_module("transformers.integrations.deepspeed")
        self.dschf = integration.HfDeepSpeedConfig(config)

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Tell DeepSpeed which layers route tokens to experts, so that it gathers each as a whole in stage 3.

        Args:
            model: The model that will be sharded.

        Raises:
            ConfigurationError: A named class does not occur in the model.
            MissingDependencyError: DeepSpeed is not installed.
        """
        names = [name.strip() for name in (self.transformer_moe_cls_names or "").split(",") if name.strip()]
        if not names:
            return
        classes = []
        for name in names:
            found = get_module_class_from_name(model, name)
            if found is None:
                raise ConfigurationError(
                    f"A mixture-of-experts class does not occur in the model; got {name!r}. "
                    "Correct transformer_moe_cls_names."
                )
            classes.append(found)
        ENGINE.require()
        importlib.import_module("deepspeed.utils").set_z3_leaf_modules(model, classes)
