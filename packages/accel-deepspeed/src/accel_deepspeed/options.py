"""Options of DeepSpeed."""

from typing import ClassVar

from accel_core._records import record
from accel_core.options.option import Prompt, boolean, names, number_or_auto, option

OFFLOAD_DEVICES = ("none", "cpu", "nvme")
PLACES = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Where DeepSpeed's file has the values that are also options."""
_IN_OPTIONS = (("own_deepspeed_file", "no"),)


@record(frozen=True)
class DeepSpeedOptions:
    """What DeepSpeed shards and where it keeps it."""

    environment_prefix: ClassVar[str] = "ACCELERATE_DEEPSPEED_"

    deepspeed_config_file: str | None = option(
        None,
        "JSON file that configures DeepSpeed in place of the options below.",
        environment="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        field="hf_ds_config",
        prompt=Prompt(when=(("own_deepspeed_file", "yes"),)),
    )
    zero_stage: int = option(
        2,
        "What is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.",
        choices=(0, 1, 2, 3),
        prompt=Prompt("2", when=_IN_OPTIONS),
    )
    offload_optimizer_device: str = option(
        "none",
        "Where optimizer states live outside the device.",
        choices=OFFLOAD_DEVICES,
        prompt=Prompt("none", when=_IN_OPTIONS),
    )
    offload_param_device: str = option(
        "none",
        "Where parameters live outside the device; stage 3 only.",
        choices=OFFLOAD_DEVICES,
        prompt=Prompt("none", when=_IN_OPTIONS),
    )
    gradient_accumulation_steps: int | str = option(
        "auto",
        "Number of batches per optimizer step.",
        parser=number_or_auto(int),
        environment="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        launch_parser=int,
        prompt=Prompt("1", when=_IN_OPTIONS, text="Batches per optimizer step?"),
    )
    gradient_clipping: float | str = option(
        "auto",
        "Gradient norm to clip to; 0 turns clipping off.",
        parser=number_or_auto(float),
        environment="ACCELERATE_GRADIENT_CLIPPING",
        launch_parser=float,
        prompt=Prompt(None, when=_IN_OPTIONS, text="Clip gradients to which norm? (empty: no clipping)", optional=True),
    )
    zero3_save_16bit_model: bool = option(
        False, "Whether stage 3 gathers 16-bit weights when a model is saved.", prompt=Prompt("no", when=_IN_OPTIONS)
    )
    zero3_init_flag: bool | None = option(
        None,
        "Whether models are sharded while they are built; if unset, only in stage 3.",
        parser=boolean,
        environment="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        prompt=Prompt("no"),
    )
    offload_optimizer_nvme_path: str = option(
        "none",
        "Folder for optimizer states that are offloaded to NVMe.",
        prompt=Prompt(when=(("own_deepspeed_file", "no"), ("offload_optimizer_device", "nvme"))),
    )
    offload_param_nvme_path: str = option(
        "none",
        "Folder for parameters that are offloaded to NVMe.",
        prompt=Prompt(when=(("own_deepspeed_file", "no"), ("offload_param_device", "nvme"))),
    )
    deepspeed_moe_layer_cls_names: tuple[str, ...] | None = option(
        None,
        "Class names of mixture-of-experts layers, comma-separated.",
        parser=names,
        environment="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        field="transformer_moe_cls_names",
        prompt=Prompt(optional=True),
    )
