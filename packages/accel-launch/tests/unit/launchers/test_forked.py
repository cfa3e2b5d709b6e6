"""What forked ranks record of their exceptions."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from accel_launch.launchers.forked import first_exception


def test_file_of_a_stopped_rank_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed while its exception is recorded leaves half a file; a rank that raised none has no file."""
    files = {rank: tmp_path / f"{rank}.json" for rank in range(3)}
    for rank in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[rank]))
        try:
            raise ValueError(f"rank {rank}")
        except ValueError as error:
            ErrorHandler().record_exception(error)
    files[0].write_bytes(files[0].read_bytes()[:40])
    first = first_exception(files)
    assert first.startswith("Rank 1 failed first")
    assert "ValueError: rank 1" in first
