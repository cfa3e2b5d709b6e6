"""The configuration file, and the settings that it and the environment result in."""

from collections.abc import Callable, Sequence

from accel_core.errors import AccelError
from accel_launch.settings.checks import check_installed, check_settings
from accel_launch.settings.file import load
from accel_launch.settings.resolve import Settings
from accel_verify.diagnosis.finding import DoctorFinding, from_error, ok, warning
from accel_verify.diagnosis.network import check_port

_TOPIC = "Configuration"


def check_configuration(path: str | None, settings_of: Callable[[Sequence[str]], Settings]) -> list[DoctorFinding]:
    """Examine the configuration file, and what a launch without flags would do."""
    try:
        file = load(path)
        findings = [ok(_TOPIC, f"{file.path} can be read" if file else "no configuration file; defaults apply")]
        if file is not None and file.is_old:
            remedy = f"Run `accel config update --config-file {file.path}`, which shows what it changes."
            findings.append(warning(_TOPIC, f"{file.path} has keys or values of older versions", remedy))
        words = [] if path is None else ["--config-file", path]
        settings = settings_of(words)
        check_settings(settings)
        check_installed(settings)
    except AccelError as error:
        return [from_error(_TOPIC, error)]
    findings.append(ok(_TOPIC, "settings of file and environment go together"))
    port = settings["main_process_port"]
    if port and (settings["machine_rank"] or 0) == 0:
        findings.append(check_port(port, settings.source("main_process_port")))
    return findings
