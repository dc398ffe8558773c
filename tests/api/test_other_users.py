"""Another user of the machine against a service on loopback: each test carries out an attack, as
`nobody`, for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.client import SyncClient, Unreachable
from api.server.access.logins import PREFIX
from api.server.app import ROUTES
from api.server.service.operations import operations_of
from orchestration.service.own_services import AUTHORIZATION, find_service, services_folder
from tests.api.other_user import CALL, NOBODY, as_nobody, command, listening, missing
from tests.api.served import ROOT, SECONDS, Served, environment

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder in which every user may make entries, as /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="adk-open-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def served(open_folder: Path) -> Iterator[Served]:
    server = Served(open_folder / "service", "--runs", "0")
    server.start()
    yield server
    server.end()


def asyncdock(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**environment(), "ASYNCDOCK_TOKEN": "", **more}
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, env=env
    )


def link(served: Served) -> str:
    """The code of a new link, as the user's own command prints it."""
    done = asyncdock("link", "--server", served.url)
    assert done.returncode == 0, done.stderr
    code = re.fullmatch(rf"{served.url}/#login=([\w-]{{43}})\n", done.stdout)
    assert code, done.stdout
    return code[1]


ROUTES_WITHOUT_TOKEN = (
    CALL
    + """
url, calls, headers = given
print(json.dumps([call(url + path, method, headers, body) for method, path, body in calls]))
"""
)


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer none",
        "Bearer ",
        f"Bearer adock_{'0' * 12}_{'A' * 43}",
        f"Bearer {PREFIX}{'A' * 43}",
    ],
)
def test_no_route_does_anything_without_a_token(served: Served, authorization: str) -> None:
    with SyncClient(served.url) as client:
        run = client.submit("mock").id
    opened = (
        "/healthz",
        "/readyz",
        "/openapi.json",
        "/",
        "/docs",
        "/dashboard/app.js",
        "/docs/reference.js",
    )
    calls = []
    scoped = []
    for o in operations_of(ROUTES):
        path = re.sub(
            r"\{(\w+)(:[^}]*)?\}", lambda name: {"run": run, "file": ""}.get(name[1], "1"), o.path
        )
        if o.scope is not None:
            calls.append((o.method, path, {} if o.method in ("POST", "PUT") else None))
            scoped.append(f"{o.method} {path}")
    calls += [("GET", path, None) for path in opened]
    headers = {"Authorization": authorization} if authorization else {}
    answers = as_nobody(ROUTES_WITHOUT_TOKEN, served.url, calls, headers)
    statuses = [status for status, _ in answers]
    assert dict(zip(scoped, statuses, strict=False)) == dict.fromkeys(scoped, 401)
    assert len(scoped) >= 36
    assert statuses[len(scoped) :] == [200] * len(opened)
    assert all(run not in text and served.token not in text for _, text in answers)
    details = json.loads(answers[0][1])
    assert "asyncdock token create" in details["fix"]
    with SyncClient(served.url) as client:
        assert client.run(run).state == "created"


LOOK = """
import glob, os
found, heard = [], []
def read(path):
    try:
        with open(path, "rb") as file:
            heard.append(file.read(2 ** 20).decode(errors="replace"))
        found.append(path)
    except OSError:
        pass
data, services = given
for path in (data, services):
    for where in (path, *glob.glob(path + "/**", recursive=True)):
        read(where)
    try:
        found.append(os.listdir(path))
    except OSError:
        pass
seen = len(found)
for path in glob.glob("/proc/[0-9]*/*"):
    if path.rsplit("/", 1)[1] in ("cmdline", "environ", "maps"):
        read(path)
print(json.dumps([found[:seen], heard]))
"""


def test_the_token_is_in_no_file_and_in_no_process_that_another_user_can_read(
    served: Served,
) -> None:
    """While commands of the user run, one after the other."""
    with SyncClient(served.url) as client:
        client.submit("mock")
        watching = subprocess.Popen(
            command("runs", "watch", client.submit("mock").id, "--server", served.url, "--json"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment(),
        )
        try:
            files, heard = as_nobody(LOOK, str(served.data), str(services_folder()))
        finally:
            watching.kill()
            watching.wait()
    assert files == []
    assert any("api.cli.main" in text or "tests.api.watched" in text for text in heard), (
        "no command line was read"
    )
    secret = served.token.split("_", 2)[2]  # which may have more of them
    assert not [text for text in heard if secret in text]
    assert secret not in served.log.read_text()
    assert {path.stat().st_mode & 0o777 for path in services_folder().iterdir()} == {0o600}
    assert (served.data / AUTHORIZATION).stat().st_mode & 0o777 == 0o600


REDEEM = (
    CALL
    + """
import secrets
url, code = given
guesses = [call(url + "/v1/login", "POST", {}, {"code": guess}) for guess in ["", code[:-1], code + "A", code.swapcase(),
           *(secrets.token_urlsafe(32) for _ in range(300))]]
print(json.dumps([sorted({status for status, _ in guesses}), call(url + "/v1/login", "POST", {}, {"code": code})]))
"""
)


def post(url: str, body: dict[str, Any], authorization: str = "") -> tuple[int, dict[str, Any]]:
    import urllib.error
    import urllib.request

    headers = {
        "Content-Type": "application/json",
        **({"Authorization": authorization} if authorization else {}),
    }
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers)
        ) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


def test_a_links_code_is_neither_guessed_nor_taken_nor_used_twice(served: Served) -> None:
    """The code as another user reads it off the command line of the browser that opens the link, in
    time."""
    code = link(served)
    guessed, taken = as_nobody(REDEEM, served.url, code)
    assert guessed == [400, 410] or guessed == [410, 422], guessed
    assert taken[0] == 403
    assert json.loads(taken[1])["detail"] == (
        f"This link was made for a browser of user 0, and user {NOBODY} asks."
    )
    status, session = post(f"{served.url}/v1/login", {"code": code})
    assert (status, session["name"], session["scope"]) == (201, "local", "admin")
    status, late = post(f"{served.url}/v1/login", {"code": code})
    assert (status, late["type"]) == (410, "urn:asyncdock:login-link")
    assert "used already" in late["detail"]
    assert "asyncdock link" in late["fix"]
    for presented in (code, f"{PREFIX}{code}"):
        assert (
            post(f"{served.url}/v1/recipes/check", {"recipe_name": "mock"}, f"Bearer {presented}")[
                0
            ]
            == 401
        )
    authorization = f"Bearer {session['token']}"
    assert post(f"{served.url}/v1/recipes/check", {"recipe_name": "mock"}, authorization)[0] == 200
    assert code not in served.log.read_text()
    assert (
        f"user={NOBODY}" in served.log.read_text()
        or (f'"user": {NOBODY}') in served.log.read_text()
    )


def test_who_takes_the_port_of_a_service_that_was_killed_hears_no_token(open_folder: Path) -> None:
    """`kill -9` leaves the files; a client that had the token goes on asking, and commands begin
    anew."""
    server = Served(open_folder / "killed", "--runs", "0")
    server.start()
    try:
        with SyncClient(server.url, patience=2.0) as client:
            list(client.runs())
            server.kill()
            assert list(services_folder().glob(f"*:{server.port}")), "the file is still there"
            with listening("127.0.0.1", server.port) as heard:
                with pytest.raises(Unreachable, match="does not listen"):
                    list(client.runs())
                assert asyncdock("runs", "list", "--server", server.url).returncode == 0
                asyncdock("link", "--server", server.url)
        assert heard
        assert not [text for text in heard if "adock" in text or "authorization" in text.lower()]
        before = server.token
        server.start()
        assert server.token == before, "the next server has the same token"
        with SyncClient(server.url) as client:
            assert list(client.runs()) == []
    finally:
        server.end()
    assert not list(services_folder().glob(f"*:{server.port}"))


def test_who_listens_at_the_other_address_of_localhost_hears_no_token(served: Served) -> None:
    try:
        with socket.socket(socket.AF_INET6) as free:
            free.bind(("::1", served.port))
    except OSError:
        pytest.skip("no IPv6 on loopback")
    with listening("::1", served.port) as heard:
        done = asyncdock("runs", "list", "--json", "--server", f"http://localhost:{served.port}")
        assert done.returncode == 0, done.stderr
    assert heard == []


MAKE = """
import os
for kind, path, target in given:
    if kind == "folder":
        os.mkdir(path, 0o755)
    elif kind == "link":
        os.symlink(target, path)
    elif kind == "file":
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
print("null")
"""


def test_a_folder_that_another_user_has_put_in_the_way_is_refused(
    open_folder: Path, tmp_path: Path
) -> None:
    """In /tmp: whoever owns the folder can replace what root puts there, the index's address and
    the token among it."""
    folder, inside, away = (open_folder / name for name in ("planted", "planted-parent", "linked"))
    (tmp_path / "precious").mkdir(mode=0o700)
    planted = [("folder", folder, ""), ("folder", inside, ""), ("folder", inside / "data", "")]
    as_nobody(
        MAKE, *([*map(str, each)] for each in [*planted, ("link", away, tmp_path / "precious")])
    )
    for path, why in (
        (folder, "belongs to user"),
        (inside / "data", "belongs to user"),
        (away, "is a link that user"),
    ):
        for arguments in (
            ("serve", "--listen", "127.0.0.1:0", "--data", path),
            ("token", "list", "--data", path),
        ):
            done = asyncdock(*arguments)
            assert (done.returncode, done.stdout) == (2, ""), (path, done.stderr)
            assert f"{why} {NOBODY}" in done.stderr
    assert list((tmp_path / "precious").iterdir()) == list(folder.iterdir()) == []


def test_a_folder_of_services_that_another_user_has_made_is_not_trusted(
    open_folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG_STATE_HOME below /tmp: the service starts and says so; its token is not looked for
    there."""
    state = open_folder / "state"
    planted = [
        ("folder", state, ""),
        ("folder", state / "asyncdock", ""),
        ("folder", state / "asyncdock/services", ""),
    ]
    as_nobody(MAKE, *([*map(str, each)] for each in planted))
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    server = Served(open_folder / "stateless", "--runs", "0")
    server.start()
    try:
        assert "do not find the token of this service" in server.log.read_text()
        assert find_service(server.url) is None
        # What root has made elsewhere is moved there by another user, under another address.
        theirs = state / "asyncdock" / "services" / f"127.0.0.1:{server.port}"
        monkeypatch.undo()
        assert find_service(served.url) is not None
        shutil.copy2(services_folder() / f"127.0.0.1:{served.port}", theirs)
        monkeypatch.setenv("XDG_STATE_HOME", str(state))
        assert find_service(server.url) is None
    finally:
        server.end()


def test_two_services_at_once_are_told_apart(served: Served, open_folder: Path) -> None:
    other = Served(open_folder / "other", "--runs", "0")
    other.start()
    try:
        assert other.token != served.token
        for each in (served, other):
            assert asyncdock("token", "show", "--server", each.url).stdout == f"{each.token}\n"
            assert asyncdock("token", "show", "--data", each.data).stdout == f"{each.token}\n"
            with SyncClient(each.url) as client:
                list(client.runs())
        headers = {"Authorization": f"Bearer {other.token}"}
        ((status, _),) = as_nobody(
            ROUTES_WITHOUT_TOKEN, served.url, [("GET", "/v1/runs", None)], headers
        )
        assert status == 401
    finally:
        other.end()
    done = asyncdock("token", "show", "--server", other.url)
    assert (done.returncode, done.stdout) == (3, "")


def test_a_service_of_somebody_else_says_what_to_do(served: Served, tmp_path: Path) -> None:
    """A user without the file: his command is refused with the way out."""
    done = asyncdock(
        "runs",
        "list",
        "--server",
        served.url,
        XDG_STATE_HOME=str(tmp_path),
        XDG_CONFIG_HOME=str(tmp_path),
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        "no service of yours is known there; ask who runs it for one, and set ASYNCDOCK_TOKEN"
        in done.stderr
    )


def test_without_tokens_the_operator_is_told_what_it_means(open_folder: Path) -> None:
    server = Served(open_folder / "trusting", "--runs", "0", "--no-token")
    server.start()
    try:
        log = server.log.read_text()
        assert "every user of this machine may read, start, change and delete the runs" in log
        ((status, _),) = as_nobody(
            ROUTES_WITHOUT_TOKEN, server.url, [("GET", "/v1/runs", None)], {}
        )
        assert status == 200
        assert not (server.data / AUTHORIZATION).exists()
        done = asyncdock("link", "--server", server.url)
        assert (done.returncode, "asks for no token" in done.stderr) == (1, True)
    finally:
        server.end()
    for options in (("--listen", "0.0.0.0:0"), ("--host-name", "dock.example.org")):
        done = asyncdock("serve", "--data", open_folder / "trusting", "--no-token", *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert "runs code as its user; leave --no-token out" in done.stderr


def test_a_login_is_gone_with_its_token_and_with_its_server(open_folder: Path) -> None:
    server = Served(open_folder / "logins", "--runs", "0")
    server.start()
    try:
        session = post(f"{server.url}/v1/login", {"code": link(server)})[1]["token"]
        check = f"{server.url}/v1/recipes/check", {"recipe_name": "mock"}, f"Bearer {session}"
        assert post(*check)[0] == 200
        unused_code = link(server)
        server.kill()
        server.start()
        assert post(*check)[0] == 401
        assert post(f"{server.url}/v1/login", {"code": unused_code})[0] == 410
        token = server.token
        session = post(f"{server.url}/v1/login", {"code": link(server)})[1]["token"]
        asyncdock("token", "revoke", token.split("_")[1], "--data", server.data)
        check = *check[:2], f"Bearer {session}"
        assert post(*check)[0] == 401
        assert (
            "the token of your service there"
            in asyncdock("runs", "list", "--server", server.url).stderr
        )
        server.stop()
        server.start()
        assert server.token != token, "a token that was revoked is replaced"
        assert asyncdock("runs", "list", "--server", server.url).returncode == 0
    finally:
        server.end()


def test_only_its_owner_reads_a_file_with_a_token(tmp_path: Path) -> None:
    from orchestration.private_files import NotPrivate, read_private, write_private

    file = tmp_path / "authorization"
    write_private(file, "secret")
    assert read_private(file) == "secret"
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        read_private(tmp_path / "link")
    for spoil in (
        lambda: file.chmod(0o640),
        lambda: os.chown(file, NOBODY, -1),
        lambda: os.link(file, tmp_path / "second"),
        lambda: (file.unlink(), os.mkfifo(file, 0o600)),
    ):
        write_private(file, "secret")
        spoil()
        with pytest.raises(NotPrivate, match="must be a plain file of user 0 alone"):
            read_private(file)
