"""The row by which accel knows torchft; imports nothing of it."""

from accel_core.options.engines import Engine

ENGINE = Engine(
    "replicas",
    "replicas that come and go",
    "torchft",
    "0.2.0",
    settings="accel_torchft.launching.settings:SETTINGS",
    extension="accel_torchft.extension:ReplicaExtension",
)
