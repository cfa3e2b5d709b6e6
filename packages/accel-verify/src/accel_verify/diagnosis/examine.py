"""What `accel doctor` does: examine, show each finding with its remedy, and say whether there is a problem."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from accel_core.host import environ
from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.start import settings_from
from accel_launch.settings.layout import counted
from accel_launch.settings.resolve import Settings
from accel_launch.terminal import colors_wanted, flush_output, paint, progress
from accel_verify.diagnosis.collective import check_collective
from accel_verify.diagnosis.configuration import check_configuration
from accel_verify.diagnosis.finding import DoctorFinding
from accel_verify.diagnosis.libraries import Probe
from accel_verify.diagnosis.machine import check_disks, check_open_files, check_shared_memory
from accel_verify.diagnosis.network import check_network
from accel_verify.diagnosis.packages import check_packages
from accel_verify.diagnosis.slurm import check_slurm
from accel_verify.diagnosis.variables import check_variables

_KINDS = {"ok": "good", "warning": "warning", "problem": "error"}


def diagnose(args: argparse.Namespace) -> int:
    """Examine this machine and show what was found."""
    found: list[DoctorFinding] = []
    for finding in _examine(args):
        if not args.json:
            _show(finding, found[-1].topic if found else "")
        found.append(finding)
    counts = Counter(finding.state for finding in found)
    if args.json:
        print(json.dumps({"findings": [each._asdict() for each in found], "problems": counts["problem"]}, indent=2))
    else:
        shown = f"{counts['ok']} ok, {counted(counts['warning'], 'warning')}, {counted(counts['problem'], 'problem')}"
        print(f"\n{shown}.")
    return 1 if counts["problem"] else 0


def _examine(args: argparse.Namespace) -> Iterator[DoctorFinding]:
    """Yield the findings one by one; imports run in another process during the quick examinations."""
    environment, probe = environ.snapshot(), Probe()
    yield from check_packages()
    yield from check_network(environment)
    if args.slurm:
        yield from check_slurm(environment, settings_of)
    yield from check_disks(Path(args.checkpoint_dir))
    yield from check_shared_memory()
    yield from check_open_files()
    yield from check_variables(environment)
    yield from check_configuration(args.config_file, settings_of)
    seen = probe.findings(args.timeout)
    yield from seen
    if args.no_collective or any(each.state == "problem" and each.topic == "Libraries" for each in seen):
        return
    progress("Starting two ranks ...")
    yield check_collective("--cpu", environment, args.timeout)
    if sum(" computes" in each.what for each in seen if each.topic == "Devices") > 1:
        yield check_collective("--multi-gpu", environment, args.timeout)


def settings_of(words: Sequence[str]) -> Settings:
    """Return the settings of a launch, every value with its origin."""
    return settings_from(launch_command_parser().parse_args(words))


def _show(finding: DoctorFinding, topic: str) -> None:
    colors = colors_wanted(sys.stdout)
    if finding.topic != topic:
        print(("\n" if topic else "") + paint(f"{finding.topic}:", "heading", colors))
    print(f"  {paint(finding.state.ljust(8), _KINDS[finding.state], colors)} {finding.what}")
    if finding.remedy:
        print(f"           {paint('->', 'faint', colors)} {finding.remedy}")
    flush_output()
