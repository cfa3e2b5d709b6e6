"""Every setting of `accel launch`, in one table.

The rows of the engines come from their option tables, which the training side uses too. A row there describes its
option completely.
"""

from collections.abc import Callable, Iterator

from accel_core.options.compilation import CompilationOptions
from accel_core.options.engines import PUBLIC, Engine, engines, load
from accel_core.options.fp8 import Fp8Options
from accel_core.options.option import Option, boolean, names, options_of
from accel_core.options.parallelism import ParallelismOptions
from accel_launch.settings.model import HARDWARE, LAUNCH, Setting, switch
from accel_launch.settings.rules import COUNT


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
    usual = option.default if keep else None
    default = option.launch_default if option.has_launch_default else usual
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
    topic: str, engine: str, table: type, section: str, *, keep: bool = False, prefix: str = "", left_out: str = ""
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
        if not left_out or not option.name.startswith(left_out)
    )


def _of_engine(engine: Engine) -> tuple[Setting, ...]:
    """Make the settings of an engine that a package announced."""
    section = f"{engine.switch.removeprefix('use_')}_config"
    options = _rows(engine.title, engine.name, load(engine.options), section) if engine.options else ()
    return (*options, *(load(engine.settings) if engine.settings else ()))


def _switches() -> Iterator[Setting]:
    """Make the switches of the engines, and those of Accelerate's whose packages are not installed."""
    known = {
        f"use_{public.word}": (f"{public.title}; needs {public.package}", f"ACCELERATE_USE_{public.word.upper()}")
        for public in PUBLIC
        if public.files
    }
    known |= {engine.switch: (engine.title, engine.flag) for engine in engines().values() if engine.switch}
    for key, (title, variable) in known.items():
        yield switch(key, HARDWARE, f"Train with {title}.", environment=variable)


ENGINES: tuple[Setting, ...] = (
    *_rows("Compilation", "dynamo", CompilationOptions, "dynamo_config", keep=True),
    *(setting for engine in engines().values() for setting in _of_engine(engine)),
    *_rows("Mesh of several axes", "parallelism", ParallelismOptions, "parallelism_config", keep=True),
    *_rows("FP8", "fp8", Fp8Options, "fp8_config", keep=True, prefix="fp8_", left_out="fp8_override_"),
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

_TOGETHER = (
    *LAUNCH,
    *_switches(),
    *(setting for setting in ENGINES if setting.key not in {known.key for known in LAUNCH}),
)
_TOPICS = list(dict.fromkeys(setting.topic for setting in _TOGETHER))

ALL: tuple[Setting, ...] = tuple(sorted(_TOGETHER, key=lambda setting: _TOPICS.index(setting.topic)))
"""All settings; a key may have a second row for the flag that turns it off."""

BY_KEY: dict[str, Setting] = {}
for _row in ALL:
    BY_KEY.setdefault(_row.key, _row)

BY_PATH: dict[tuple[str, ...], Setting] = {setting.path: setting for setting in BY_KEY.values() if setting.path}
"""Settings by the keys that lead to them in a configuration file."""
