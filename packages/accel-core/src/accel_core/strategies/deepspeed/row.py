"""DeepSpeed as every part of accel knows it; imports nothing of it."""

from accel_core.options.engines import Engine

__all__ = ["ENGINE", "SEQUENCES"]

_OLDEST = "0.18.2"
"""The first that accumulates gradients as a run asks for it."""

ENGINE = Engine(
    "deepspeed",
    "DeepSpeed",
    "deepspeed",
    _OLDEST,
    "ninja",
    strategy="accel_core.strategies.deepspeed.strategy:DeepSpeedStrategy",
    plugin="accel_core.plugins.deepspeed:DeepSpeedPlugin",
    argument="deepspeed_plugin",
    flag="ACCELERATE_USE_DEEPSPEED",
    containers=("deepspeed.runtime.engine:DeepSpeedEngine",),
    label="DEEPSPEED",
    labels_process=True,
    switch="use_deepspeed",
    excludes=("use_fsdp", "use_megatron_lm"),
    options="accel_core.options.deepspeed:DeepSpeedOptions",
    settings="accel_launch.settings.deepspeed:SETTINGS",
    questions="accel_launch.questions.deepspeed:questions",
    checks="accel_launch.settings.deepspeed_file:check",
    decides="accel_launch.settings.deepspeed_file:values_from_file",
    environment="accel_launch.settings.deepspeed_file:environment",
    batch="accel_launch.settings.deepspeed_file:batch",
    launcher="accel_launch.launchers.deepspeed:DeepSpeedLauncher",
)
SEQUENCES = Engine("sp", "sequence parallel (Ulysses)", "deepspeed", _OLDEST, "ninja einops")
