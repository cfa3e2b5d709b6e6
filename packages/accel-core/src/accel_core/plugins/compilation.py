"""How models are compiled."""

from __future__ import annotations

from typing import Any

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_core.options.compilation import CompilationOptions
from accel_core.options.enums import DynamoBackend, meant
from accel_core.options.option import option_named, options_of
from accel_core.plugins.handlers import KwargsHandler


@record
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile`; a field left at `None` is read from ACCELERATE_DYNAMO_*.

    Args:
        backend: The compiler, by name in any case or as a `DynamoBackend`.
        mode: "default", "reduce-overhead", "max-autotune", or another of torch's.
        fullgraph: Fail rather than break the model into several graphs.
        dynamic: Compile for shapes that change; `None` lets torch find out.
        options: Options of the compiler.
        disable: Make `torch.compile` do nothing.
        use_regional_compilation: Compile repeated blocks once, instead of the whole model.

    Raises:
        ConfigurationError: The backend or the mode is unknown, or an environment variable cannot be read.
        UnsupportedTypeError: A text stands where true or false belongs.

    Examples:
        >>> plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        >>> accelerator = Accelerator(dynamo_plugin=plugin)
    """

    backend: DynamoBackend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        """Fill what is left open from the environment, then from the defaults."""
        for option in options_of(CompilationOptions):
            if getattr(self, option.field) is None:
                setattr(self, option.field, option.read())
        super().__post_init__()
        option_named(CompilationOptions, "mode").check(self.mode, "the argument mode")
        name = str(self.backend).upper()
        if name not in DynamoBackend:
            import torch

            here = ["no", *(word for word in torch.compiler.list_backends(()) if word.upper() in DynamoBackend)]
            raise ConfigurationError(
                f"The compiler is not known; got {self.backend!r}.{meant(self.backend, here)} Use one of {here}."
            )
        self.backend = DynamoBackend(name)

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of all fields, with the backend under torch's name."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from the defaults."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}

    def _unset(self) -> dict[str, Any]:
        unset = {option.field: option.default for option in options_of(CompilationOptions)}
        return {**unset, "backend": DynamoBackend.NO.value.lower(), "options": None, "disable": False}
