"""Which process this is."""


def global_ordinal() -> int:
    """Return the rank."""
    return 3


def world_size() -> int:
    """Return the number of processes."""
    return 8


def local_ordinal() -> int:
    """Return the rank on this machine."""
    return 1
