"""The torch part of launching: one elastic agent in this process, watched like a single command.

Imported only when processes are about to start. On one machine the agent's own store is the meeting point of the
ranks: it binds a free port itself and hands it on, so no port is ever chosen first and then taken by somebody else.
"""

import signal
import uuid
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from accel_core.errors import LaunchError
from accel_core.host.environ import write
from accel_launch.launchers.launcher import script_command
from accel_launch.launchers.machines import GRACE_S, OtherMachines
from accel_launch.launchers.preflight import check_main_machine, own_address
from accel_launch.launchers.rendezvous import LocalRendezvous, leave, machines_rendezvous
from accel_launch.launchers.torch_loggers import torch_loggers
from accel_launch.settings.layout import ProcessLayout
from accel_launch.settings.resolve import Settings
from accel_launch.supervision.signals import SIGNALS
from accel_launch.supervision.streams import RankLog
from accel_launch.supervision.supervisor import Supervisor, cannot_start
from accel_launch.terminal import flush_output


class _FollowedStreams(LogsSpecs):
    """Gives every rank the streams and variables of the supervisor."""

    def __init__(self, supervisor: Supervisor, variables: Mapping[str, str]) -> None:
        super().__init__()
        self._supervisor = supervisor
        self._variables = variables

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        # Torch writes to these instead of files.
        paths: dict[str, dict[int, str]] = {name: dict.fromkeys(envs, "") for name in ("stdout", "stderr")}
        for local_rank, variables in envs.items():
            variables.update({**self._variables, **self._supervisor.variables(local_rank)})
            for name, followed in self._supervisor.follow(int(variables["RANK"]), local_rank).items():
                paths[name][local_rank] = followed.child_path
        # Nothing for torch to tee: the supervisor reads.
        return LogsDest(paths["stdout"], paths["stderr"], {}, {}, dict.fromkeys(envs, ""))


class _SupervisedAgent(LocalElasticAgent):
    """torch's agent, which tells the supervisor about every process it starts and ends all of them when one fails."""

    def __init__(
        self, supervisor: Supervisor, machines: OtherMachines, spec: WorkerSpec, logs_specs: LogsSpecs
    ) -> None:
        # Ranks that get a signal have 30 s, torch's default and TERMINATION_GRACE_S.
        super().__init__(spec, logs_specs)
        self._supervisor = supervisor
        self._machines = machines
        self._failing = False
        supervisor.streams.on_end = self._rank_ended

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        machines = int(worker_group.group_world_size or 1)
        if machines > 1:  # one machine has nobody to compare with
            self._machines.met(worker_group.store, int(worker_group.group_rank or 0), machines)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self._supervisor.attempt = worker_group.spec.max_restarts - self._remaining_restarts
        self._failing = False
        try:
            pids: dict[int, int] = super()._start_workers(worker_group)
        except OSError as error:
            raise cannot_start(str(worker_group.spec.entrypoint), error) from None  # an OSError says not what to do
        for worker in worker_group.workers:
            self._supervisor.started(worker.global_rank, pids[worker.local_rank])
        self._supervisor.signals.install()  # only now: torch takes over the signals whenever it starts processes
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._supervisor.await_stacks()  # torch ends the others as soon as it sees that one ended
        found: RunResult = super()._monitor_workers(worker_group)
        return found

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._supervisor.restarting(self.statuses(), worker_group.spec.max_restarts)
        super()._restart_workers(worker_group)

    def statuses(self) -> dict[int, int]:
        """Return how each rank of this machine ended: its exit code, or minus a signal."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {
            worker.global_rank: handlers[worker.local_rank].proc.returncode
            for worker in self._worker_group.workers
            if worker.local_rank in handlers and handlers[worker.local_rank].proc.returncode is not None
        }

    def _rank_ended(self, log: RankLog) -> None:
        """Tell the other machines about the first failure, and end ranks on this one that do not end by themselves."""
        # The end of a process may only be seen after the ranks were restarted, under the same numbers.
        stale = self._supervisor.streams.ranks.get(log.rank) is not log
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        if self._failing or stale or handlers[log.local_rank].proc.wait() == 0:  # it has ended: nothing is waited for
            return
        self._failing = True  # only the first failure counts
        self._machines.announce(log.rank)
        self._supervisor.kill_after(GRACE_S)


def _raise_signal(number: signal.Signals) -> None:
    """End the agent's wait as it expects: it sends the signal to every group, and waits for the ranks."""
    raise SignalException(f"The launcher got {number.name}", number)


def run_elastic(settings: Settings, environment: Mapping[str, str]) -> int:
    """Start this machine's processes, wait for them, and report a failure.

    Raises:
        ConfigurationError: The folder for logs cannot be used.
        LaunchError: The processes could not be started, or the machines did not find each other.
    """
    command = script_command(settings)
    if not settings["no_python"]:
        # What Python buffers for a pipe is lost when a rank is killed:
        # https://docs.python.org/3/using/cmdline.html#cmdoption-u
        command.insert(1, "-u")
    agent: _SupervisedAgent | None = None
    failed = True
    with Supervisor(settings, command, _raise_signal) as supervisor:
        machines = OtherMachines(settings, supervisor)
        rendezvous: RendezvousHandler | None = None
        try:
            # torch's agent handles the signals that this names; an inherited value may leave some of them out.
            write("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(number.name for number in SIGNALS))
            rendezvous = rendezvous_of(settings, settings.layout)
            spec = WorkerSpec(
                role=str(settings["role"]),
                local_world_size=settings.layout.per_machine,
                entrypoint=command[0],
                args=tuple(command[1:]),
                rdzv_handler=rendezvous,
                max_restarts=int(settings["max_restarts"]),
                monitor_interval=float(settings["monitor_interval"]),
            )
            agent = _SupervisedAgent(supervisor, machines, spec, _FollowedStreams(supervisor, environment))
            with torch_loggers(talk=bool(settings["debug"])):
                result: RunResult | None = agent.run(spec.role)  # None if the machines agreed to end without a result
            failed = result is None or result.is_failed()
            if result is not None and failed:  # machines that agreed to end know why
                machines.announce(min(result.failures))
        except SignalException as signaled:
            # torch's own handler caught it if it came while the processes were being started.
            supervisor.signals.first = supervisor.signals.first or signal.Signals(signaled.sigval)
        except (RendezvousTimeoutError, RendezvousConnectionError, RendezvousClosedError) as error:
            raise LaunchError(
                f"The machines did not find each other; the rendezvous reports: {error}. Check --main-process-ip, "
                "--main-process-port and that every machine was started."
            ) from None
        finally:
            supervisor.signals.ignore()
            machines.close()
            if rendezvous is not None:
                leave(rendezvous)
    flush_output()  # before the report, which goes past Python's buffers
    supervisor.elsewhere = machines.failure
    if not failed:
        return supervisor.succeed()
    status = supervisor.report(agent.statuses() if agent is not None else {})
    machines.end_job()
    return status


def rendezvous_of(settings: Settings, layout: ProcessLayout) -> RendezvousHandler:
    """Return where the launchers of a run meet, as soon as machine 0 can be reached."""
    if layout.machines == 1:
        return LocalRendezvous(uuid.uuid4().hex, int(settings["main_process_port"] or 0))
    configuration: dict[str, Any] = dict(
        part.partition("=")[::2] for part in str(settings["rdzv_conf"]).split(",") if part.strip()
    )
    backend = str(settings["rdzv_backend"])
    # torch's static rendezvous knows one number of machines only, so a range needs c10d:
    # https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
    if layout.fewest_machines != layout.machines and not settings.is_set("rdzv_backend"):
        backend = "c10d"
    host, port = str(settings["main_process_ip"]), int(settings["main_process_port"])
    own = layout.machine_rank == 0 and (backend == "static" or settings.is_set("machine_rank"))
    if backend in ("static", "c10d") and (own or layout.machine_rank > 0):
        seconds = float(configuration.get("timeout", 300))
        pods = "KUBERNETES_SERVICE_HOST" in settings.inherited
        check_main_machine(host, port, own=own, seconds=seconds, named_later=pods)
    return machines_rendezvous(
        backend,
        f"{host}:{port}",
        str(settings["rdzv_id"] or "accel"),
        (layout.fewest_machines, layout.machines),
        own_address(host, port),
        layout.machine_rank if backend == "static" or settings.is_set("machine_rank") else None,
        configuration,
    )
