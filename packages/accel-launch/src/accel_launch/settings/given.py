"""Which options were written on the command line: a parser notes them, the resolver asks."""

import argparse

__all__ = ["GIVEN", "given"]

GIVEN = "_given"
"""Attribute of the namespace that holds the options that were really written on the command line."""


def given(args: argparse.Namespace) -> set[str]:
    """Return the destinations that were written on the command line."""
    return set(getattr(args, GIVEN, ()))
