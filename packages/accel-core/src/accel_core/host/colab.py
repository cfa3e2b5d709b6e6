"""Google Colaboratory."""

from __future__ import annotations

import subprocess
import sys

from accel_core.errors import DeviceUnavailableError
from accel_core.host.program.run_module import own_command
from accel_core.host.versions import installed_version


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that fits the installed torch, in a Colab notebook. Never run in one.

    Args:
        upgrade: Replace a torch_xla that is installed already.

    Raises:
        DeviceUnavailableError: This is not a Colab notebook.

    Examples:
        >>> install_xla()  # doctest: +SKIP
    """
    if "google.colab" not in sys.modules:
        raise DeviceUnavailableError(
            "install_xla installs TPU support in Google Colaboratory only; this process runs elsewhere. "
            "Install torch_xla as its documentation says for your machine."
        )
    major, minor, *_ = installed_version("torch").release
    command = own_command("pip", "install", f"torch_xla[tpu]~={major}.{minor}.0")
    subprocess.run([*command, "--upgrade"] if upgrade else command, check=True)
