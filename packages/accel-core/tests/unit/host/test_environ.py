"""Reading the environment."""

import os

import pytest

from accel_core.errors import ConfigurationError
from accel_core.host import environ


@pytest.mark.parametrize(
    ("word", "truth"), [("1", True), ("TRUE", True), ("yes", True), ("on", True), ("0", False), ("No", False)]
)
def test_words_are_read_as_truth(word: str, truth: bool) -> None:
    """Every documented word, in any case, is read."""
    assert environ.str_to_bool(word, to_bool=True) is truth


def test_what_cannot_be_read_names_the_variable() -> None:
    """The error says which variable, what it held, and what it may hold."""
    told = pytest.raises(ConfigurationError, match=r"ACCELERATE_DEBUG_MODE.*'maybe'.*Use one of")
    with environ.patch_environment(ACCELERATE_DEBUG_MODE="maybe"), told:
        environ.flag("ACCELERATE_DEBUG_MODE")
    with environ.patch_environment(rank="first"), pytest.raises(ConfigurationError, match=r"RANK.*'first'"):
        environ.integer("RANK")


def test_patched_variables_are_put_back_after_an_error() -> None:
    """What was there is there again, and what was not is gone."""
    before = dict(os.environ)

    def fails() -> None:
        with environ.patch_environment(HOME="elsewhere", SURELY_UNSET=1):
            assert (os.environ["HOME"], os.environ["SURELY_UNSET"]) == ("elsewhere", "1")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert dict(os.environ) == before


def test_cleared_environment_comes_back() -> None:
    """Inside there is nothing, afterwards everything."""
    before = dict(os.environ)
    with environ.clear_environment():
        assert not os.environ
        os.environ["LEFT"] = "behind"
    assert dict(os.environ) == before
