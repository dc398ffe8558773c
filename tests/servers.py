"""Index servers that tests start for themselves: the embedded Valkey, and Debian's redis-server
where it is installed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

import pytest
import redis

from pipeline.index.embedded import die_with_parent
from tests.ports import free_port

REDIS = shutil.which("redis-server")
WITHOUT_REDIS = "redis-server is not installed (Debian: apt install redis-server)"


class RedisServer:
    """``redis-server`` on a free port of loopback, with a password, and inside TLS when
    ``certificate`` is the directory of cert.pem and key.pem. Its data (append-only file) lie in
    ``directory``."""

    def __init__(self, directory: Path, *, password: str, certificate: Path | None = None) -> None:
        self.directory = directory
        self.password = password
        self.certificate = certificate
        self.port = free_port()
        authority = f":{password}@localhost:{self.port}"
        self.url = f"redis://{authority}"
        if certificate is not None:
            self.url = f"rediss://{authority}?ssl_ca_certs={certificate / 'cert.pem'}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert REDIS is not None, WITHOUT_REDIS
        options = {
            "bind": "127.0.0.1",
            "requirepass": self.password,
            "dir": str(self.directory),
            "save": "",
        }
        options |= {"appendonly": "yes", "logfile": str(self.directory / "redis.log")}
        if self.certificate is None:
            options |= {"port": str(self.port)}
        else:
            cert = str(self.certificate / "cert.pem")
            key = str(self.certificate / "key.pem")
            options |= {
                "port": "0",
                "tls-port": str(self.port),
                "tls-cert-file": cert,
                "tls-key-file": key,
            }
            options |= {"tls-ca-cert-file": cert, "tls-auth-clients": "no"}
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self.process = subprocess.Popen(
            [REDIS, *arguments], preexec_fn=partial(die_with_parent, os.getpid())
        )
        client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + 15
        while True:
            try:
                client.ping()
                break
            except (redis.ConnectionError, redis.BusyLoadingError):
                assert time.monotonic() < deadline, (self.directory / "redis.log").read_text()
                time.sleep(0.02)  # a starting server has nothing yet to wait on
        client.close()

    def stop(self, *, kill: bool = False) -> None:
        assert self.process is not None
        self.process.kill() if kill else self.process.terminate()
        self.process.wait()


@contextmanager
def s3_server(bucket: str = "bucket") -> Iterator[str]:
    """An S3 server (moto) on a free port of loopback, with an empty ``bucket``; its URL.

    It is the endpoint of this process and its children meanwhile.
    """
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if match := re.search(r"Running on (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        # otherwise its log of requests fills the pipe
        threading.Thread(target=server.stdout.read, daemon=True).start()
        credentials = {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests-only",
            "AWS_ENDPOINT_URL": match[1],
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**credentials, "AWS_DEFAULT_REGION": "us-east-1"}.items():
                patch.setenv(name, value)
            import fsspec

            fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
            yield match[1]
    finally:
        server.terminate()
        server.wait()


def self_signed(directory: Path, *addresses: str) -> Path:
    """A key and a certificate for ``localhost``, 127.0.0.1 and ``addresses``, made by the openssl
    command."""
    names = ",".join(["DNS:localhost", *(f"IP:{address}" for address in ("127.0.0.1", *addresses))])
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
            ),
            *("-addext", f"subjectAltName={names}"),
            *("-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    return directory


class Cable:
    """A TCP way to ``target`` that can be cut, in either direction or both: what is sent then is
    lost, without a notice, as with a pulled cable. ``async with Cable(...) as cable: connect to
    cable.port``."""

    def __init__(self, target: tuple[str, int] | str) -> None:
        self.target = target
        self.whole = {"there": True, "back": True}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self, *directions: str) -> None:
        for direction in directions or ("there", "back"):
            self.whole[direction] = False

    def mend(self) -> None:
        self.whole = {"there": True, "back": True}

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self.target, str):
            far_reader, far_writer = await asyncio.open_unix_connection(self.target)
        else:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        for source, sink, way in ((reader, far_writer, "there"), (far_reader, writer, "back")):
            task = asyncio.create_task(self._carry(source, sink, way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                if self.whole[way]:
                    sink.write(data)
                    await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()
