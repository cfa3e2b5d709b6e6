"""Which options were written on the command line: the parser records them for the resolver."""

import argparse

GIVEN = "_given"
"""Attribute of the namespace that holds the options that were written on the command line."""


def given(args: argparse.Namespace) -> set[str]:
    """Return the destinations that were written on the command line."""
    return set(getattr(args, GIVEN, ()))
