"""The names of accel_plan, which are imported when they are first used. Written by `nox -s stubs`."""

from accel_plan._version import __version__ as __version__
from accel_plan.device_map import Plan as Plan
from accel_plan.device_map import plan_device_map as plan_device_map
from accel_plan.headroom import Workload as Workload
