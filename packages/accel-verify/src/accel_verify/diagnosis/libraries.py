"""Libraries that cannot be imported, and devices: what torch sees, what the machine has, and whether they compute."""

import json
import subprocess
from pathlib import Path
from typing import Any

from accel_core.host.program.run_module import own_command
from accel_launch.terminal import progress
from accel_verify.diagnosis.finding import DoctorFinding, ok, problem, warning
from accel_verify.diagnosis.packages import module_of, optional_libraries

_LIBRARIES, _DEVICES = "Libraries", "Devices"
_GIB = 2**30
_INSTALL_TORCH = "Install the build of torch for your device: https://pytorch.org/get-started/locally."
# Drivers list their devices here, whatever torch was built for.
_VENDORS = (("NVIDIA", "/proc/driver/nvidia/gpus"), ("AMD", "/sys/class/kfd/kfd/topology/nodes"))
_LITTLE_MEMORY = 0.1


class Probe:
    """Imports of torch and of the optional libraries, which run in another process until their result is needed."""

    def __init__(self, libraries: list[str] | None = None) -> None:
        names = ["torch", *optional_libraries()] if libraries is None else libraries
        self._distributions = {"torch" if name == "torch" else module_of(name): name for name in names}
        self._process = subprocess.Popen(  # started early: imports take seconds
            own_command("accel_verify.diagnosis.probe", *self._distributions),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def findings(self, seconds: float) -> list[DoctorFinding]:
        """Wait for the imports, and return what they showed."""
        progress("Importing libraries ...")
        try:
            printed, _ = self._process.communicate(timeout=seconds)
            ended = f"a Python that ended with status {self._process.returncode}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            printed, _ = self._process.communicate()
            ended = f"no result within {seconds:g} s"
        answers: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines()]
        errors: dict[str, str] = {each["module"]: each["error"] for each in answers if "module" in each}
        # What was begun and not answered is what took Python down.
        begun = [answer["begun"] for answer in answers if "begun" in answer] or list(self._distributions)[:1]
        if begun and begun[-1] not in errors:
            errors[begun[-1]] = ended
        seen = next((answer["torch"] for answer in answers if "torch" in answer), None)
        return [*self._libraries(errors), *(_devices(seen) if seen else [])]

    def _libraries(self, errors: dict[str, str]) -> list[DoctorFinding]:
        whole = [self._distributions[module] for module, error in errors.items() if not error]
        findings = [ok(_LIBRARIES, f"{', '.join(whole)} can be imported")] if whole else []
        for module, error in errors.items():
            if not error:
                continue
            name = self._distributions[module]
            finding = problem if module == "torch" else warning  # a run may do without the others
            remedy = f"Run `pip install --force-reinstall {name}`" + (
                "." if module == "torch" else ", or uninstall it."
            )
            findings.append(finding(_LIBRARIES, f"{name} cannot be imported; got {error}", remedy))
        left = [name for module, name in self._distributions.items() if module not in errors]
        if left:
            findings.append(
                warning(
                    _LIBRARIES,
                    f"{', '.join(left)} not tried after that",
                    "Repair the library above, then run this again.",
                )
            )
        return findings


def _devices(seen: dict[str, Any]) -> list[DoctorFinding]:
    """Return findings about the devices that torch sees, and about those that it does not see."""
    built = f"built for {seen['built']}" if seen["built"] else "built for the CPU"
    findings = [ok(_DEVICES, f"torch {seen['version']}, {built}")]
    findings += [_device(device) for device in seen["devices"]]
    if not seen["devices"]:
        findings.append(_without_devices(seen))
    return findings


def _device(device: dict[str, Any]) -> DoctorFinding:
    name = device["name"] + (f", {device['model']}" if "model" in device else "")
    if device["error"]:
        return problem(
            _DEVICES,
            f"{name} does not compute; got {device['error']}",
            "End other programs that use it, and look at `nvidia-smi` or its counterpart.",
        )
    if "total" not in device:
        return ok(_DEVICES, f"{name} computes")
    message = f"{name} computes; {device['free'] / _GIB:.1f} of {device['total'] / _GIB:.1f} GiB are free"
    if device["free"] < _LITTLE_MEMORY * device["total"]:
        return warning(_DEVICES, message, "Another program holds its memory: find it with `nvidia-smi`, and end it.")
    return ok(_DEVICES, message)


def _without_devices(seen: dict[str, Any]) -> DoctorFinding:
    vendor = next((vendor for vendor, folder in _VENDORS if _lists(folder)), None)
    if vendor is None:
        return ok(_DEVICES, "no accelerator on this machine; training runs on the CPU")
    if not seen["built"]:
        return warning(_DEVICES, f"the machine has a GPU of {vendor}, and torch is built for the CPU", _INSTALL_TORCH)
    return problem(
        _DEVICES,
        f"the machine has a GPU of {vendor}, and torch cannot use it; got {seen['trouble'] or 'no reason'}",
        "Unset CUDA_VISIBLE_DEVICES where it hides the GPU, update the driver, or install a torch that fits it.",
    )


def _lists(folder: str) -> bool:
    place = Path(folder)
    return place.is_dir() and any(place.iterdir())
