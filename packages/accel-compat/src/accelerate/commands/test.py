"""The names of `accelerate.commands.test` in Accelerate, imported from where accel defines them."""

from accelerate import _rebinding
from accelerate._command_functions import test_command as test_command
from accelerate._command_functions import test_command_parser as test_command_parser
from accelerate._commands import main_test as main

_rebinding.write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
