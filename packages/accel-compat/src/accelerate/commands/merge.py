"""The names of `accelerate.commands.merge` in Accelerate, imported from where accel defines them."""

from accelerate import _commands, _rebinding
from accelerate._command_functions import merge_command as merge_command
from accelerate._command_functions import merge_command_parser as merge_command_parser
from accelerate._commands import main_merge as main
from accelerate._weights_merging import merge_fsdp_weights as merge_fsdp_weights

description = _commands.merge_description

_rebinding.write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
