"""`accel completion`: a script that lets the shell complete commands and options."""

import argparse
from collections.abc import Callable, Iterable

from accel_core.errors import ConfigurationError
from accel_launch.arguments import Parser

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("shell", nargs="?", choices=tuple(_SCRIPTS), help="Your shell.")


def complete(words: list[str], names: Iterable[str], parser_of: Callable[[str], Parser]) -> list[str]:
    """Return the completions of the last word."""
    current = words[-1] if words else ""
    if len(words) <= 1:
        return sorted(name for name in names if name.startswith(current))
    parser, before = parser_of(words[0]), words[-2]
    for word in words[1:-1]:
        parser = parser.subcommands().get(word, parser)
    for action in parser._actions:
        if before in action.option_strings and action.choices:
            return [str(choice) for choice in action.choices if str(choice).startswith(current)]
    if current.startswith("-"):
        flags = [flag for action in parser._actions for flag in action.option_strings if "_" not in flag]
    else:
        flags = [
            str(choice) for action in parser._actions if not action.option_strings for choice in action.choices or ()
        ]
    return sorted(flag for flag in flags if flag.startswith(current))


def script_for(shell: str | None) -> str:
    """Return the script that lets a shell complete `accel`."""
    if shell is None:
        raise ConfigurationError(f"No shell was named; known are {', '.join(_SCRIPTS)}. Name one.")
    return _SCRIPTS[shell]
