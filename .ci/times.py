"""Keep the seconds of a session and of each of its tests, and show the tests that cost most.

The noxfile calls it as `times.py .nox/times.json SESSION RESULTS`, with pytest's results in JUnit's form.
"""

import fcntl
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

SHOWN = 10


def main(kept: Path, session: str, results: Path) -> None:
    """Take a session's times from pytest's results in JUnit's form."""
    suite = ElementTree.parse(results).getroot()[0]
    tests = {f"{case.get('classname')}::{case.get('name')}": float(case.get("time", 0)) for case in suite}
    with kept.open("a+") as file:  # sessions that run at the same time take turns
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        times = json.loads(file.read() or "{}")
        times[session] = {"seconds": float(suite.get("time", 0)), "tests": tests}
        file.truncate(0)
        json.dump(times, file, indent=1, sort_keys=True)
    total = sum(tests.values())
    costly = sorted(tests.items(), key=lambda one: -one[1])[:SHOWN]
    print(f"{len(tests)} tests took {total:.0f} s of processes; of these:")
    for name, seconds in costly:
        print(f"{seconds:8.1f} s {seconds / (total or 1):6.1%}  {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
