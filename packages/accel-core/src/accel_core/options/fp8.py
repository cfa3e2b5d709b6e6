"""Options of training in 8-bit floating point."""

from typing import ClassVar

from accel_core._records import record
from accel_core.options.option import Prompt, one_or_zero, option, upper

FP8_FORMATS = ("HYBRID", "E4M3", "E5M2")
FP8_ALGORITHMS = ("max", "most_recent")
MSAMP_LEVELS = ("O1", "O2")


def _as_number(value: object) -> str:
    return str(one_or_zero(str(value)))


@record(frozen=True)
class Fp8Options:
    """Which library computes in 8 bits, and how it scales."""

    option_prefix: ClassVar[str] = "fp8_"
    environment_prefix: ClassVar[str] = "ACCELERATE_"

    backend: str | None = option(
        None,
        "Library for training in 8 bits.",
        parser=upper,
        choices=("AO", "TE", "MSAMP"),
        launch_choices=("ao", "te", "msamp"),
        prompt=Prompt("ao"),
    )
    use_autocast_during_eval: bool = option(False, "Whether evaluation computes in 8 bits as well.", switch=True)
    margin: int = option(0, "Margin of the scaling factor, as a power of two.")
    interval: int = option(1, "Steps between two computations of the scaling factor.")
    format: str = option(
        "HYBRID",
        "Number format: E4M3 or E5M2 in both passes, or HYBRID for E4M3 forward and E5M2 backward.",
        parser=upper,
        choices=FP8_FORMATS,
        prompt=Prompt(),
        field="fp8_format",
    )
    amax_history_len: int = option(1024, "Number of steps whose largest values are kept.")
    amax_compute_algo: str = option(
        "most_recent", "How the scaling factor is computed from the kept values.", choices=FP8_ALGORITHMS
    )
    override_fprop: bool = option(False, "Whether forward products use higher precision.")
    override_dgrad: bool = option(False, "Whether gradients of inputs use higher precision.")
    override_wgrad: bool = option(False, "Whether gradients of weights use higher precision.")
    use_mxfp8_block_scaling: bool = option(False, "Whether every block of 32 values has its own scale.", switch=True)
    opt_level: str = option(
        "O2", "What MS-AMP keeps in 8 bits: O1 gradients, O2 optimizer states as well.", choices=MSAMP_LEVELS
    )
    enable_fsdp_float8_all_gather: bool = option(
        True,
        "Whether torchao gathers sharded weights in 8 bits.",
        launch_parser=one_or_zero,
        launch_default="true",
        launch_text=_as_number,
    )
    pad_inner_dim: bool = option(
        True,
        "Whether torchao pads inner dims to a multiple of 16.",
        launch_parser=one_or_zero,
        launch_default="true",
        launch_text=_as_number,
    )
