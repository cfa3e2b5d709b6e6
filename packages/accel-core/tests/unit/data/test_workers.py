"""Worker processes and the signal that asks a rank to end."""

import os
import signal
import subprocess
import sys

import pytest
from torch.utils.data import DataLoader

from accel_core.data.prepare import prepare_data_loader
from accel_core.data.workers import IgnoreSigterm, ignore_sigterm
from accel_testing import limits

SEND = "import os, sys; os.kill(int(sys.argv[1]), 15)"


def own_init(worker_id: int) -> None:
    """Be what a user gives a loader; says that it was called through the environment of the worker."""
    os.environ["ACCEL_TEST_WORKER"] = str(worker_id)


class Asking:
    """A dataset whose samples are whether the worker was initialized."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return int(os.environ.get("ACCEL_TEST_WORKER") == "0")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_state")
def test_a_signal_to_all_processes_of_a_rank_spares_its_workers() -> None:
    """Where the rank handles SIGTERM itself, a worker survives one from elsewhere; one from its rank ends it."""
    before = signal.signal(signal.SIGTERM, lambda *call: None)
    try:
        plain = DataLoader(
            Asking(), num_workers=1, worker_init_fn=own_init, persistent_workers=True, multiprocessing_context="fork"
        )
        loader = prepare_data_loader(plain, num_processes=1, process_index=0)
        batches = iter(loader)
        assert next(batches).item() == 1
        (worker,) = loader._iterator._workers
        subprocess.run([sys.executable, "-S", "-c", SEND, str(worker.pid)], check=True)
        assert [batch.item() for batch in batches] == [1] * 39
        assert [batch.item() for batch in loader] == [1] * 40
        assert worker.is_alive()
        worker.terminate()
        worker.join(limits.limit())
        assert worker.exitcode == 0
        loader._iterator = None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_workers_are_left_alone_where_nobody_handles_the_signal() -> None:
    """Without a handler, and for a loader that is read again, nothing is wrapped."""
    assert ignore_sigterm(None) is None
    assert ignore_sigterm(own_init) is own_init
    before = signal.signal(signal.SIGTERM, lambda *call: None)
    try:
        once = ignore_sigterm(own_init)
        assert isinstance(once, IgnoreSigterm)
        assert ignore_sigterm(once) is once
    finally:
        signal.signal(signal.SIGTERM, before)
