"""What accelerate 1.15.0 gives, as it was recorded: running it takes as long as all that is compared with it.

`ACCEL_RECORD_PEER=1 nox -s second -- tests-integration/equivalence` records it anew.
"""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEER = os.environ.get("ACCEL_PEER_PYTHON")
FOLDER = Path(__file__).with_name("peer")


def theirs(name: str, live: bool, run: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what the original gives on each rank: what is kept, which is what it gives now where it is run live."""
    file = FOLDER / f"accelerate-1.15.0-{name}.json.gz"
    found = run(PEER) if live and PEER else None
    if found is not None and os.environ.get("ACCEL_RECORD_PEER"):
        FOLDER.mkdir(exist_ok=True)
        file.write_bytes(gzip.compress(json.dumps(found, sort_keys=True).encode(), mtime=0))
    kept: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))
    assert found is None or found == kept, f"the original does not give what is kept in {file.name}"
    return kept
