"""Values of one call are sorted by kind, and none takes another's name."""

from __future__ import annotations

from typing import Any

import pytest

from accel_trackers.values import sort


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"a": {"b": 1}, "a/b": 2}, {"a/b", "a/b (2)"}),
        ({"a": {1: 1, "1": 2}}, {"a/1", "a/1 (2)"}),
        ({"a/b": 1, "a": {"b": "text"}}, {"a/b", "a/b (2)"}),
        ({"a": {"b": {"c": 1}, "b/c": 2}, "a/b": {"c": 3}}, {"a/b/c", "a/b/c (2)", "a/b/c (3)"}),
        ({"a": {1: 1, "1": "text"}, "a (2)": 3}, {"a/1", "a/1 (2)", "a (2)"}),
    ],
)
def test_values_with_the_same_name_are_all_kept(values: dict[str, Any], names: set[str]) -> None:
    """A nested value whose name is that of another has a number behind it, in the order of the call."""
    parts = sort(values)
    assert parts.numbers.keys() | parts.texts.keys() == names


def test_a_group_whose_keys_are_written_alike_is_no_group() -> None:
    """Libraries that draw a mapping as one chart get none in which a value is lost."""
    parts = sort({"losses": {1: 0.5, "1": 0.25}, "rates": {"a": 1.0, "b": 2.0}}, groups=True)
    assert parts.groups == {"rates": {"a": 1.0, "b": 2.0}}
    assert parts.numbers == {"losses/1": 0.5, "losses/1 (2)": 0.25}
