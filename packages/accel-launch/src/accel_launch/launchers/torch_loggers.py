"""What torch's launcher logs while processes run: everything or nothing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


@contextmanager
def torch_loggers(*, talk: bool) -> Iterator[None]:
    """Let torch's launcher log everything or nothing: the report describes failures better than it does."""
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
