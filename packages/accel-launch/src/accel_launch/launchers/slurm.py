"""SLURM: writes the batch script of a run, submits it, and follows its log."""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

from accel_core.errors import LaunchError, MissingDependencyError
from accel_launch.launchers.launcher import Launcher, flags_of
from accel_launch.settings.resolve import Settings
from accel_launch.terminal import say

_NOT_PASSED_ON = {"launcher", "slurm", "num_machines", "machine_rank", "dry_run", "json", "explain", "all"}
"""Settings of this command line that the launchers inside the job do not get; variables travel by themselves."""
_GRACE_S = 120
_PAUSE_S = 1.0
_COMPLETING_S = 5
"""Seconds after which a job whose script has ended is not waited for: SLURM may not reach one of its nodes."""

_OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
_FREE_PORT = 'import socket; found = socket.socket(); found.bind(("", 0)); print(found.getsockname()[1])'

_BODY = """
export ACCEL_SLURM_JOB=$SLURM_JOB_ID  # launchers that lose a machine send SIGUSR2: srun would wait for it
# SIGUSR1 before the time limit reaches the ranks; a run that saved its state and left with 75 is started again.
{srun} &
step=$!
trap 'kill -USR1 "$step"' USR1
trap 'sleep 2; kill -KILL "$step"; exit 1' USR2
wait "$step"; status=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; status=$?; done  # a signal ends `wait` early
if [ "$status" = 75 ]; then scontrol requeue "${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_}}\
${{SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}}" && sleep 60; fi
exit "$status"
"""


class SlurmLauncher(Launcher):
    """A job of SLURM, in which srun starts one launcher on each machine."""

    name = "slurm"

    def claims(self, settings: Settings) -> bool:
        """Take a run for which SLURM was asked by name."""
        return bool(settings["launcher"] == self.name)

    def command(self, settings: Settings) -> list[str]:
        """Return the command of the batch script that starts a launcher on each machine."""
        options = _options(settings)
        words = ["srun", *(f"--{key}={value}" for key, value in options.items() if key.startswith("container"))]
        # The Python of this machine is not in a container.
        words += ["accel"] if len(words) > 1 else [sys.executable, "-m", "accel_launch"]
        return [*words, "launch", *flags_of(settings, _NOT_PASSED_ON), str(settings.script), *settings.arguments]

    def job(self, settings: Settings) -> str:
        """Return the batch script."""
        options = _options(settings)
        array = "array" in options
        lines = {
            "job-name": " ".join(Path(str(settings.script)).stem.split()),
            "nodes": str(settings.layout.machines),
            "ntasks-per-node": "1",
            "output": "slurm-%A_%a.log" if array else "slurm-%j.log",
            "open-mode": "append",
            "requeue": "",
            "signal": f"B:USR1@{_GRACE_S}",
            **{key: value for key, value in options.items() if not key.startswith("container")},
        }
        head = [f"#SBATCH --{key}{f'={shlex.quote(value)}' if value else ''}" for key, value in lines.items()]
        if settings.layout.machines > 1 and not settings.is_set("main_process_port"):  # this runs on the first machine
            program = "python3" if any(key.startswith("container") for key in options) else sys.executable
            head += ["", f"export ACCEL_MAIN_PROCESS_PORT=$({shlex.join([program, '-c', _FREE_PORT])})"]
        # Since 22.05, srun does not take this over from the job.
        cores = 'srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
        srun = shlex.join(self.command(settings)).replace("srun", cores, 1)
        return "\n".join(["#!/bin/bash", *head, _BODY.format(srun=srun)])

    def run(self, settings: Settings) -> int:
        """Submit the job, and show its log until it ends."""
        script = self.job(settings)
        if shutil.which("sbatch", path=settings.inherited.get("PATH")) is None:
            raise MissingDependencyError(
                "--launcher slurm submits with sbatch; got none on PATH. Run it on a login node of the cluster; "
                "`--dry-run` shows the batch script without it."
            )
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LaunchError(
                f"SLURM refused the job; sbatch gives: {done.stderr.strip()}. Change the options given by --slurm; "
                "`--dry-run` shows the batch script."
            )
        job = done.stdout.strip().partition(";")[0]
        say(f"accel launch: submitted job {job}; `scancel {job}` ends it")
        if "array" in _options(settings):
            return 0
        try:
            return _follow(job)
        except KeyboardInterrupt:
            return _interrupted(job)


def _options(settings: Settings) -> dict[str, str]:
    return {key: value for key, _, value in (pair.partition("=") for pair in settings["slurm"] or [])}


def facts_of(job: str) -> dict[str, str]:
    """Return what SLURM says of a job, under scontrol's names; raise if it does not answer or know the job."""
    done = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(
            f"SLURM does not tell how job {job} is; scontrol gives: {done.stderr.strip()}. The job may go on; look "
            f"with `sacct -j {job}`."
        )
    return dict(re.findall(r"(\w+)=(\S*)", done.stdout))


def _follow(job: str) -> int:
    """Show the log of a job and what SLURM does with it, and return its exit status for a shell."""
    shown, completing = "", 0
    with contextlib.ExitStack() as opened:
        log: BinaryIO | None = None
        while True:
            facts = facts_of(job)
            state = facts["JobState"]
            news = _news(facts, state)
            if news and news != shown:
                say(f"accel launch: job {job} {news}")
            shown = news or shown
            if log is None and Path(facts["StdOut"]).is_file():
                log = opened.enter_context(Path(facts["StdOut"]).open("rb"))
            if log is not None:
                sys.stdout.buffer.write(log.read())
                sys.stdout.flush()
            completing = completing + 1 if state == "COMPLETING" else 0
            if state in _OVER or completing * _PAUSE_S > _COMPLETING_S:
                break
            time.sleep(_PAUSE_S)
    code, _, signaled = facts["ExitCode"].partition(":")
    status = int(code) or (128 + int(signaled) if int(signaled or 0) else 0)
    if state == "COMPLETED":
        return status
    where = f"still waits for {facts.get('NodeList')}" if state == "COMPLETING" else f"shows it as {state}"
    say(f"accel launch: job {job} ended with exit status {facts['ExitCode']}; SLURM {where}")
    return status or 1


def _news(facts: dict[str, str], state: str) -> str:
    restarts = facts.get("Restarts", "0")
    after = "" if restarts == "0" else f", restart {restarts}"
    if state == "RUNNING":
        return f"runs on {facts.get('NodeList')}, log {facts['StdOut']}{after}"
    reason = facts.get("Reason", "None")
    return f"is waiting ({reason}){after}" if state == "PENDING" and reason != "None" else ""


def _interrupted(job: str) -> int:
    """Ask whether the job is to end as well, and return the status of an interrupted program."""
    answer = ""
    if sys.stdin.isatty():
        sys.stderr.write(f"\nCancel job {job} too? [y/N] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
    if answer.strip().lower() in ("y", "yes"):
        subprocess.run(["scancel", job], check=False)
        say(f"accel launch: job {job} was cancelled")
    else:
        say(f"accel launch: job {job} goes on; `scancel {job}` ends it")
    return 130
