"""Precedence: argument > command line > environment > file > default, for every option of every table."""

import importlib
import pkgutil
from dataclasses import is_dataclass
from typing import Any

import pytest

import accel_core.options
from accel_core.errors import ConfigurationError
from accel_core.options.compilation import CompilationOptions
from accel_core.options.option import Option, options_of
from accel_core.options.resolve import Source, environment_of, resolve


def _tables() -> list[type]:
    tables = []
    for module in pkgutil.iter_modules(accel_core.options.__path__):
        loaded = importlib.import_module(f"accel_core.options.{module.name}")
        tables += [
            value
            for value in vars(loaded).values()
            if isinstance(value, type)
            and is_dataclass(value)
            and value.__name__.endswith("Options")
            and value.__module__ == loaded.__name__
        ]
    return tables


ROWS = [(table, row) for table in _tables() for row in options_of(table)]


def _sample(row: Option, index: int) -> Any:
    if row.choices:
        return row.choices[index % len(row.choices)]
    texts = [str(index + 1), f"word{index}", str(bool(index % 2)), "1,0,1"]
    return next(row.parser(text) for text in texts if _reads(row, text))


def _reads(row: Option, text: str) -> bool:
    try:
        row.parser(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("table", "row"), ROWS, ids=[f"{table.__name__}.{row.name}" for table, row in ROWS])
def test_the_strongest_source_counts(table: type, row: Option) -> None:
    """For each option, taking away the strongest source hands over to the next, down to the default."""
    sayings: dict[str, dict[str, Any]] = {
        "argument": {row.name: _sample(row, 0)},
        "command_line": {row.name: _sample(row, 1)},
        "environment": {row.environment: row.write(_sample(row, 2))},
        "file": {row.name: _sample(row, 3)},
    }
    sources = [Source.ARGUMENT, Source.COMMAND_LINE, Source.ENVIRONMENT, Source.FILE]
    places = [row.name, f"--{row.name}", row.environment, row.name]
    for index, (source, place, key) in enumerate(zip(sources, places, list(sayings), strict=True)):
        setting = resolve(table, **sayings).settings[row.name]
        assert (setting.value, setting.source, setting.place) == (_sample(row, index), source, place)
        del sayings[key]
    setting = resolve(table, environment={}).settings[row.name]
    assert (setting.value, setting.source) == (row.default, Source.DEFAULT)


@pytest.mark.parametrize("table", _tables(), ids=lambda table: table.__name__)
def test_child_environment_reads_back(table: type) -> None:
    """What is written for a child process resolves to the same values there."""
    argument = {row.name: _sample(row, 1) for row in options_of(table)}
    decided = resolve(table, argument=argument, environment={})
    child = environment_of(table, decided.settings)
    assert resolve(table, environment=child).values == decided.values


def test_defaults_are_written_only_on_request() -> None:
    """A value that nobody said reaches the child environment only when that is asked for."""
    decided = resolve(CompilationOptions, environment={})
    assert environment_of(CompilationOptions, decided.settings) == {}
    assert environment_of(CompilationOptions, decided.settings, defaults=True)["ACCELERATE_DYNAMO_MODE"] == "default"


def test_unknown_names_are_refused() -> None:
    """A flag or argument that no option has is an error that lists those there are."""
    with pytest.raises(ConfigurationError, match=r"'dynamo_colour'.*command line.*dynamo_mode"):
        resolve(CompilationOptions, command_line={"dynamo_colour": "red"})


def test_bad_value_names_its_source() -> None:
    """A value that is not allowed is reported with the source and place that said it."""
    with pytest.raises(ConfigurationError, match=r"'GCC'.*file \(dynamo_backend\)"):
        resolve(CompilationOptions, environment={}, file={"dynamo_backend": "gcc"})
