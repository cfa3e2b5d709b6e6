"""The environment under Accelerate's names."""

import os

import pytest

from accel_core.errors import ConfigurationError
from accel_core.host.environ import patch_environment
from accelerate import _environment as environment


def test_variables_are_read() -> None:
    """The first number that is set counts; a flag is truth; a choice is text as it stands."""
    with patch_environment(PMI_SIZE=4, SURELY_SET="Yes"):
        assert environment.get_int_from_env(["SURELY_UNSET", "PMI_SIZE"], 1) == 4
        assert environment.parse_flag_from_env("SURELY_SET")
        assert environment.parse_choice_from_env("SURELY_SET") == "Yes"
    assert environment.get_int_from_env(["SURELY_UNSET"], 7) == 7
    assert environment.parse_flag_from_env("SURELY_UNSET", True)
    assert environment.parse_choice_from_env("SURELY_UNSET") == "no"
    with patch_environment(SURELY_SET="maybe"), pytest.raises(ConfigurationError, match=r"SURELY_SET.*'maybe'"):
        environment.parse_flag_from_env("SURELY_SET")


def test_lines_of_an_environment() -> None:
    """What a line cannot hold is left out."""
    lines = environment.convert_dict_to_env_variables({"A": "1", "B": "two\nlines", "C=": "1", "D": "1;2", "E": 2})
    assert lines == ["A=1\n", "E=2\n"]


def test_purged_function_leaves_no_accelerate_variable() -> None:
    """Variables that a decorated function sets are gone after it, those set before stay."""

    @environment.purge_accelerate_environment
    def leaks() -> None:
        os.environ["ACCELERATE_LEAK"] = "1"
        os.environ["ACCELERATE_KEPT"] = "changed"

    with patch_environment(ACCELERATE_KEPT="kept"):
        leaks()
        assert os.environ["ACCELERATE_KEPT"] == "kept"
        assert "ACCELERATE_LEAK" not in os.environ


def test_purged_class_wraps_its_methods() -> None:
    """Public methods of a class leave nothing behind; the class stays itself."""

    class Case:
        def test_leak(self) -> None:
            os.environ["ACCELERATE_LEAK"] = "1"

    assert environment.purge_accelerate_environment(Case) is Case
    Case().test_leak()
    assert "ACCELERATE_LEAK" not in os.environ
