"""Nested settings laid over each other."""

from accelerate._merging import merge_dicts


def test_source_wins_level_by_level() -> None:
    """What only the destination has is kept, and it is changed in place."""
    destination = {"a": {"kept": 1, "changed": 1}, "b": 1}
    assert merge_dicts({"a": {"changed": 2}, "c": {"new": 3}}, destination) is destination
    assert destination == {"a": {"kept": 1, "changed": 2}, "b": 1, "c": {"new": 3}}
