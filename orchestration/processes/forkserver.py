"""The fork server: a process that has imported what its children need, from which workers and
runners are forked.

    ForkServer ──▶ its process imports PRELOAD once (seconds of a core) and computes nothing
    connect() ──▶ launch ──▶ imports ──▶ fork ──▶ the child calls the entry function   (hundredths of a second)
                    ◀── number and handle of the child, at its end its exit code ──┘

Children are killed, with the processes that they have started in their group, when their connection
closes and when the process that owns it dies; they also end when the server dies. Only children
that ``outlive`` it, runners, go on. A runner makes a fork server of itself:
:meth:`ForkServer.within`. A :class:`StandingForkServer` belongs to no process that uses it.

Forking is safe because the server uses no accelerator and its only other thread is OpenBLAS's,
which supports being forked. It needs Linux: process handles, and signals at a parent's death.

multiprocessing's fork server is not used. A child of it that starts processes, as a runner does,
starts a second server and imports everything again (`benchmarks/flow/libraries.py` measures it); its
children survive a killed owner; and it sends pickles.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from setproctitle import setproctitle

from orchestration.processes.environment import importable, without_secrets
from orchestration.processes.handles import Process
from pipeline.index.embedded import die_with_parent

# of the workers of a run, whatever its recipe
PRELOAD = (
    "orchestration.workers.worker",
    "stages.engines.torch.rollout",
    "stages.engines.torch.train",
)
MESSAGE_BYTES = 1 << 20  # the largest message: it contains the environment of a process
# A thread of libgomp that waits for the next parallel loop spins for some microseconds, within
# which most loops of an engine begin, and then sleeps, as other workers share the cores. glibc has
# one heap for all threads: what one of them frees, as weights that were swapped, the others use
# again. oneDNN, and torch's layer above it, keep what they have prepared for the last sizes of
# matrices, 1024 by default: the rows of a run have ever other lengths.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "ACTIVE",
    "GOMP_SPINCOUNT": "1000",
    "MALLOC_ARENA_MAX": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}
# how long a stopped server (SIGSTOP) may keep an answer back; then it is killed
STOPPED_SECONDS = 5.0
OUTPUT_BYTES = 2000  # of the server's last output, quoted in errors
IDLE_SECONDS = 600.0  # after which a standing fork server that nothing uses ends


class ForkServerDied(RuntimeError):
    """The fork server has ended or cannot be started; the message contains its last output."""


@dataclass(frozen=True)
class Launch:
    """A process to start: calls ``entry`` ("module:function") with ``arguments`` in the folder
    ``cwd`` with the environment ``env``, appends its output to the file ``log``, and appears in
    `ps` as ``title``. ``imports``: modules of ours that a fork server imports first, for this
    process and later ones."""

    entry: str
    arguments: Sequence[str]
    env: dict[str, str]
    cwd: str
    log: str
    title: str
    outlives: bool = False
    imports: Sequence[str] = ()


class Child:
    """A process forked by a server: like :class:`~orchestration.processes.handles.Process`, with a
    known exit code.

    ``orphaned``: the connection that ended before the process did, if any.
    """

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self.orphaned = cast("Connection | None", None)
        self._handle = handle
        self._name = str(Process.of(pid))
        self._code: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def __str__(self) -> str:
        return self._name

    def alive(self) -> bool:
        return not self._code.done()

    async def wait(self) -> int | None:
        """Wait until it has ended.

        Returns its exit code, negative for a signal; None when the server ended first.
        """
        return await asyncio.shield(self._code)

    def end(self, number: int = signal.SIGKILL) -> None:
        """Send the signal ``number``. Does nothing when it has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def set_exit_code(self, code: int | None) -> None:
        if self.alive():
            self._code.get_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._code.set_result(code)

    def watch_handle(self, connection: Connection) -> None:
        """Expect the exit code of ``connection``'s server, if that is open, once the kernel says
        that the process has ended."""
        loop = self._code.get_loop()
        if connection.open:

            def gone() -> None:
                loop.remove_reader(self._handle)
                connection.expect(self._code)

            loop.add_reader(self._handle, gone)
        else:
            self.orphaned = connection
            loop.add_reader(self._handle, self.set_exit_code, None)


class Connection:
    """A connection that launches children through the fork server ``pid``, a child of this process,
    and receives their exit codes. Belongs to the event loop that created it."""

    def __init__(self, server: socket.socket, pid: int) -> None:
        self.open = True
        self._server = server
        self._pid = pid
        self._server.setblocking(False)
        self._children: dict[int, Child] = {}
        self._requests: list[asyncio.Future[Child]] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(server, self._read)

    def __str__(self) -> str:
        return "its fork server has ended"

    async def launch(self, launch: Launch, stdin: int | None = None) -> Child:
        """Start a process, with the file ``stdin`` as its standard input.

        Raises ForkServerDied, and OSError when the machine has no process or file descriptor left.
        """
        if not self.open:
            raise ForkServerDied("it has ended")
        answer: asyncio.Future[Child] = self._loop.create_future()
        self._requests.append(answer)
        self.expect(answer)
        try:
            message = json.dumps(asdict(launch)).encode()
            if stdin is None:
                await self._loop.sock_sendall(self._server, message)
            else:
                socket.send_fds(self._server, [message], [stdin])
        except (BrokenPipeError, ConnectionResetError):
            self.close()
        except BlockingIOError:
            self._requests.remove(answer)
            raise
        return await answer

    def expect(self, answer: asyncio.Future[Any], *, due: bool = False) -> None:
        """Kill the server if it is stopped while ``answer`` is due; the connection then closes."""
        if not answer.done() and self.open:
            self._loop.call_later(STOPPED_SECONDS, partial(self.expect, answer, due=True))
            with contextlib.suppress(ChildProcessError):
                if due and os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT):
                    os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Disconnect; the server kills the children that do not outlive it.

        Does nothing when repeated.
        """
        if self.open:
            self.open = False
            self._loop.remove_reader(self._server)
            self._server.close()
            for answer in self._requests:
                if not answer.done():
                    answer.set_exception(ForkServerDied("it ended before it answered"))
            for child in self._children.values():
                child.watch_handle(self)

    def _read(self) -> None:
        try:
            text, handles, _, _ = socket.recv_fds(self._server, MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            text = b""
            handles = []
        if not text:
            return self.close()
        message = json.loads(text)
        if "code" in message:
            return self._children.pop(message["pid"]).set_exit_code(message["code"])
        answer = self._requests.pop(0)
        if "errno" in message:
            if not answer.done():
                answer.set_exception(OSError(message["errno"], message["error"]))
            return
        self._children[message["pid"]] = child = Child(message["pid"], *handles)
        child.watch_handle(self)
        if answer.done():  # the caller was cancelled
            child.end()
        else:
            answer.set_result(child)


class ForkServer:
    """A fork server that ends with this process. Created by :meth:`start` or :meth:`within`."""

    def __init__(
        self,
        line: socket.socket,
        pid: int,
        wait: Callable[[], object],
        output: IO[bytes] | None = None,
    ) -> None:
        self.pid = pid
        self._line = line
        self._wait = wait
        self._output = output
        self._open = True

    @classmethod
    def start(
        cls, preload: Sequence[str] = PRELOAD, environment: Mapping[str, str] | None = None
    ) -> ForkServer:
        """Start a server process. It imports the modules ``preload`` in the background; a launch
        waits for it.

        ``environment``: that it is started with, which its children show in /proc (default: this
        process's, without our secrets). Raises ForkServerDied where fork servers are not supported.
        """
        ours, theirs = _socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)
        with theirs:
            process = _server_process(preload, output, theirs, environment=environment)
        return cls(ours, process.pid, process.wait, output)

    @classmethod
    def within(cls) -> ForkServer:
        """Fork a server from a child of a fork server, before that has an event loop, without
        importing anything."""
        ours, theirs = _socketpair()
        parent = os.getpid()
        if pid := _fork():
            theirs.close()
            return cls(ours, pid, lambda: os.waitpid(pid, 0))
        ours.close()
        os.setsid()
        die_with_parent(parent)
        setproctitle("asyncdock fork server of a run")
        os._exit(_Server(theirs).serve())

    def connect(self) -> Connection:
        """Connect to the server. Raises ForkServerDied."""
        ours, theirs = _socketpair()
        with theirs:
            try:
                socket.send_fds(self._line, [b"connect"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise ForkServerDied(self.last_output()) from None
        return Connection(ours, self.pid)

    def close(self) -> None:
        """End it, and its children that do not outlive it. Does nothing when repeated."""
        if self._open:
            self._open = False
            self._line.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it may still be importing, or be stopped
            self._wait()
            if self._output is not None:
                self._output.close()

    def last_output(self) -> str:
        """Return the end of what the server process printed."""
        text = b""
        if self._output is not None:
            self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            text = self._output.read()
        return text.decode(errors="replace").strip() or "it printed nothing"


class StandingForkServer(ForkServer):
    """The fork server at ``folder``/line.

    It is started by the first process that asks for it, and ends with the process ``owner``, or
    after ``IDLE_SECONDS`` without a connection. Raises ForkServerDied where other users may reach
    it.
    """

    def __init__(self, folder: Path, owner: int, preload: Sequence[str]) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        folder_stat = folder.lstat()
        if folder_stat.st_uid != os.getuid() or folder_stat.st_mode & 0o77:
            raise ForkServerDied(f"{folder} belongs to another user, or is open to others")
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._socket().close()
            except OSError:
                (folder / "line").unlink(missing_ok=True)
                with (
                    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line,
                    open(folder / "log", "wb") as output,
                ):
                    line.bind(str(folder / "line"))
                    line.listen()
                    # it has left a child, which is the server
                    _server_process(preload, output, line, owner).wait()

    def connect(self) -> Connection:
        try:
            # the server is no child: it is not watched for stops
            return Connection(self._socket(), os.getpid())
        except OSError:
            raise ForkServerDied(self.last_output()) from None

    def close(self) -> None:
        """Do nothing: others may use it."""

    def last_output(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-OUTPUT_BYTES:].strip()

    def _socket(self) -> socket.socket:
        line = _large(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with contextlib.ExitStack() as closing:
            closing.callback(line.close)
            line.connect(str(self._folder / "line"))
            closing.pop_all()
        return line


# --------------------------------------------------------------------------------------------------
# In the server's process


class _Server:
    """The server, which forks children on request of the connections that arrive on ``line``, until
    ``line`` closes; one that listens for them, until the process of the handle ``owner`` has ended,
    or nothing is connected."""

    def __init__(self, line: socket.socket, owner: int | None = None) -> None:
        self._line = line
        self._selector = selectors.DefaultSelector()
        # pid → connection, whether it outlives it
        self._children: dict[int, tuple[socket.socket, bool]] = {}
        self._selector.register(line, selectors.EVENT_READ)
        if owner is not None:
            self._selector.register(owner, selectors.EVENT_READ, 0)
        self._unused = len(self._selector.get_map())
        self._listens = owner is not None

    def serve(self) -> int:
        while True:
            events = self._selector.select(IDLE_SECONDS if self._listens else None)
            if not events and len(self._selector.get_map()) == self._unused:
                return 0
            for key, _ in events:
                ready = cast("socket.socket", key.fileobj)
                if key.data:  # the handle of a child, which has ended
                    self._report_end(key.fd, key.data)
                elif key.data is None and ready is not self._line:
                    self._receive(ready)
                elif key.data is None and self._listens:
                    self._selector.register(_large(self._line.accept()[0]), selectors.EVENT_READ)
                elif key.data is None and (handles := socket.recv_fds(ready, 64, 1)[1]):
                    self._selector.register(socket.socket(fileno=handles[0]), selectors.EVENT_READ)
                else:
                    for connection in {connection for connection, _ in self._children.values()}:
                        self._kill_children(connection)
                    return 0

    def _receive(self, connection: socket.socket) -> None:
        try:
            text, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
        except ConnectionResetError:
            text = b""
            files = []
        if text:
            self._launch(connection, Launch(**json.loads(text)), files)
            for file in files:
                os.close(file)
        else:
            self._selector.unregister(connection)
            self._kill_children(connection)
            connection.close()

    def _kill_children(self, connection: socket.socket) -> None:
        for pid, (owner, outlives) in self._children.items():
            if owner is connection and not outlives:
                _kill_group(pid)

    def _launch(self, connection: socket.socket, launch: Launch, files: list[int]) -> None:
        server = os.getpid()
        try:
            with open(launch.log, "ab") as log:
                _import(launch.imports)
                pid = _fork()
                if pid == 0:
                    self._close_inherited()
                    _set_up_child(launch, log.fileno(), files, server)
            handle = -1 if pid == 0 else os.pidfd_open(pid)
        except OSError as error:
            if os.getpid() != server:
                raise
            return self._send(connection, {"errno": error.errno, "error": error.strerror})
        if pid == 0:
            run_child(launch)
        self._children[pid] = (connection, launch.outlives)
        self._selector.register(handle, selectors.EVENT_READ, pid)
        self._send(connection, {"pid": pid}, handle)

    def _send(self, connection: socket.socket, message: dict[str, object], *handles: int) -> None:
        with contextlib.suppress(OSError):  # the other end is closed, which is read next
            socket.send_fds(connection, [json.dumps(message).encode()], handles)

    def _report_end(self, handle: int, pid: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        connection, outlives = self._children.pop(pid)
        if not outlives:
            _kill_group(pid)  # what it has started and left behind
        _, status = os.waitpid(pid, 0)
        self._send(connection, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _close_inherited(self) -> None:
        """Close in a child the server's sockets, and its handles of other children."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd) if key.data is not None else cast("socket.socket", key.fileobj).close()
        self._selector.close()


def _import(modules: Sequence[str]) -> None:
    """Import those of ``modules`` that this process does not have. A child reports what fails."""
    missing = [module for module in modules if module not in sys.modules]
    for module in missing:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    if missing:
        gc.freeze()  # otherwise a collection in a child copies every page


def _kill_group(pid: int) -> None:
    """Kill a child that was not waited for yet, so that its number is not reused, and the processes
    of its group."""
    for kill in (os.killpg, os.kill):  # it may not have made its group yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()


def _set_up_child(launch: Launch, log: int, files: list[int], server: int) -> None:
    """Set in a child what a new process would have: session, output, environment, folder, random
    state."""
    os.setsid()
    if not launch.outlives:
        die_with_parent(server)
    for file in files:
        os.dup2(file, 0)
        os.close(file)
    os.dup2(log, 1)
    os.dup2(log, 2)
    gc.enable()
    os.environ.clear()
    os.environ.update({**ENVIRONMENT, **launch.env})
    with contextlib.suppress(OSError):
        os.chdir(launch.cwd)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # `random` reseeds itself
    setproctitle(launch.title)


def run_child(launch: Launch) -> NoReturn:
    """Call the entry function in a child, then end the process.

    As in multiprocessing, threads are joined, exit functions called and files flushed, but the
    interpreter is not finalized: that would copy the memory shared with the server.
    """
    code = 0
    try:
        pkgutil.resolve_name(launch.entry)(launch.arguments)
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


def _socketpair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep message borders."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return _large(ours), _large(theirs)


def _large(end: socket.socket) -> socket.socket:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    return end


def _server_process(
    preload: Sequence[str],
    output: IO[bytes],
    line: socket.socket,
    owner: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a server on ``line``; with ``owner`` it is a standing one. Raises ForkServerDied."""
    if sys.platform != "linux":
        raise ForkServerDied(f"it needs Linux, and this is {sys.platform}")
    handles = [line.fileno(), *([] if owner is None else [os.pidfd_open(owner)])]
    try:
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "orchestration.processes.forkserver",
                ",".join(map(str, handles)),
                *preload,
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=handles,
            start_new_session=True,  # it does not get Ctrl-C
            env={
                **ENVIRONMENT,
                **importable(without_secrets(os.environ) if environment is None else environment),
            },
        )
    finally:
        for handle in handles[1:]:
            os.close(handle)


def main() -> int:
    handle, *owner = map(int, sys.argv[1].split(","))
    line = socket.socket(fileno=handle)
    if owner and os.fork():  # a standing server is no process's child
        return 0
    setproctitle("asyncdock fork server")
    # collections would take a quarter of the time that the imports take; children enable it
    gc.disable()
    for module in sys.argv[2:]:
        importlib.import_module(module)
    if "torch" in sys.modules:
        from stages.device import may_fork

        if not may_fork():
            print("an accelerator's plugin is loaded that may not be forked")
            return 1
    gc.freeze()  # otherwise a collection in a child copies every page
    return _Server(line, *owner).serve()


if __name__ == "__main__":
    sys.exit(main())
