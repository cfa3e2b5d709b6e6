"""`accel doctor` as a person runs it: findings, remedies, exit status, and two ranks that really meet."""

import json
import os

import pytest

from accel_verify.diagnosis.collective import check_collective


@pytest.mark.full("every library at once")
def test_findings_of_this_machine(accel) -> None:
    """As JSON there is a finding for every part, two ranks meet, and a warning alone does not change the status."""
    done = accel("doctor", "--json", more={"ACCEL_NUM_PROCESESS": "2"}, quiet=30, status=0)
    found = json.loads(done.stdout)
    by_topic = {}
    for each in found["findings"]:
        by_topic.setdefault(each["topic"], []).append(each)
        assert bool(each["remedy"]) is (each["state"] != "ok"), each
    assert list(by_topic) == [
        "Python and packages", "Network", "Disk space", "Shared memory", "Open files", "Environment variables",
        "Configuration", "Libraries", "Devices", "Two ranks",
    ]  # fmt: skip
    assert by_topic["Environment variables"][0]["remedy"] == "Did you mean ACCEL_NUM_PROCESSES?"
    assert by_topic["Two ranks"][0]["what"].startswith("two ranks (--cpu) started and gathered in ")
    assert found["problems"] == 0, done.stdout


def test_a_problem_is_the_exit_status(accel) -> None:
    """A person sees the problem above its remedy, and the sum at the end; without torch no rank is started."""
    done = accel("doctor", "--timeout", "0.01", "--config-file", "none.yaml", forked=False, status=1)
    lines = done.stdout.splitlines()
    place = lines.index("  problem  The configuration file none.yaml does not exist")
    assert lines[place - 1] == "Configuration:"
    assert lines[place + 1].startswith("           -> Name one that does")
    assert lines[-1].endswith(" 2 problems.")
    assert "  problem  torch cannot be imported; got no result within 0.01 s" in lines
    assert "Two ranks" not in done.stdout


def test_ranks_that_cannot_meet() -> None:
    """Ranks that fail, and ranks that are not there in time, are problems; they are ended."""
    failing = check_collective("--cpu", {**os.environ, "GLOO_SOCKET_IFNAME": "no-such-interface"}, 120)
    assert (failing.state, "failed with status 1" in failing.what) == ("problem", True)
    assert failing.remedy.startswith("See all that they print: `accel launch --cpu")
    late = check_collective("--cpu", os.environ, 0.2)
    assert (late.state, late.what) == ("problem", "two ranks (--cpu) did not gather within 0.2 s")
