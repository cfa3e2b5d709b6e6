"""Reads `--tee`."""

from accel_core.errors import ConfigurationError

__all__ = ["tee_of"]

_TEE = ("0", "1", "2", "3")


def tee_of(said: str, local_rank: int) -> int:
    """Read `--tee`: 0 nothing, 1 output, 2 errors, 3 both; or RANK:N between commas.

    Args:
        said: What was written.
        local_rank: The rank asked about.

    Returns:
        The number for the rank.

    Raises:
        ConfigurationError: It is neither of the two forms.
    """
    if said in _TEE:
        return int(said)
    parts = [part.partition(":") for part in said.split(",")]
    if not all(rank.isdigit() and number in _TEE for rank, _, number in parts):
        raise ConfigurationError(
            f"--tee cannot be read; got {said!r}. Give 0, 1, 2 or 3, or a number for each local rank as in 0:3,1:2."
        )
    return {int(rank): int(number) for rank, _, number in parts}.get(local_rank, 0)
