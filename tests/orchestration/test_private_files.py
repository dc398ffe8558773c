"""A service's folder is its owner's alone, and a process that waits for a lock logs the holder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestration import private_files as private
from orchestration.private_files import NotPrivate, private_folder, read_by_others, write_private
from orchestration.recipe.loading.load import parse_recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.service import index_server as service_index
from orchestration.service.index_server import ServiceIndex
from pipeline import locks
from pipeline.locks import Locked, holder, locked
from tests.compose.sandbox import ROOT, missing
from tests.orchestration.runs import MOCK


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def holding(path: Path) -> Iterator[int]:
    """Another process that holds the lock file."""
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other.pid


# ── folders ──


@pytest.mark.parametrize("inside", [(), ("server.lock",), ("runs", "notes.txt"), ("cache",)])
@pytest.mark.parametrize("before", [0o755, 0o750, 0o777, 0o701])
def test_a_services_folder_is_taken_from_others(
    tmp_path: Path, inside: tuple[str, ...], before: int
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in inside:
        (folder / name).touch()
    folder.chmod(before)
    private_folder(folder)
    assert mode(folder) == 0o700
    private_folder(folder)
    assert mode(folder) == 0o700


def test_a_folder_that_is_new_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a" / "b") == 0o700


def test_a_folder_of_other_things_is_left_as_it_is(tmp_path: Path) -> None:
    """A home, /tmp: taking it from others would break what is theirs."""
    (tmp_path / "public_html").mkdir()
    tmp_path.chmod(0o755)
    with pytest.raises(
        NotPrivate,
        match=r"has mode 755.*not a service's; give a folder of its "
        r"own.*chmod 700",
    ):
        private_folder(tmp_path)
    assert mode(tmp_path) == 0o755
    tmp_path.chmod(0o700)
    private_folder(tmp_path)  # no other user can access it


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(private.os, "geteuid", lambda: user + 1)
    with pytest.raises(
        NotPrivate,
        match=rf"belongs to user {user}.*runs as user "
        rf"{user + 1}.*--data .*/service",
    ):
        private_folder(tmp_path)


def test_what_another_user_has_put_into_an_open_folder_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`service.json` would name an index of that user's."""
    (tmp_path / "service.json").write_text("{}")
    tmp_path.chmod(0o777)
    monkeypatch.setattr(private.os, "geteuid", lambda: 0)  # to whom the file does not belong
    if (tmp_path / "service.json").stat().st_uid == 0:
        monkeypatch.setattr(private.os, "geteuid", lambda: 12345)
        monkeypatch.setattr(type(tmp_path), "stat", _owned_by(12345))
    with pytest.raises(
        NotPrivate,
        match=r"others may write to .*'service\.json' in it belongs to "
        r"user",
    ):
        private_folder(tmp_path)


def _owned_by(user: int) -> Callable[..., os.stat_result]:
    def found(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        fields = list(os.stat(path, follow_symlinks=follow_symlinks))
        fields[stat.ST_UID] = user
        return os.stat_result(fields)

    return found


def test_any_command_that_creates_a_services_folder_makes_it_private(tmp_path: Path) -> None:
    """`asyncdock token create` comes before the first `asyncdock serve`."""
    (tmp_path / "data").mkdir(mode=0o755)
    index = ServiceIndex(tmp_path / "data")
    index.start()
    try:
        assert mode(tmp_path / "data") == 0o700
        assert all(mode(path) & 0o077 == 0 for path in (tmp_path / "data").iterdir())
    finally:
        index.stop()


def test_a_runs_recipe_which_may_hold_a_password_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Execution(RunFolder.create(parse_recipe(MOCK), tmp_path / "out"))
    finally:
        os.umask(before)
    assert mode(tmp_path / "out" / "recipe.json") == 0o600


def test_a_secret_that_others_can_read_is_reported(tmp_path: Path) -> None:
    write_private(tmp_path / "key.pem", "secret")
    assert read_by_others(tmp_path / "key.pem") == ""
    (tmp_path / "key.pem").chmod(0o644)
    assert "mode 644" in read_by_others(tmp_path / "key.pem")
    write_private(tmp_path / "key.pem", "another")
    assert (mode(tmp_path / "key.pem"), (tmp_path / "key.pem").read_text()) == (0o600, "another")
    assert read_by_others(tmp_path / "none") == ""


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_containers_secret_whose_mode_cannot_be_changed_is_not_reported(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret")
    secret.chmod(0o644)
    program = (
        "import sys; from pathlib import Path; from orchestration.private_files import "
        "read_by_others\n"
    )
    program += "print([read_by_others(Path(path)) != '' for path in sys.argv[1:]])"
    mounted = ["bwrap", "--bind", "/", "/", "--dev", "/dev", "--ro-bind", str(secret), str(secret)]
    outside = tmp_path / "other"
    outside.touch(mode=0o644)
    command = [*mounted, sys.executable, "-c", program, str(secret), str(outside)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[False, True]\n", done.stderr


# ── locks ──


def test_a_lock_that_is_held_is_waited_for_aloud_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_index, "LOCK_SECONDS", 0.6)
    monkeypatch.setattr(locks, "QUIET_SECONDS", 0.1)
    with holding(tmp_path / "service.lock") as pid:
        began = time.monotonic()
        with pytest.raises(
            Locked,
            match=rf"service\.lock: process {pid} \(.*python.*\) holds this lock.*0\.6 s; "
            rf"end",
        ) as held:
            ServiceIndex(tmp_path).start()
        assert time.monotonic() - began >= 0.6
        assert held.value.process == pid
        assert not (tmp_path / "index").exists()
    written = capsys.readouterr()
    line = next(
        line for line in (written.out + written.err).splitlines() if "waiting for a lock" in line
    )
    assert str(pid) in line
    assert "service.lock" in line


def test_a_lock_is_had_as_soon_as_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        assert holder(path) == os.getpid()
        with pytest.raises(Locked), locked(path):
            pass
    with locked(path, wait=5.0):
        pass
    assert mode(path) == 0o600


def test_what_can_be_no_lock_file_is_refused_at_once(tmp_path: Path) -> None:
    """In a folder that others could write to: a link would have another file emptied, a pipe would
    be waited for."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(OSError, match=name), locked(tmp_path / name, wait=5.0):
            pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    with holding(tmp_path / "lock") as pid:
        os.kill(pid, 9)
        with locked(tmp_path / "lock", wait=10.0):
            pass
