"""Whether the hub can be reached: the libraries that ask it try for half a minute if nothing answers."""

import importlib
import socket
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from accel_core.errors import CheckpointNotFoundError, ConfigurationError
from accel_core.host import environ
from accel_core.host.availability import has_module

__all__ = ["in_one_line", "is_cached", "not_in_cache", "why_unreachable"]

_HUB = "https://huggingface.co"
_PORTS = {"https": 443, "socks4": 1080, "socks5": 1080, "socks5h": 1080}
_ATTEMPT = 1.0
"""Seconds for an attempt to connect, for each address that the host has."""


class _Address(NamedTuple):
    """An address that accepts connections."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        """Write it without the port that its scheme implies."""
        return self.host if self.port == _PORTS.get(self.scheme, 80) else f"{self.host}:{self.port}"


def why_unreachable() -> str | None:
    """Return why the hub cannot be reached, after trying to connect to it or to its proxy.

    Raises:
        ConfigurationError: When the hub's or the proxy's address in the environment cannot be read.
    """
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environ.flag(name):
            return f"{name} in the environment"
    hub = _address_of(environ.text("HF_ENDPOINT") or _HUB)
    proxies = getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(hub.host):
        address = _address_of(proxy)
        return None if _answers(address) else f"no answer from the proxy {address}"
    return None if _answers(hub) else f"no answer from {hub}"


def is_cached(name: str) -> bool:
    """Return whether the hub's cache holds a model's configuration."""
    if not has_module("huggingface_hub"):
        return False
    repository, _, revision = name.partition("@")
    hub = importlib.import_module("huggingface_hub")
    return isinstance(hub.try_to_load_from_cache(repository, "config.json", revision=revision or None), str)


def not_in_cache(name: str, reason: str) -> CheckpointNotFoundError:
    """Return the error for a model that only the hub has."""
    return CheckpointNotFoundError(
        f"The hub cannot be asked for the model; got {reason}, and {name!r} is neither a local path nor in the hub's "
        "cache. Connect, or name a local checkpoint or configuration."
    )


def in_one_line(failure: Exception) -> str:
    """Return the message of a library's error in one line that ends with a full stop."""
    return " ".join(str(failure).split()).rstrip(".") + "."


def _address_of(text: str) -> _Address:
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None:
        # The part before the last @ may be a password.
        raise ConfigurationError(
            f"The address of the hub or of a proxy cannot be read; got {text.rpartition('@')[2]!r}. Write "
            "https://host:port into HF_ENDPOINT or the proxy's variable."
        )
    return _Address(parts.scheme, host, port or _PORTS.get(parts.scheme, 80))


def _answers(address: _Address) -> bool:
    """Return whether a connection is accepted, within seconds."""
    try:
        with socket.create_connection((address.host, address.port), timeout=_ATTEMPT):
            return True
    except OSError:
        return False
