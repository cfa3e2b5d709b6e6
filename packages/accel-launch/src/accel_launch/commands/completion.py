"""`accel completion`: a script that lets the shell complete commands and options."""

import argparse
from importlib import import_module

from accel_core.errors import ConfigurationError
from accel_launch.arguments import Parser
from accel_launch.command import AnyCommand, Command

__all__ = ["COMMAND", "complete"]

_SCRIPTS = {
    "bash": """_accel_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(accel completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 0 ]] && COMPREPLY=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o filenames -F _accel_complete accel
""",
    "zsh": """#compdef accel
_accel() {
    local -a found
    found=("${(@f)$(accel completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    [[ -n "${found[1]}" ]] && compadd -a found || _files
}
compdef _accel accel
""",
    "fish": """complete -c accel -f -a '(accel completion --words (commandline -opc)[2..] (commandline -ct))'
complete -c accel -F
""",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--words", nargs=argparse.REMAINDER, default=None, help=argparse.SUPPRESS)
    parser.add_argument("shell", nargs="?", choices=tuple(_SCRIPTS), help="Your shell.")


def complete(words: list[str]) -> list[str]:
    """Return what may stand where the last word stands.

    Args:
        words: Words after `accel`, the last one unfinished.

    Returns:
        Commands for the first word; options, or the choices of the option before, for a later one.
    """
    cli = import_module("accel_launch.cli")
    current = words[-1] if words else ""
    if len(words) <= 1:
        names = sorted({*cli.BUILT_IN, *import_module("accel_launch.contributed").commands()})
        return [name for name in names if name.startswith(current)]
    command: AnyCommand = cli.find_command(words[0])
    parser: Parser = cli.build_parser(command)
    before = words[-2]
    for action in parser._actions:
        if before in action.option_strings and action.choices:
            return [str(choice) for choice in action.choices if str(choice).startswith(current)]
    if not current.startswith("-"):
        return []
    flags = [flag for action in parser._actions for flag in action.option_strings if "_" not in flag]
    return sorted(flag for flag in flags if flag.startswith(current))


def _run(args: argparse.Namespace) -> int:
    if args.words is not None:
        print("\n".join(complete(args.words)))
        return 0
    if args.shell is None:
        raise ConfigurationError(f"No shell was named. Use one of {', '.join(_SCRIPTS)}.")
    print(_SCRIPTS[args.shell], end="")
    return 0


COMMAND = Command(
    "completion",
    "Print the completion script for your shell.",
    _add_arguments,
    _run,
    "Put `source <(accel completion bash)` into ~/.bashrc.",
)
