"""Imports of modules that bring torch.

torch makes a million objects that stay to the end of the process. Collections that walk all of them while it is
imported, and once more when the process ends, take a third of the time of a short command.
"""

import gc
import sys
from importlib import import_module
from types import ModuleType


def load(name: str) -> ModuleType:
    """Import a module, and exempt the objects it made from later garbage collections (`gc.freeze`)."""
    if name in sys.modules or "torch" in sys.modules or not gc.isenabled():
        return import_module(name)
    gc.disable()
    try:
        module = import_module(name)
        if "torch" in sys.modules:
            gc.freeze()
    finally:
        gc.enable()
    return module
