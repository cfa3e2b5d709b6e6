"""The device: how many there are, and its generator."""

seeds: list[int] = [7]
"""Seeds of the generator, the last one in use."""


def get_xla_supported_devices() -> list[str]:
    """Return the devices of this host."""
    return ["xla:0", "xla:1"]


def get_rng_state() -> int:
    """Return the seed."""
    return seeds[-1]


def set_rng_state(seed: int) -> None:
    """Seed the generator; like torch_xla's, it takes whole numbers alone."""
    if type(seed) is not int:
        raise TypeError(type(seed))
    seeds.append(seed)
