"""Run one benchmark and put what it prints into its section of RESULTS.md.

    python benchmarks/record.py SUBJECT [--peer PYTHON]
    python benchmarks/record.py SUBJECT --taken FILE

A benchmark is a file `benchmarks/SUBJECT.py`. It is run as `python benchmarks/SUBJECT.py --peer PYTHON`, where PYTHON
has accelerate 1.15.0 installed and none of the packages of this repository, and prints a table in Markdown: what was
measured as rows; accel, plain PyTorch or the physical limit, and the peer as columns. It measures them side by side in
the same run, in turns, because a machine is not equally fast all day. What it writes to stderr is shown and not kept.
With --taken, the table is one that was measured before, maybe on another machine, from the JSON that was written there.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"


def processor() -> str:
    """Return the processor's name, as the system gives it."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or "unknown processor"


def section(subject: str, table: str, command: str, day: str, machine: str) -> str:
    """Return the section of RESULTS.md: the title, the command, when and where it was measured, and the table."""
    first_line = (HERE / f"{subject}.py").read_text().lstrip('"').splitlines()[0].rstrip('"').rstrip(".")
    return f"## {first_line}\n\n`{command}`, {day}, {machine}\n\n{table.strip()}\n"


def taken(file: Path) -> tuple[str, str, str]:
    """Return the table that a benchmark left in a file, the day and the machine.

    Raises:
        ValueError: It is of a dry run, which measured nothing, or the file holds something else.
    """
    found = json.loads(file.read_text())
    if not isinstance(found, dict) or found.get("dry_run") is not False:
        raise ValueError(f"Only what was measured goes into RESULTS.md; got a dry run, or no measurement, in {file}.")
    return found["table"], found["day"], found["machine"]


def placed(results: str, subject: str, text: str) -> str:
    """Put a section in place of the subject's old one, or behind the others."""
    begin, end = f"<!-- {subject} -->\n", f"<!-- end of {subject} -->\n"
    block = f"{begin}{text}{end}"
    if begin in results:
        before, _, rest = results.partition(begin)
        return before + block + rest.partition(end)[2]
    return f"{results.rstrip()}\n\n{block}"


def main() -> int:
    """Run the benchmark that the command line names and keep its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject")
    parser.add_argument("--peer", help="a Python that has accelerate 1.15.0 installed")
    parser.add_argument("--taken", type=Path, help="a JSON file that the benchmark wrote; nothing is measured then")
    args = parser.parse_args()
    script = HERE / f"{args.subject}.py"
    if not script.is_file() or args.subject == "record":
        names = sorted(path.stem for path in HERE.glob("*.py") if path.stem != "record")
        print(f"There is no benchmark {args.subject!r}. Choose one of {', '.join(names)}.", file=sys.stderr)
        return 2
    if args.taken:
        try:
            table, day, machine = taken(args.taken)
        except ValueError as refusal:
            print(f"{refusal} RESULTS.md is unchanged.", file=sys.stderr)
            return 2
        text = section(args.subject, table, f"nox -s {args.subject}", day, machine)
        RESULTS.write_text(placed(RESULTS.read_text(), args.subject, text))
        return 0
    command = [sys.executable, str(script), *(["--peer", args.peer] if args.peer else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(f"{script.name} ended with status {done.returncode}; RESULTS.md is unchanged.", file=sys.stderr)
        return done.returncode
    print(done.stdout)
    machine = f"{os.cpu_count()} cores of {processor()}, Python {platform.python_version()}, torch {version('torch')}"
    day, command_shown = datetime.date.today().isoformat(), f"nox -s bench -- {args.subject}"
    text = section(args.subject, done.stdout, command_shown, day, machine)
    RESULTS.write_text(placed(RESULTS.read_text(), args.subject, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
