"""A DeepSpeed configuration as a nested dict that is read by dotted keys."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from typing import Any

from accel_core.errors import ConfigurationError

_OFFLOADING = ("cpu", "nvme")


class HfDeepSpeedConfig:
    """A DeepSpeed configuration.

    A dotted key names a place in the nested dicts: "zero_optimization.stage". See DeepSpeed's "Configuration JSON".

    Raises:
        ConfigurationError: It is none of these.
    """

    def __init__(self, config_file_or_dict: dict[str, Any] | str | os.PathLike[str]) -> None:
        self.config: dict[str, Any] = _load(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the ZeRO stage and offloading, for `is_zero2`, `is_zero3` and `is_offload`."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = (
            self.get_value("zero_optimization.offload_optimizer.device"),
            self.get_value("zero_optimization.offload_param.device"),
        )
        self._offload = (self.is_zero2() or self.is_zero3()) and any(device in _OFFLOADING for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Find the dict that holds a key."""
        *way, last = ds_key_long.split(".")
        node: Any = self.config
        for part in way:
            node = node.get(part)
            if not isinstance(node, dict):
                return None, last
        return node, last

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return the value of a dotted key."""
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a dotted key and everything below it.

        Raises:
            ConfigurationError: The key is missing and must exist.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ConfigurationError(
                f"The DeepSpeed configuration has no {ds_key_long!r} to delete; got {self.config}. Check the key."
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a key exists and its value counts as true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a key exists and its value counts as false; a missing key or null does not."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether gradients are sharded and parameters are not."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Return whether parameters are sharded."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Return whether parameters or optimizer states live outside the device."""
        return self._offload


def _load(source: object) -> dict[str, Any]:
    if isinstance(source, dict):
        return copy.deepcopy(source)
    found: object = None
    if isinstance(source, (str, os.PathLike)):
        found = _read_file(source) if os.path.isfile(source) else _read_text(str(source))
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"A DeepSpeed configuration cannot be read; got {source!r}. "
            "Use a dict, the path of an existing JSON file, or JSON text in URL-safe base64."
        )
    return found


def _read_file(path: str | os.PathLike[str]) -> object:
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise ConfigurationError(
                f"A DeepSpeed configuration is not JSON; got {os.fspath(path)!r} ({error}). Correct the file."
            ) from None


def _read_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return json.loads(base64.urlsafe_b64decode(text).decode("utf-8"))
    except (binascii.Error, ValueError):
        return None
