"""The environment under Accelerate's names."""

import os

import pytest

from accel_core.errors import ConfigurationError
from accel_core.host.environ import patch_environment
from accelerate import _environment as environment


def test_variables_are_read() -> None:
    """The first number that is set counts; a flag is truth; a choice is text as it stands."""
    with patch_environment(PMI_SIZE=4, SURELY_SET="Yes", SURELY_TOO=2):
        assert environment.get_int_from_env(["SURELY_UNSET", "PMI_SIZE", "SURELY_TOO"], 1) == 4
        assert environment.parse_flag_from_env("SURELY_SET")
        assert environment.parse_choice_from_env("SURELY_SET") == "Yes"
    assert environment.get_int_from_env(["SURELY_UNSET"], 7) == 7
    assert environment.parse_flag_from_env("SURELY_UNSET", True)
    assert environment.parse_choice_from_env("SURELY_UNSET") == "no"
    with patch_environment(SURELY_SET="maybe"), pytest.raises(ConfigurationError, match=r"SURELY_SET.*'maybe'"):
        environment.parse_flag_from_env("SURELY_SET")


@pytest.mark.parametrize(
    ("name", "value"),
    [("B", "two\nlines"), ("B", "1;2"), ("B", "<file"), ("B", ">file"), ("B", "2 words"), ("C=", "1"), ("D E", "1")],
)
def test_an_entry_that_a_line_cannot_hold_is_left_out(name: str, value: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each entry that would break a line, or be more than a word in it, is left out with a warning that names it."""
    given = {"A": "1", name: value, "E": 2, "F": ""}
    assert environment.convert_dict_to_env_variables(given) == ["A=1\n", "E=2\n", "F=\n"]
    assert [record.getMessage().count(f"{name}={value}") for record in caplog.records] == [1]


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


def test_purged_class_wraps_its_tests_and_no_more() -> None:
    """Tests of the class, and of classes derived from it later, leave nothing behind; what sets them up stays."""

    @environment.purge_accelerate_environment
    class Case:
        def test_leak(self) -> None:
            os.environ["ACCELERATE_LEAK"] = "1"

        def setup_method(self) -> None:
            os.environ["ACCELERATE_LEFT"] = "1"

    class Later(Case):
        def test_more(self) -> None:
            os.environ["ACCELERATE_LEAK"] = "2"

        def helper(self) -> None:
            os.environ["ACCELERATE_LEFT"] = "2"

    case = Later()
    with patch_environment(ACCELERATE_LEFT=""):
        for act, left in ((case.setup_method, "1"), (case.test_leak, "1"), (case.test_more, "1"), (case.helper, "2")):
            act()
            assert "ACCELERATE_LEAK" not in os.environ
            assert os.environ["ACCELERATE_LEFT"] == left


def test_purged_class_keeps_what_it_does_with_subclasses() -> None:
    """A class that looks at its subclasses goes on doing so, with their keyword arguments."""

    @environment.purge_accelerate_environment
    class Case:
        seen: tuple[type, str]

        def __init_subclass__(cls, label: str, **kwargs: object) -> None:
            super().__init_subclass__(**kwargs)
            Case.seen = (cls, label)

    class Later(Case, label="late"):
        def test_leak(self) -> None:
            os.environ["ACCELERATE_LEAK"] = "1"

    Later().test_leak()
    assert "ACCELERATE_LEAK" not in os.environ
    assert Case.seen == (Later, "late")
