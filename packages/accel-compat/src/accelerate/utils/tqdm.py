"""The names of `accelerate.utils.tqdm` in Accelerate, imported from where accel defines them."""

from accel_core.state.process import PartialState as PartialState
from accel_core.tqdm import tqdm as tqdm
from accelerate import _rebinding
from accelerate._availability import is_tqdm_available as is_tqdm_available

_rebinding.write_through(__name__)
