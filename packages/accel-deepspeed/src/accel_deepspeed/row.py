"""The row by which accel knows DeepSpeed; imports nothing of DeepSpeed."""

from accel_core.options.engines import Engine

_OLDEST = "0.19.8"
"""The first version whose steps are those of one process in every stage: 0.19.6 makes others in stage 3."""

ENGINE = Engine(
    "deepspeed",
    "DeepSpeed",
    "deepspeed",
    _OLDEST,
    "ninja",
    strategy="accel_deepspeed.strategy:DeepSpeedStrategy",
    plugin="accel_deepspeed.plugin:DeepSpeedPlugin",
    argument="deepspeed_plugin",
    flag="ACCELERATE_USE_DEEPSPEED",
    containers=("deepspeed.runtime.engine:DeepSpeedEngine",),
    label="DEEPSPEED",
    labels_process=True,
    switch="use_deepspeed",
    excludes=("use_fsdp", "use_megatron_lm"),
    options="accel_deepspeed.options:DeepSpeedOptions",
    settings="accel_deepspeed.launching.settings:SETTINGS",
    questions="accel_deepspeed.launching.questions:questions",
    checks="accel_deepspeed.launching.file:check",
    decides="accel_deepspeed.launching.file:values_from_file",
    environment="accel_deepspeed.launching.file:environment",
    batch="accel_deepspeed.launching.file:batch",
    launcher="accel_deepspeed.launching.launcher:DeepSpeedLauncher",
    merges="accel_deepspeed.zero_folder:reader_of",
)
SEQUENCES = Engine("sp", "sequence parallel (Ulysses)", "deepspeed", _OLDEST, "ninja einops")
