"""The names of `accelerate.commands.estimate` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.estimate import add_timm_hub_prefix as add_timm_hub_prefix
from accel_bigmodel.estimate import create_ascii_table as create_ascii_table
from accel_bigmodel.estimate import create_empty_model as create_empty_model
from accel_bigmodel.estimate import estimate_command as estimate_command
from accel_bigmodel.estimate import estimate_command_parser as estimate_command_parser
from accel_bigmodel.estimate import estimate_training_usage as estimate_training_usage
from accel_bigmodel.estimate import gather_data as gather_data
from accel_bigmodel.meta import init_empty_weights as init_empty_weights
from accel_bigmodel.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel_core.host.availability import is_timm_available as is_timm_available
from accel_core.host.availability import is_transformers_available as is_transformers_available
from accelerate import _rebinding
from accelerate._commands import main_estimate as main
from accelerate._hub import check_has_model as check_has_model
from accelerate._hub import verify_on_hub as verify_on_hub
from accelerate._machine import convert_bytes as convert_bytes

_rebinding.write_through(__name__)

if __name__ == "__main__":
    raise SystemExit(main())
