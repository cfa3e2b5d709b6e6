"""What is installed and what the hardware can do."""

import pytest

from accel_core.host import availability

QUESTIONS = [name for name in dir(availability) if name.startswith("is_")]


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_has_a_plain_answer(name):
    """Each question answers yes or no, never None or an object, on any machine."""
    assert getattr(availability, name)() in (True, False)


def test_a_folder_of_the_same_name_is_no_library(tmp_path, monkeypatch):
    """A folder called like a library, in the working directory, does not make it available."""
    (tmp_path / "aim").mkdir()
    (tmp_path / "aim" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert availability.has_module("aim")
    assert not availability.has_library("aim")
