"""One line per option: reading, writing and checking values."""

import pytest

from accel_core.errors import ConfigurationError
from accel_core.options import option as options
from accel_core.options.compilation import CompilationOptions
from accel_core.options.option import options_of


@pytest.mark.parametrize(
    ("parser", "text", "value"),
    [
        (options.boolean, "TRUE", True),
        (options.boolean, "0", False),
        (options.upper, " eager ", "EAGER"),
        (options.names, "A, B,,C ", ("A", "B", "C")),
        (options.member_of(["ONE", "TWO"]), "two", "TWO"),
        (options.member_of(["ONE", "TWO"]), "1", "ONE"),
        (options.member_of(["ONE", "TWO"]), "3", "3"),
        (options.number_or_auto(int), "AUTO", "auto"),
        (options.number_or_auto(int), "4", 4),
    ],
)
def test_parsers_read_what_people_write(parser: object, text: str, value: object) -> None:
    """Each parser accepts the spellings found in files and environments."""
    assert callable(parser)
    assert parser(text) == value


def test_environment_fills_and_empty_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option reads its variable, and takes the default where that is unset or empty."""
    mode = options.option_named(CompilationOptions, "mode")
    assert mode.read() == "default"
    monkeypatch.setenv(mode.environment, "")
    assert mode.read() == "default"
    monkeypatch.setenv(mode.environment, "max-autotune")
    assert mode.read() == "max-autotune"


def test_unreadable_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that cannot be read, or is not allowed, is named in the error."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "perhaps")
    with pytest.raises(ConfigurationError, match="ACCELERATE_DYNAMO_USE_FULLGRAPH"):
        options.option_named(CompilationOptions, "fullgraph").read()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "gcc")
    with pytest.raises(ConfigurationError, match=r"'GCC'.*ACCELERATE_DYNAMO_BACKEND.*INDUCTOR"):
        options.option_named(CompilationOptions, "backend").read()


@pytest.mark.parametrize("value", [True, False, 3, 0.5, "word", ("A", "B")])
def test_written_values_read_back(value: object) -> None:
    """What is written for a child process parses to the same value."""
    parsers = {bool: options.boolean, int: int, float: float, str: str, tuple: options.names}
    row = options.Option("row", "ROW", parsers[type(value)], None, "A row.")
    assert row.parse(row.write(value), "the test") == value


def test_every_row_is_complete() -> None:
    """Each option has a flag, a variable and a sentence of help that ends in a full stop; there are no others."""
    for row in options_of(CompilationOptions):
        assert row.flag == f"--{row.name}"
        assert row.environment.isupper()
        assert row.help.endswith(".")
    with pytest.raises(KeyError, match="color"):
        options.option_named(CompilationOptions, "color")
