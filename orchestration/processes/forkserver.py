"""The fork server: processes that begin with everything imported already.

    ForkServer ──▶ its process imports PRELOAD once (seconds of a core), and computes nothing
    connect() ──▶ launch ──▶ fork ──▶ the child calls the target        (hundredths of a second)
                    ◀── pid, and a handle on it ──┘
                    ◀── the exit code, once it has ended

Children end with their connection, whether it is closed or its process dies, and with the server's process. Only those that
``outlive`` it, runners, go on. Such a child may have a server of its own at once: :meth:`ForkServer.within`.

Forking is safe because the server has touched no accelerator, and its only other thread is OpenBLAS's, which expects to be
forked: importing starts none, and nothing is computed. It needs Linux, for handles on processes and their parents' death.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import IO, NoReturn, cast

from setproctitle import setproctitle

from orchestration.processes.handles import Process
from pipeline.index.embedded import die_with_parent

PRELOAD = (
    "orchestration.service.runner",
    "orchestration.run.worker",
    "stages.engines.torch.rollout",
    "stages.engines.torch.train",
)
MESSAGE_BYTES = 1 << 20  # an environment has to fit into it
PASSIVE = {
    "OMP_WAIT_POLICY": "PASSIVE"
}  # threads that wait for each other must not spin: other workers share the cores
SAID_BYTES = 2000


class ForkServerDied(RuntimeError):
    """The fork server has ended, or there cannot be one; the message says what it wrote last."""


@dataclass(frozen=True)
class Launch:
    """A process to be: it calls ``entry`` ("module:function") with ``arguments``, in the folder ``cwd``, with the
    environment ``env``. What it prints is added to the file ``log``; ``title`` is what `ps` shows."""

    entry: str
    arguments: Sequence[str]
    env: dict[str, str]
    cwd: str
    log: str
    title: str
    outlives: bool = False


class Child:
    """A process that a fork server has made: a :class:`~orchestration.processes.handles.Process` with a known exit code.
    ``orphaned``: the connection that ended before it did, if any."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid, self.orphaned = pid, cast("Connection | None", None)
        self._handle, self._name = handle, str(Process.of(pid))
        self._code: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def __str__(self) -> str:
        return self._name

    def alive(self) -> bool:
        return not self._code.done()

    async def wait(self) -> int | None:
        """Its exit code once it has ended, negative for the signal that ended it; None when the server ended before it."""
        return await asyncio.shield(self._code)

    def end(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal. Harmless when it has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def ended(self, code: int | None) -> None:
        if self.alive():
            os.close(self._handle)
            self._code.set_result(code)

    def watch(self, connection: Connection) -> None:
        """Nobody will tell of its end: look for it."""
        loop, self.orphaned = self._code.get_loop(), connection

        def gone() -> None:
            loop.remove_reader(self._handle)
            self.ended(None)

        loop.add_reader(self._handle, gone)


class Connection:
    """Launches children through a fork server, and hears of their end. Belongs to the event loop that it was made in."""

    def __init__(self, server: socket.socket) -> None:
        self.open = True
        self._server = server
        self._server.setblocking(False)
        self._children: dict[int, Child] = {}
        self._asked: list[asyncio.Future[Child]] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(server, self._read)

    async def launch(self, launch: Launch) -> Child:
        """Raises ForkServerDied, and OSError when the machine has no process or no file to give."""
        if not self.open:
            raise ForkServerDied("it was there, and has ended")
        answer: asyncio.Future[Child] = self._loop.create_future()
        self._asked.append(answer)
        try:
            await self._loop.sock_sendall(self._server, json.dumps(asdict(launch)).encode())
        except (BrokenPipeError, ConnectionResetError):
            self.close()
        return await answer

    def close(self) -> None:
        """Those children that do not outlive it are killed. Harmless when repeated."""
        if self.open:
            self.open = False
            self._loop.remove_reader(self._server)
            self._server.close()
            for answer in self._asked:
                if not answer.done():
                    answer.set_exception(ForkServerDied("it ended before it answered"))
            for child in self._children.values():
                child.watch(self)

    def _read(self) -> None:
        try:
            text, handles, _, _ = socket.recv_fds(self._server, MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            text, handles = b"", []
        if not text:
            self.close()
            return
        told = json.loads(text)
        if "code" in told:
            self._children.pop(told["pid"]).ended(told["code"])
            return
        answer = self._asked.pop(0)
        if "errno" in told:
            if not answer.done():
                answer.set_exception(OSError(told["errno"], told["error"]))
            return
        self._children[told["pid"]] = child = Child(told["pid"], *handles)
        if answer.done():  # whoever asked was cancelled
            child.end()
        else:
            answer.set_result(child)


class ForkServer:
    """A fork server that ends with this process. Make it with :meth:`start` or :meth:`within`."""

    def __init__(
        self, line: socket.socket, pid: int, reap: Callable[[], object], said: IO[bytes] | None = None
    ) -> None:
        self.pid, self._line, self._reap, self._said, self._open = pid, line, reap, said, True

    @classmethod
    def start(cls) -> ForkServer:
        """A new process. Its imports go on while others work; who launches before they are done waits. Raises ForkServerDied
        where there cannot be one."""
        if sys.platform != "linux":
            raise ForkServerDied(f"it needs Linux, and this is {sys.platform}")
        ours, theirs = _pair()
        said = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "orchestration.processes.forkserver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for us alone
                env={**PASSIVE, **os.environ},
            )
        return cls(ours, process.pid, process.wait, said)

    @classmethod
    def within(cls) -> ForkServer:
        """In a child of a fork server, before it has an event loop: a fork of it, with all that is imported here."""
        ours, theirs = _pair()
        parent = os.getpid()
        if pid := _fork():
            theirs.close()
            return cls(ours, pid, lambda: os.waitpid(pid, 0))
        ours.close()
        os.setsid()
        die_with_parent(parent)
        setproctitle("asyncdock fork server of a run")
        os._exit(_Serving(theirs).until_end())

    def connect(self) -> Connection:
        """Raises ForkServerDied."""
        ours, theirs = _pair()
        with theirs:
            try:
                socket.send_fds(self._line, [b"connect"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise ForkServerDied(self.last_said()) from None
        return Connection(ours)

    def close(self) -> None:
        """End it, and those of its children that do not outlive it. Harmless when repeated."""
        if self._open:
            self._open = False
            self._line.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)  # it may be importing still
            self._reap()
            if self._said is not None:
                self._said.close()

    def last_said(self) -> str:
        if self._said is None:
            return "it left no word"
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - SAID_BYTES))
        return self._said.read().decode(errors="replace").strip() or "it left no word"


# ---------------------------------------------------------------------------------------------------------------------
# In the server's process


class _Serving:
    """Forks whoever is asked for on ``line``'s connections, until it ends."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._selector = line, selectors.DefaultSelector()
        self._of: dict[int, tuple[socket.socket, bool]] = {}  # child → its connection, and whether it outlives that
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for ready in (line, self._woken):
            self._selector.register(ready, selectors.EVENT_READ)

    def until_end(self) -> int:
        while True:
            for key, _ in self._selector.select():
                ready = cast("socket.socket", key.fileobj)
                if ready is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        ready.recv(4096)
                    self._reap()
                elif ready is not self._line:
                    self._hear(ready)
                elif handles := socket.recv_fds(ready, 64, 1)[1]:
                    self._selector.register(socket.socket(fileno=handles[0]), selectors.EVENT_READ)
                else:
                    for connection in {connection for connection, _ in self._of.values()}:
                        self._kill(connection)
                    return 0

    def _hear(self, connection: socket.socket) -> None:
        try:
            text = connection.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            text = b""
        if text:
            self._launch(connection, Launch(**json.loads(text)))
        else:
            self._selector.unregister(connection)
            self._kill(connection)
            connection.close()

    def _kill(self, connection: socket.socket) -> None:
        for pid, (of, outlives) in self._of.items():
            if of is connection and not outlives:
                os.kill(pid, signal.SIGKILL)  # it is our child until we have reaped it: the number is still its own

    def _launch(self, connection: socket.socket, launch: Launch) -> None:
        server = os.getpid()
        try:
            with open(launch.log, "ab") as log:
                pid = _fork()
                if pid == 0:
                    self._leave()
                    _settle(launch, log.fileno(), server)
            handle = -1 if pid == 0 else os.pidfd_open(pid)
        except OSError as error:
            if os.getpid() != server:
                raise
            self._tell(connection, {"errno": error.errno, "error": error.strerror})
            return
        if pid == 0:
            run_child(launch)
        self._of[pid] = (connection, launch.outlives)
        self._tell(connection, {"pid": pid}, handle)
        os.close(handle)

    def _tell(self, connection: socket.socket, message: dict[str, object], *handles: int) -> None:
        with contextlib.suppress(OSError):  # nobody is there any more: then its end is about to be heard
            socket.send_fds(connection, [json.dumps(message).encode()], handles)

    def _reap(self) -> None:
        while self._of:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection, _ = self._of.pop(pid)
            self._tell(connection, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _leave(self) -> None:
        """In a child: whoever is at the other ends must not take it for the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for key in list(self._selector.get_map().values()):
            cast("socket.socket", key.fileobj).close()
        self._wakes.close()
        self._selector.close()


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()


def _settle(launch: Launch, log: int, server: int) -> None:
    """In a child: all that a new process would have found."""
    os.setsid()
    if not launch.outlives:
        die_with_parent(server)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(launch.env)
    with contextlib.suppress(OSError):
        os.chdir(launch.cwd)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # random does so by itself
    setproctitle(launch.title)


def run_child(launch: Launch) -> NoReturn:
    """In a child: the program, to the end of its process. The interpreter is not taken apart, which would copy all that it
    shares with the server; threads, exit functions and files have their due, as in
    multiprocessing."""
    module, _, function = launch.entry.partition(":")
    code = 0
    try:
        getattr(importlib.import_module(module), function)(launch.arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        code = 1
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a line that keeps messages apart."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    return ends


def main() -> int:
    line = socket.socket(fileno=int(sys.argv[1]))
    setproctitle("asyncdock fork server")
    for module in PRELOAD:
        importlib.import_module(module)
    from stages.device import may_fork

    if not may_fork():
        print("an accelerator's plugin is loaded that may not be forked")
        return 1
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise copy every page
    return _Serving(line).until_end()


if __name__ == "__main__":
    sys.exit(main())
