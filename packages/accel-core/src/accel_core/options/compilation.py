"""Options of `torch.compile`."""

from typing import ClassVar

from accel_core._records import record
from accel_core.options.enums import DynamoBackend
from accel_core.options.option import Prompt, boolean, option, upper

TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]


@record(frozen=True)
class CompilationOptions:
    """How models are compiled."""

    option_prefix: ClassVar[str] = "dynamo_"
    environment_prefix: ClassVar[str] = "ACCELERATE_"

    backend: str = option(
        "NO",
        "Compiler behind torch.compile; NO leaves the model uncompiled.",
        parser=upper,
        choices=tuple(DynamoBackend.list()),
        launch_default=None,
        launch_choices=tuple(backend.lower() for backend in DynamoBackend.list()),
        launch_text=upper,
        always=True,
        prompt=Prompt("inductor"),
    )
    mode: str = option(
        "default",
        "Optimization mode of torch.compile.",
        choices=(*TORCH_DYNAMO_MODES, "max-autotune-no-cudagraphs", "lite"),
        launch_choices=tuple(TORCH_DYNAMO_MODES),
        prompt=Prompt(),
    )
    use_fullgraph: bool = option(
        False, "Fail rather than break the model into several graphs.", switch=True, prompt=Prompt(), field="fullgraph"
    )
    use_dynamic: bool | None = option(
        None,
        "Compile for varying shapes; if unset, torch decides.",
        parser=boolean,
        switch=True,
        launch_default=False,
        prompt=Prompt(),
        field="dynamic",
    )
    use_regional_compilation: bool = option(
        False, "Compile repeated blocks once, instead of the whole model.", switch=True, prompt=Prompt()
    )
