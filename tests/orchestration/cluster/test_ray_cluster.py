"""Ray as a user starts it: by its own command, with and without a token, or not at all."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import stamina

from orchestration.cluster import ray_cluster
from orchestration.cluster.ray_cluster import ClusterRefused, find, look
from tests.ports import free_port

pytest.importorskip("ray")
ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
TOKEN = "a token of sixteen or more characters".replace(" ", "-")


@dataclass(frozen=True)
class Started:
    """A cluster: its port, that of its client's server, and the RAY_TMPDIR in which it is
    recorded."""

    port: int
    client_port: int
    folder: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Started]:
    """`ray start --head` with a token, in a session of its own: `ray stop` would end the clusters
    of others too."""
    # the names of Ray's sockets are long
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    started = Started(free_port(), free_port(), folder)
    ports = [
        f"--port={started.port}",
        f"--ray-client-server-port={started.client_port}",
        "--node-ip-address=127.0.0.1",
    ]
    quiet = ["--disable-usage-stats", "--include-dashboard=false", "--num-cpus=4"]
    secret = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_TMPDIR": str(folder),
        "RAY_worker_niceness": "0",
    }
    command = [str(BIN / "ray"), "start", "--head", "--block", *ports, *quiet]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    head = subprocess.Popen(
        command, text=True, env={**os.environ, **secret}, start_new_session=True, **pipes
    )  # type: ignore[call-overload]
    try:
        lines = []
        for line in head.stdout:
            lines.append(line)
            if "will now block" in line:
                break
        else:
            pytest.fail("".join(lines))
        # it starts beside the head
        for attempt in stamina.retry_context(OSError, attempts=None, timeout=60.0):
            with attempt:
                socket.create_connection(("127.0.0.1", started.client_port)).close()
        yield started
    finally:
        os.killpg(head.pid, signal.SIGKILL)  # after SIGTERM the raylet takes half a minute
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home without a token, and without a record of a cluster."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def of(home: Path, **variables: object) -> dict[str, str]:
    """The environment of a user whose clusters are recorded in ``home``, unless RAY_TMPDIR is
    another folder."""
    return {
        "HOME": str(home),
        "RAY_TMPDIR": str(home),
        **{name: str(value) for name, value in variables.items()},
    }


@pytest.mark.parametrize("where", ["auto", "RAY_ADDRESS", "address", "client"])
def test_a_token_is_taken_from_where_ray_takes_it(cluster: Started, home: Path, where: str) -> None:
    given = {"address": cluster.address, "client": f"ray://127.0.0.1:{cluster.client_port}"}.get(
        where, "auto"
    )
    auto = {"RAY_TMPDIR": cluster.folder}
    environment = {"RAY_ADDRESS": cluster.address}
    variables: dict[str, object] = {"auto": auto, "RAY_ADDRESS": environment}.get(where, {})
    with pytest.raises(
        ClusterRefused,
        match=r"launch\.address = .*asks for a token, and there is none; set "
        r"RAY_AUTH_TOKEN",
    ):
        find(given, of(home, **variables))
    with pytest.raises(ClusterRefused, match=r"refuses the token of RAY_AUTH_TOKEN"):
        find(given, of(home, **variables, RAY_AUTH_TOKEN="another one"))
    with pytest.raises(ClusterRefused, match=r"RAY_AUTH_TOKEN_PATH = '/no/file': No such file"):
        find(given, of(home, **variables, RAY_AUTH_TOKEN_PATH="/no/file"))
    found = find(given, of(home, **variables, RAY_AUTH_TOKEN=TOKEN))
    assert found.token == "RAY_AUTH_TOKEN"
    assert found.environment == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    assert found.ray == ("" if where == "client" else importlib.metadata.version("ray"))
    assert TOKEN not in repr(found)
    path = home / "own"
    path.write_text(f"{TOKEN}\n")
    assert find(given, of(home, **variables, RAY_AUTH_TOKEN_PATH=path)).token == str(path)
    (home / ".ray").mkdir()
    path.rename(home / ".ray" / "auth_token")
    assert find(given, of(home, **variables)).token == str(home / ".ray" / "auth_token")


def test_a_cluster_that_does_not_fit_is_refused_by_name(
    cluster: Started, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = of(home, RAY_AUTH_TOKEN=TOKEN)
    dead = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        ClusterRefused,
        match=rf"launch\.address = '{dead}': nothing answers there \(Connection "
        rf"refused\)",
    ):
        find(dead, own)
    with pytest.raises(
        ClusterRefused,
        match=r"is not the head of a Ray cluster; give its HOST:6379, or "
        r"ray://HOST:10001",
    ):
        find(f"127.0.0.1:{cluster.client_port}", own)
    with pytest.raises(
        ClusterRefused,
        match=r"RAY_ADDRESS = 'http://x:8265': is no address of a "
        r"Ray cluster",
    ):
        find("auto", of(home, RAY_ADDRESS="http://x:8265"))
    with monkeypatch.context() as patch:
        patch.setattr(ray_cluster, "_raylets", lambda: iter(()))
        with pytest.raises(
            ClusterRefused,
            match=rf"no node of that cluster; run `ray start "
            rf"--address={cluster.address}` here",
        ):
            find(cluster.address, own)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda _: "2.50.0")
        with pytest.raises(
            ClusterRefused,
            match=r"has Ray \d[\d.]+, and this environment 2\.50\.0; pip install "
            r"'ray\[serve\]==",
        ):
            find(cluster.address, own)
    own_minor = platform.python_version().rpartition(".")[0]
    with monkeypatch.context() as patch:
        patch.setattr(platform, "python_version", lambda: f"{own_minor}.99")
        with pytest.raises(
            ClusterRefused,
            match=rf"has Python {own_minor}\.\d+, and this "
            rf"environment {own_minor}\.99",
        ):
            find(cluster.address, own)
        assert find(
            cluster.address, {**own, "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}
        ).token


def test_the_address_of_the_recipe_comes_before_that_of_the_environment_and_this_machines(
    cluster: Started, home: Path
) -> None:
    own = of(home, RAY_AUTH_TOKEN=TOKEN)
    assert find("auto", own).address == "local", (
        "none is recorded there, and those of others are not joined"
    )
    assert find("auto", {**own, "RAY_TMPDIR": str(cluster.folder)}).address.endswith(
        f":{cluster.port}"
    )
    assert find("local", {**own, "RAY_TMPDIR": str(cluster.folder)}).address == "local"
    assert (
        find("auto", {**own, "RAY_ADDRESS": "local", "RAY_TMPDIR": str(cluster.folder)}).address
        == "local"
    )
    assert find(cluster.address, {**own, "RAY_ADDRESS": "127.0.0.1:1"}).address == cluster.address
    with pytest.raises(
        ClusterRefused,
        match=r"launch\.address = 'auto', RAY_ADDRESS = '127\.0\.0\.1:1': nothing "
        r"answers",
    ):
        find("auto", {**own, "RAY_ADDRESS": "127.0.0.1:1"})
    (home / "ray").mkdir()
    (home / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")
    assert find("auto", own).address == "local", "that one has ended"


def test_a_cluster_that_is_found_among_the_processes_is_joined_but_not_one_of_another_run(
    cluster: Started, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray start --temp-dir` records its cluster elsewhere."""
    recorded = cluster.folder / "ray" / "ray_current_cluster"
    text = recorded.read_text()
    own = of(home, RAY_AUTH_TOKEN=TOKEN, RAY_TMPDIR=cluster.folder)
    recorded.unlink()
    try:
        assert find("auto", own).address == text.strip()
        with pytest.raises(ClusterRefused, match="asks for a token"):
            find("auto", of(home, RAY_TMPDIR=cluster.folder))
        # as if a run had started it
        monkeypatch.setattr(ray_cluster, "OWN_RESOURCE", "node:__internal_head__")
        assert find("auto", own).address == "local"
    finally:
        recorded.write_text(text)


def test_the_cluster_of_a_run_alone_is_behind_a_token_that_no_other_program_knows(
    home: Path,
) -> None:
    first, second = (find("local", of(home)).environment for _ in range(2))
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) >= 32
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert "RAY_AUTH_TOKEN" not in find("local", of(home, RAY_AUTH_MODE="disabled")).environment


def asyncdock(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "api.cli.main", *arguments]
    here = {"PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **here, **variables}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def test_one_key_is_enough_for_a_cluster_with_a_token(cluster: Started, home: Path) -> None:
    """`check` says what the run will meet; the run's workers with engines are on the cluster."""
    key = ("--set", "launch.launcher=ray")
    user = of(home, RAY_TMPDIR=cluster.folder)
    refused = asyncdock("check", "tiny", *key, cwd=home, **user)
    assert refused.returncode == 2
    assert "asks for a token, and there is none" in refused.stderr
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(TOKEN)
    checked = asyncdock("check", "tiny", *key, cwd=home, **user)
    assert checked.returncode == 0, checked.stderr
    version = importlib.metadata.version("ray")
    assert (
        f":{cluster.port}, Ray {version}, with the token of {home / '.ray' / 'auth_token'}"
        in checked.stdout
    )
    done = asyncdock(
        "run", "tiny", *key, "--set", "train.steps=2", "--out", "out", "--plain", cwd=home, **user
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = [
        json.loads(line) for line in (home / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    ready = [
        event["data"]
        for event in events
        if event["kind"] == "worker" and event["data"]["change"] == "ready"
    ]
    on_hosts = {
        event["worker"] for event in ready if event.get("host") and event["stage"] != "host"
    }
    assert on_hosts == {"update-0", "rollout-0"}


def test_looking_takes_no_ray_into_this_process(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(home))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert look("auto").address == "local"
    with pytest.raises(ClusterRefused, match="nothing answers there"):
        look(f"127.0.0.1:{free_port()}")
    code = (
        "import sys; from orchestration.cluster.ray_cluster import find; find('local'); assert "
        "'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
