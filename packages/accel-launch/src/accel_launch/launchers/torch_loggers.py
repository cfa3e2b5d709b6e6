"""What torch's launcher logs: everything or nothing, for as long as processes run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["torch_loggers"]

_NAMES = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


@contextmanager
def torch_loggers(*, talk: bool) -> Iterator[None]:
    """Let torch's launcher say everything or nothing: what it says of failures is said better in the report."""
    level = logging.INFO if talk else logging.CRITICAL
    known = [name for name in logging.root.manager.loggerDict if name.startswith(_NAMES)]
    before = {name: logging.getLogger(name).level for name in (*_NAMES, *known)}
    for name in before:
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, former in before.items():
            logging.getLogger(name).setLevel(former)
