"""Runs a module as `python -m` does, but without the current folder in the path of imports.

    python run_module.py MODULE [WORDS]

`python -m` would take torch, yaml or json from the folder that a command is started in. `-P` does the same from
Python 3.11 on, and PYTHONSAFEPATH would reach the scripts of users, which import from their own folders.
"""

import os
import runpy
import sys


def own_command(module: str, *words: str) -> list[str]:
    """Return the command line that runs a module of accel's own, or of a library, in another process."""
    return [sys.executable, os.path.realpath(__file__), module, *words]


def main() -> None:
    """Run the module that the first word names, with the words after it."""
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # Python puts the folder of a program first, unless it was told not to.
    if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    main()
