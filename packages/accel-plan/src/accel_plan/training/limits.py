"""The options of DeepSpeed's stage 3 that change how much it gathers and steps on at once."""

from collections.abc import Mapping

from accel_core._records import record
from accel_core.errors import ConfigurationError

__all__ = ["ZeroLimits"]

_OPTIONS = {
    "stage3_param_persistence_threshold": "kept",
    "stage3_prefetch_bucket_size": "ahead",
    "stage3_max_live_parameters": "alive",
    "stage3_max_reuse_distance": "soon",
    "sub_group_size": "group",
}


@record(frozen=True)
class ZeroLimits:
    """What DeepSpeed's options say of stage 3, in elements; the defaults are its own.

    Attributes:
        kept: Parameters of at most so many stay gathered between steps (`stage3_param_persistence_threshold`).
        ahead: So many are gathered for modules that run next (`stage3_prefetch_bucket_size`).
        alive: With so many gathered, none are gathered ahead (`stage3_max_live_parameters`).
        soon: What is used again before modules used so many others is not dropped (`stage3_max_reuse_distance`).
        group: The optimizer steps on parts of so many at once (`sub_group_size`).
    """

    kept: int = 100_000
    ahead: int = 50_000_000
    alive: int = 1_000_000_000
    soon: int = 1_000_000_000
    group: int = 1_000_000_000

    def __post_init__(self) -> None:
        """Refuse what no option can be."""
        wrong = [f"{key}={getattr(self, field)}" for key, field in _OPTIONS.items() if getattr(self, field) < 0]
        if wrong:
            raise ConfigurationError(
                f"DeepSpeed's options of stage 3 are counts of elements; got {', '.join(wrong)}. Use 0 or more."
            )

    @classmethod
    def written(cls, options: Mapping[str, int]) -> "ZeroLimits":
        """Return the limits that options of DeepSpeed's configuration set."""
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise ConfigurationError(
                f"Memory of stage 3 depends on {', '.join(_OPTIONS)}; got {', '.join(unknown)}. Use those."
            )
        return cls(**{_OPTIONS[key]: value for key, value in options.items()})
