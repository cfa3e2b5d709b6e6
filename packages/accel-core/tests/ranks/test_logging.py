"""Loggers and generators on real gloo ranks."""

import logging

import torch

from accel_core.comm.objects import gather_object
from accel_core.logging import get_logger
from accel_core.options.enums import RNGType
from accel_core.process.world import ensure
from accel_core.random import synchronize_rng_state, synchronize_rng_states
from accel_testing import world


@world(2)
def test_who_writes(tmp_path):
    """The main process writes by default, all with main_process_only=False, and one after the other with in_order."""
    rank = ensure().rank
    logger = get_logger("accel.test.ranks", log_level="INFO")
    handler = logging.FileHandler(tmp_path / "log")
    handler.setFormatter(logging.Formatter("%(message)s %(filename)s %(funcName)s"))
    logger.logger.addHandler(handler)
    logger.info("main %s", "only")
    gather_object([])
    logger.info("ordered", in_order=True)
    written = (tmp_path / "log").read_text().splitlines()
    place = "test_logging.py test_who_writes"
    assert written == [f"[RANK 0] main only {place}", f"[RANK 0] ordered {place}", f"[RANK 1] ordered {place}"]
    gather_object([rank])
    logger.info("all", main_process_only=False)
    gather_object([rank])
    written = (tmp_path / "log").read_text().splitlines()
    assert sorted(written[3:]) == [f"[RANK 0] all {place}", f"[RANK 1] all {place}"]


@world(2)
def test_generators_follow_rank_0():
    """After synchronization torch's generator and one of our own draw the same numbers on all ranks."""
    rank = ensure().rank
    torch.manual_seed(100 + rank)
    generator = torch.Generator().manual_seed(7 + rank)
    synchronize_rng_states(["torch", RNGType.GENERATOR], generator=generator)
    drawn = gather_object([(torch.rand(3).tolist(), torch.rand(3, generator=generator).tolist())])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] == torch.rand(3, generator=torch.Generator().manual_seed(100)).tolist()
    torch.manual_seed(rank)
    synchronize_rng_state(RNGType.TORCH)
    drawn = gather_object([torch.rand(3).tolist()])
    assert drawn[0] == drawn[1]
