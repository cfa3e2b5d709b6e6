"""The names of `accelerate.commands.test` in Accelerate, imported from where accel defines them."""

from accelerate._command_functions import (
    test_command,
    test_command_parser,
)
from accelerate._commands import (
    main_test as main,
)
from accelerate._rebinding import write_through

__all__ = [
    "main",
    "test_command",
    "test_command_parser",
]

write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
