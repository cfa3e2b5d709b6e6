"""Gives the wheel a `Home-page`, a field of metadata that hatchling does not write and libraries look at."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilderConfig

HOME_PAGE = "https://accel.invalid/in-place-of/huggingface/accelerate"
"""Nobody's address, as this distribution has no site; it ends in what the distribution stands in for."""


class HomePage(BuildHookInterface[WheelBuilderConfig]):
    """Adds the field to what hatchling writes, behind the version that begins every file of metadata."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Let the build write the field too.

        Args:
            version: Kind of the wheel, "standard" or "editable".
            build_data: What hooks may change; not used.
        """
        config = self.build_config
        write = config.core_metadata_constructor

        def with_home_page(*args: Any, **kwargs: Any) -> str:
            first, rest = write(*args, **kwargs).split("\n", 1)
            return f"{first}\nHome-page: {HOME_PAGE}\n{rest}"

        members = {"core_metadata_constructor": property(lambda _: with_home_page)}
        config.__class__ = type("WithHomePage", (type(config),), members)
