"""Show, from the log of a nox run, what each session ended with: skips with their reasons and pytest's summary lines.

The session `tests` comes last, or one whose tests failed, so that the last line is pytest's own summary of it.
"""

import re
import sys
from pathlib import Path

SESSION = re.compile(r"nox > Running session (?P<name>\S+)")
ENDED = re.compile(r"nox > (?:\* )?(?P<name>[\w()-]+): (?P<how>success|failed|skipped|aborted)")
SUMMARY = re.compile(r"^=+ .*\b(passed|failed|error|errors|skipped|no tests ran)\b.* in [\d.]+s")
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def sections(log: str) -> dict[str, list[str]]:
    """Split a log by session: the lines of each, under its name, colors taken away."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in COLOR.sub("", log).splitlines():
        begin = SESSION.search(line)
        if begin:
            lines = found.setdefault(begin["name"], [])
        lines.append(line)
    return found


def main() -> None:
    """Print the closing lines of every session of the log that is named on the command line."""
    by_session = sections(Path(sys.argv[1]).read_text(errors="replace"))
    ended = [line for lines in by_session.values() for line in lines if ENDED.search(line)]
    tested: list[tuple[bool, bool, str, list[str]]] = []
    for name, lines in by_session.items():
        summaries = [line for line in lines if SUMMARY.match(line)]
        if summaries:
            failed = "failed" in summaries[-1] or "error" in summaries[-1]
            shown = [line for line in lines if line.startswith(("SKIPPED", "FAILED", "ERROR "))]
            tested.append((failed, name == "tests", name, [*dict.fromkeys(shown), summaries[-1]]))
    print("\n".join(line.removeprefix("nox > ") for line in ended))
    for _, _, name, lines in sorted(tested, key=lambda one: one[:2]):
        print(f"\n{name}:", *lines, sep="\n")


if __name__ == "__main__":
    main()
