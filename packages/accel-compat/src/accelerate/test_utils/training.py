"""The names of `accelerate.test_utils.training` in Accelerate, imported from where they are defined."""

from accelerate import _rebinding
from accelerate._regression import RegressionDataset as RegressionDataset
from accelerate._regression import RegressionModel as RegressionModel

_rebinding.write_through(__name__)
