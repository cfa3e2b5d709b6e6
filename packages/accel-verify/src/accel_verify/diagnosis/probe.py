"""Runs in a process of its own: imports libraries one by one, and reports the result of each.

A library that is built for another machine may take Python down instead of raising an error, so the process of the
command does not import any.
"""

import json
import os
import sys
from importlib import import_module
from typing import Any


def main(modules: list[str]) -> None:
    """Import modules, and write a line of JSON before and after each; of torch, also what it sees."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:  # line by line: the next import may end the process
        os.dup2(2, 1)  # what a library prints is not an answer
        for module in modules:
            print(json.dumps({"begun": module}), file=answers)
            print(json.dumps({"module": module, "error": _trouble_with(module)}), file=answers)
            if module == "torch" and "torch" in sys.modules:
                print(json.dumps({"torch": _torch()}), file=answers)


def _trouble_with(module: str) -> str:
    try:
        import_module(module)
    except (Exception, SystemExit) as error:  # an import may raise anything, and some call sys.exit
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return ""


def _torch() -> dict[str, Any]:
    import torch

    built = torch.version.cuda or torch.version.hip
    here = torch.accelerator.is_available()
    kind = str(torch.accelerator.current_accelerator()) if here else ""
    count = torch.accelerator.device_count() if here else 0
    trouble = ""
    if built and not here:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # is_available swallows the reason, this raises it
        except (RuntimeError, AssertionError) as error:
            trouble = str(error).splitlines()[0]
    devices = [_device(f"{kind}:{index}") for index in range(count)]
    return {"version": torch.__version__, "built": built or "", "trouble": trouble, "devices": devices}


def _device(name: str) -> dict[str, Any]:
    """Compute something on a device, and return what was seen of it."""
    import torch

    found: dict[str, Any] = {"name": name, "error": ""}
    try:
        right = float(torch.ones(1024, device=name).sum()) == 1024  # a driver may list a device that cannot compute
        found["error"] = "" if right else "a sum on it is wrong"
        if name.startswith("cuda"):
            found["model"] = torch.cuda.get_device_name(name)
            found["free"], found["total"] = torch.cuda.mem_get_info(name)
    except RuntimeError as error:
        found["error"] = str(error).splitlines()[0]
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
