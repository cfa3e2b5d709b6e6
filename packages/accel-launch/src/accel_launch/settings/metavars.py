"""The placeholders of values in the help; apart from the settings, so that `accel --help` imports little."""

_METAVARS = {
    "_ip": "HOST", "_port": "PORT", "_file": "FILE", "hostfile": "FILE", "_path": "PATH", "_dir": "DIR", "_ids": "IDS",
    "_names": "NAMES", "_to_wrap": "NAMES", "_filter": "HOSTS", "_function": "NAME", "_size": "N", "_degree": "N",
    "_id": "ID", "_backend": "NAME", "_dropout": "P", "_modules": "REGEX", "_num_layers": "N", "_batches": "N",
    "env": "NAME=VALUE", "vm": "NAME", "role": "NAME", "_conf": "KEY=VALUE,...", "nnodes": "N|MIN:MAX", "tee": "N",
    "watchdog": "SECONDS", "monitor_interval": "SECONDS", "timeout": "SECONDS", "_key": "KEY", "_zone": "ZONE",
    "_linear_precision": "A,B,C", "_granularity": "full|selective", "_method": "uniform|block", "_clipping": "NORM",
    "slurm": "KEY=VALUE", "ray": "KEY=VALUE", "_length": "N", "_steps": "N",
}  # fmt: skip
"""Placeholder of the value in the help, by the ending of the option's name."""


def metavar_of(name: str, parse: object = None) -> str:
    """Return the word that stands for an option's value in its help."""
    for ending, word in _METAVARS.items():
        if name.endswith(ending):
            return word
    if getattr(parse, "__name__", "") in ("boolean", "boolean_as_text", "one_or_zero"):
        return "true|false"
    return "N" if parse is int else "X" if parse is float else name.rpartition("_")[2].upper()
