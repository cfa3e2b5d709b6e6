"""The memory of training needs accel-parallel, an extra of this package: without it these files are left out."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("accel_parallel") else ["test_*.py"]
