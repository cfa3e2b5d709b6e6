"""Every setting of `accel launch`, in one table.

The rows of the training engines come from accel-core's option tables, which the training side uses too. A row there
describes its option completely.
"""

from collections.abc import Callable, Iterable

from accel_core.options.compilation import CompilationOptions
from accel_core.options.deepspeed import DEEPSPEED_MULTINODE_LAUNCHERS, DeepSpeedOptions
from accel_core.options.fp8 import Fp8Options
from accel_core.options.fsdp import FsdpOptions
from accel_core.options.megatron import MegatronOptions
from accel_core.options.option import Option, boolean, names, options_of
from accel_core.options.parallelism import ParallelismOptions
from accel_launch.settings.model import LAUNCH, Setting
from accel_launch.settings.rules import COUNT

__all__ = ["ALL", "BY_KEY", "BY_PATH", "ENGINES"]


def _checked(option: Option) -> Callable[[str], str]:
    """Return a parser that checks text against an option and keeps it as text, truth values in lower case."""

    def parse(text: str) -> str:
        value = option.parser(text)
        if isinstance(value, bool):
            return text.strip().lower()
        spelled = isinstance(value, str) and option.choices and not option.launch_choices
        return value.strip() if spelled else text.strip()

    return parse


def _triple(text: str) -> tuple[int, int, int]:
    words = names(text.strip("()[] "))
    if len(words) != 3:
        raise ValueError("three comma-separated yes-or-no values are needed")
    first, second, third = (int(boolean(part)) for part in words)
    return first, second, third


def _setting(option: Option, topic: str, engine: str, path: tuple[str, str], *, keep: bool) -> Setting:
    parse = option.launch_parser or (option.parser if option.parser in (int, float) else _checked(option))
    if option.has_launch_default:
        default = option.launch_default
    else:
        default = option.default if keep else None
    plain = option.choices if parse in (int, float) else tuple(map(str, option.choices))
    return Setting(
        key=option.name,
        topic=topic,
        help=option.help,
        parse=boolean if option.switch else parse,
        default=False if option.switch else default,
        choices=option.launch_choices or plain,
        kind="switch" if option.switch else "value",
        path=path,
        environment=option.environment,
        engine=engine,
        option=option,
        rule=COUNT if engine == "parallelism" and option.parser is int and option.name.endswith("_size") else None,
    )


def _rows(
    topic: str,
    engine: str,
    table: type,
    section: str,
    *,
    keep: bool = False,
    prefix: str = "",
    leave_out: Iterable[str] = (),
) -> tuple[Setting, ...]:
    """Make the settings of one engine."""
    return tuple(
        _setting(
            option,
            topic,
            engine,
            (section, option.name if option.name == "fp8_format" else option.name.removeprefix(prefix)),
            keep=keep,
        )
        for option in options_of(table)
        if option.name not in leave_out
    )


def _deepspeed_launcher(key: str, help: str, choices: tuple[str, ...] = ()) -> Setting:
    return Setting(
        key, "DeepSpeed", help, choices=choices, path=("deepspeed_config", key), environment=f"ACCEL_{key.upper()}"
    )


ENGINES: tuple[Setting, ...] = (
    *_rows("Compilation", "dynamo", CompilationOptions, "dynamo_config", keep=True),
    *_rows("DeepSpeed", "deepspeed", DeepSpeedOptions, "deepspeed_config"),
    _deepspeed_launcher("deepspeed_hostfile", "File that lists hosts and their slots, for a run on several machines."),
    _deepspeed_launcher("deepspeed_exclusion_filter", "Hosts and slots to leave out."),
    _deepspeed_launcher("deepspeed_inclusion_filter", "Hosts and slots to use, and no others."),
    _deepspeed_launcher(
        "deepspeed_multinode_launcher",
        "How DeepSpeed starts processes on other machines.",
        tuple(DEEPSPEED_MULTINODE_LAUNCHERS),
    ),
    *_rows("FSDP", "fsdp", FsdpOptions, "fsdp_config"),
    *_rows("Megatron-LM", "megatron", MegatronOptions, "megatron_lm_config"),
    *_rows("Mesh of several axes", "parallelism", ParallelismOptions, "parallelism_config", keep=True),
    *_rows(
        "FP8",
        "fp8",
        Fp8Options,
        "fp8_config",
        keep=True,
        prefix="fp8_",
        leave_out=("fp8_override_fprop", "fp8_override_dgrad", "fp8_override_wgrad"),
    ),
    Setting(
        "fp8_override_linear_precision",
        "FP8",
        "Whether forward, input-gradient and weight-gradient products use higher precision: three yes-or-no values.",
        _triple,
        (False, False, False),
        path=("fp8_config", "override_linear_precision"),
        environment="ACCEL_FP8_OVERRIDE_LINEAR_PRECISION",
    ),
)
"""Settings of the engines, in the order of the help."""

ALL: tuple[Setting, ...] = (
    *LAUNCH,
    *(setting for setting in ENGINES if setting.key not in {known.key for known in LAUNCH}),
)
"""All settings; a key may have a second row for the flag that turns it off."""

BY_KEY: dict[str, Setting] = {}
for _row in ALL:
    BY_KEY.setdefault(_row.key, _row)

BY_PATH: dict[tuple[str, ...], Setting] = {setting.path: setting for setting in BY_KEY.values() if setting.path}
"""Settings by the keys that lead to them in a configuration file."""
