"""The torch part of launching: one elastic agent in this process, watched like a single command.

Imported only when processes are about to start. On one machine the agent's own store is the meeting point of the
ranks: it binds a free port itself and hands it on, so no port is ever chosen first and taken by somebody else in
    between.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from accel_core.errors import LaunchError
from accel_core.host.environ import write
from accel_launch.launchers.launcher import script_command
from accel_launch.launchers.preflight import check_agreement, check_main_machine, facts_of_machine, own_address
from accel_launch.settings.layout import Layout, layout_of
from accel_launch.settings.resolve import Settings
from accel_launch.supervision.guard import RUN_VARIABLE, Guard, end_group, sweep
from accel_launch.supervision.outcome import MemoryKills, endings, first_failure, shell_status, want_restart
from accel_launch.supervision.report import failure_record, report_failure, report_left_behind
from accel_launch.supervision.run import HANDED_ON, PATIENCE, SIGNALS, marks
from accel_launch.supervision.streams import RankLog, Streams
from accel_launch.supervision.watchdog import Watchdog

__all__ = ["run_elastic"]

_GRACE = 5.0
"""Seconds that the other ranks have to end by themselves once one has failed."""

_LOOKS = 100
"""How often, at an interval of 10 ms, it is asked for an exit status that the agent is about to note."""


class _LocalRendezvous(RendezvousHandler):
    """Meeting point of one machine: a store on a port that the system chose."""

    def __init__(self, run_id: str, port: int) -> None:
        self._run_id = run_id
        self._round = 0
        try:
            self._store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=300), False)
        except RuntimeError as error:
            raise LaunchError(
                f"The processes cannot meet on port {port}; the system says: {str(error).splitlines()[0]}. Say another "
                "--main-process-port, or none to get a free one."
            ) from None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "local"

    def next_rendezvous(self) -> RendezvousInfo:
        for key in self._store.list_keys():  # ranks that start again must not find the addresses of those before them
            self._store.delete_key(key)
        self._round += 1
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class _FollowedStreams(LogsSpecs):
    """Gives every rank the streams that the launcher reads."""

    def __init__(self, run: "_Run", variables: Mapping[str, str]) -> None:
        super().__init__()
        self._run = run
        self._variables = variables

    @property
    def root_log_dir(self) -> str:
        return str(self._run.log_dir or "")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        paths: dict[str, dict[int, str]] = {"stdout": {}, "stderr": {}}
        for local_rank, variables in envs.items():
            rank = int(variables["RANK"])
            variables.update(self._variables)
            if self._run.dog is not None:
                variables.update(self._run.dog.variables(local_rank))
            streams = self._run.streams
            log = streams.add_rank(rank, local_rank)
            wanted = marks(self._run.settings, local_rank)
            for stream, chosen in paths.items():
                follow = stream in wanted
                chosen[local_rank] = streams.follow(log, stream, mark=wanted[stream]).child_path if follow else ""
        self._run.failed.clear()
        return LogsDest(paths["stdout"], paths["stderr"], {}, {}, dict.fromkeys(envs, ""))


class _Agent(LocalElasticAgent):
    """torch's agent, telling the launcher about every process that it starts."""

    def __init__(self, run: "_Run", spec: WorkerSpec, logs_specs: LogsSpecs) -> None:
        super().__init__(spec, logs_specs, shutdown_timeout=int(PATIENCE))
        self._run = run

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        self._run.met(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._run.attempt = worker_group.spec.max_restarts - self._remaining_restarts
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for worker in worker_group.workers:
            self._run.started(worker.global_rank, pids[worker.local_rank])
        return pids

    def statuses(self) -> dict[int, int]:
        """Return how each rank of this machine ended: its exit code, or minus a signal."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {
            worker.global_rank: handlers[worker.local_rank].proc.returncode
            for worker in self._worker_group.workers
            if worker.local_rank in handlers and handlers[worker.local_rank].proc.returncode is not None
        }


class _Run:
    """One launch: what is known about it while it runs and what is said when it ends."""

    def __init__(self, settings: Settings, run_id: str) -> None:
        self.settings = settings
        self.run_id = run_id
        self.attempt = 0
        self.agent: _Agent | None = None
        self.failed: set[int] = set()
        self.reasons: list[str] = []
        self.log_dir = Path(settings["log_dir"]) if settings["log_dir"] else None
        self.streams = Streams(self.log_dir, on_end=self._ended)
        self.memory = MemoryKills()
        self.guard = Guard(run_id)
        self.dog: Watchdog | None = None
        if settings["watchdog"]:
            self.dog = Watchdog(
                float(settings["watchdog"]),
                self.streams.ranks.values,
                lambda: self.reasons.append("watchdog"),
                quiet=bool(settings["quiet"]),
            )
        self._began = time.monotonic()
        self._killer: threading.Timer | None = None
        self._layout = layout_of(settings)
        self._over = threading.Event()
        self._store: Any = None
        self._listener: threading.Thread | None = None
        self._told = False
        self.elsewhere = ""

    def met(self, group: WorkerGroup) -> None:
        """Compare the machines that met, and listen for the failure of another one."""
        machines, own = int(group.group_world_size or 1), int(group.group_rank or 0)
        if machines < 2:
            return
        facts = facts_of_machine(self.settings.script, layout_of(self.settings).processes)
        elastic = self._layout.fewest_machines != self._layout.machines
        check_agreement(group.store, own, machines, facts, elastic=elastic)
        if not self.settings["max_restarts"]:
            self._store = group.store
            self._listener = threading.Thread(
                target=self._listen, args=(group.store,), name="accel-machines", daemon=True
            )
            self._listener.start()

    def _listen(self, store: Any) -> None:
        while not self._over.wait(1.0):
            try:
                if not store.check([_FAILED]):
                    continue
                said = store.get(_FAILED).decode()
            except RuntimeError:
                said = "machine 0 is gone"
            if self._told:
                return
            self.elsewhere = said
            if not self._over.wait(2.0):
                logs = list(self.streams.ranks.values())
                for log in logs:
                    if log.pid and log.ended_at is None:
                        end_group(log.pid, signal.SIGTERM)
                self._over.wait(_GRACE)
                self._kill_rest(logs)
            return

    def tell_machines(self, rank: int) -> None:
        """Tell the launchers of the other machines that a rank of this one failed, unless one of theirs did before."""
        if self._store is not None and not self.elsewhere:
            self._told = True
            with contextlib.suppress(RuntimeError):
                self._store.set(_FAILED, f"rank {rank} failed on {socket.gethostname()}")

    def started(self, rank: int, pid: int) -> None:
        """Note that a rank's process runs."""
        self.guard.watch(pid)
        self.streams.started(self.streams.ranks[rank], pid)

    def _ended(self, log: RankLog) -> None:
        if self.failed or self.streams.ranks.get(log.rank) is not log or not self._went_wrong(log):
            return
        self.failed.add(log.rank)
        self.tell_machines(log.rank)
        self._killer = threading.Timer(_GRACE, self._kill_rest, [list(self.streams.ranks.values())])
        self._killer.daemon = True
        self._killer.start()

    def _went_wrong(self, log: RankLog) -> bool:
        """Tell whether a process that ended failed, also where the agent saw the end first and is about to note it."""
        with contextlib.suppress(ChildProcessError):
            seen = os.waitid(os.P_PID, log.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return seen is not None and seen.si_status != 0
        for _ in range(_LOOKS):
            status = self.agent.statuses().get(log.rank) if self.agent is not None else None
            if status is not None:
                return status != 0
            time.sleep(0.01)
        return False

    def hand_on(self, number: signal.Signals) -> None:
        """Send a signal to each rank, and not to what it started."""
        for log in list(self.streams.ranks.values()):
            if log.pid and log.ended_at is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(log.pid, number)

    @staticmethod
    def _kill_rest(logs: list[RankLog]) -> None:
        for log in logs:
            if log.pid and log.ended_at is None:
                end_group(log.pid, signal.SIGKILL)

    def close(self) -> None:
        """Leave no process behind, and read what was printed last."""
        self._over.set()
        if self._listener is not None:
            self._listener.join(_GRACE)  # a thread inside of torch's store when Python ends takes the process down
        if self.dog is not None:
            self.dog.stop()
        if self._killer is not None:
            self._killer.cancel()
        for log in self.streams.ranks.values():
            if log.pid:
                end_group(log.pid, signal.SIGTERM)
        left = sweep(self.run_id)
        if left and not self.settings["quiet"]:
            report_left_behind(left)
        self.streams.stop(patience=_GRACE)
        self.guard.release()

    def report(self, statuses: Mapping[int, int], command: list[str], said: signal.Signals | None) -> int:
        """Write the record of a failure, tell a person, and return the exit status."""
        if said is not None:
            self.reasons.append(said.name)
        logs = {rank: log for rank, log in self.streams.ranks.items() if rank in statuses}
        raw = endings(logs, statuses, [], self.memory)
        first = first_failure(raw)
        stopped = [
            ending.rank
            for ending in raw
            if self.reasons
            or self.elsewhere
            or (first is not None and ending.rank != first.rank and ending.status in _OURS)
        ]
        ended = endings(logs, statuses, stopped, self.memory)
        reason = self.reasons[0] if self.reasons else "failure"
        if self.elsewhere:
            reason = f"another machine: {self.elsewhere}"
        record = failure_record(
            ended,
            run_id=self.run_id,
            command=command,
            seconds=time.monotonic() - self._began,
            reason=reason,
            attempt=self.attempt,
        )
        report_failure(ended, logs, record, log_dir=self.log_dir, quiet=bool(self.settings["quiet"]))
        if said is not None and not want_restart(ended):
            return shell_status(-said)
        if reason == "watchdog":
            return shell_status(-signal.SIGABRT)
        return shell_status(first.status) if first is not None else 1


_FAILED = "accel/failed"
_OURS = (-signal.SIGTERM, -signal.SIGKILL)


def run_elastic(settings: Settings, environment: Mapping[str, str]) -> int:
    """Start this machine's processes, see them through, and report a failure.

    Args:
        settings: Settings of the run.
        environment: Variables that the processes get beyond what they inherit and their ranks.

    Returns:
        The exit status for the shell: that of the rank that failed first, 128 + N after signal N, 0 if all went well.

    Raises:
        LaunchError: The processes could not be started, or the machines did not find one another.
    """
    run_id = uuid.uuid4().hex
    layout = layout_of(settings)
    run = _Run(settings, run_id)
    _hush(bool(settings["debug"]))
    variables = {**environment, RUN_VARIABLE: run_id}
    command = script_command(settings)
    if not settings["no_python"]:
        command.insert(1, "-u")
    result: RunResult | None = None
    said: signal.Signals | None = None
    agent: _Agent | None = None
    try:
        spec = WorkerSpec(
            role=str(settings["role"]),
            local_world_size=layout.per_machine,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=_rendezvous(settings, layout, run_id),
            max_restarts=int(settings["max_restarts"]),
            monitor_interval=float(settings["monitor_interval"]),
            local_addr=_local_address(settings, layout),
        )
        write("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(number.name for number in SIGNALS))
        agent = run.agent = _Agent(run, spec, _FollowedStreams(run, variables))
        for number in HANDED_ON:
            signal.signal(number, lambda number, _: run.hand_on(signal.Signals(number)))
        result = agent.run(spec.role)
        if result.is_failed():
            run.tell_machines(min(result.failures))
    except SignalException as signalled:
        said = signal.Signals(signalled.sigval)
    except (RendezvousTimeoutError, RendezvousConnectionError, RendezvousClosedError) as error:
        raise LaunchError(
            f"The machines did not find one another; the rendezvous says: {error}. Check --main-process-ip, "
            "--main-process-port and that every machine was started."
        ) from None
    finally:
        for number in (*SIGNALS, *HANDED_ON):
            signal.signal(number, signal.SIG_IGN)
        run.close()
    sys.stdout.flush()
    if said is None and result is not None and not result.is_failed():
        return 0
    return run.report(agent.statuses() if agent is not None else {}, command, said)


def _rendezvous(settings: Settings, layout: Layout, run_id: str) -> RendezvousHandler:
    if layout.machines == 1:
        return _LocalRendezvous(run_id, int(settings["main_process_port"] or 0))
    configuration: dict[str, Any] = dict(
        part.partition("=")[::2] for part in str(settings["rdzv_conf"]).split(",") if part.strip()
    )
    backend = str(settings["rdzv_backend"])
    if layout.fewest_machines != layout.machines and not settings.explicit("rdzv_backend"):
        backend = "c10d"
    configuration.setdefault("rank", layout.machine_rank)
    host, port = str(settings["main_process_ip"]), int(settings["main_process_port"])
    own = layout.machine_rank == 0 and (backend == "static" or settings.explicit("machine_rank"))
    if backend in ("static", "c10d") and (own or layout.machine_rank > 0):
        check_main_machine(host, port, own=own, seconds=float(configuration.get("timeout", 300)))
    if backend == "c10d" and settings.explicit("machine_rank"):
        configuration.setdefault("is_host", str(layout.machine_rank == 0))
    configuration.setdefault("timeout", 900)
    parameters = RendezvousParameters(
        backend=backend,
        endpoint=f"{host}:{port}",
        run_id=str(settings["rdzv_id"] or "accel"),
        min_nodes=layout.fewest_machines,
        max_nodes=layout.machines,
        local_addr=_local_address(settings, layout),
        **configuration,
    )
    return rendezvous_registry.get_rendezvous_handler(parameters)


def _local_address(settings: Settings, layout: Layout) -> str | None:
    if layout.machines == 1:
        return "127.0.0.1"
    return own_address(str(settings["main_process_ip"]), int(settings["main_process_port"]))


def _hush(talk: bool) -> None:
    level = logging.INFO if talk else logging.CRITICAL
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(level)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(level)
