"""The names of `accelerate.commands.merge` in Accelerate, imported from where accel defines them."""

from accelerate._command_functions import (
    merge_command,
    merge_command_parser,
)
from accelerate._commands import (
    main_merge as main,
)
from accelerate._commands import (
    merge_description as description,
)
from accelerate._rebinding import write_through
from accelerate._weights_merging import (
    merge_fsdp_weights,
)

__all__ = [
    "description",
    "main",
    "merge_command",
    "merge_command_parser",
    "merge_fsdp_weights",
]

write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
