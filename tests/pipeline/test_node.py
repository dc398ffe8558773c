"""Identities of nodes, folders and processes: equal where these are shared, different where only
names and paths are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestration.processes.handles import Process
from pipeline.node import (
    folder_id,
    is_here,
    is_loopback,
    is_own,
    node_id,
    own_address,
    process_space,
    route_to,
)
from tests.compose.sandbox import missing

needs_namespaces = pytest.mark.skipif(bool(missing()), reason=missing())
ASK = (
    "from pathlib import Path; from pipeline.node import *; print(node_id(Path({!r})), "
    "process_space())"
)


def asked(folder: Path, *prefix: str, before: str = "true") -> list[str]:
    """Returns node and process space as seen by a process that ``prefix`` starts, after the command
    ``before``."""
    command = [
        *prefix,
        "sh",
        "-c",
        f'{before} && exec "$0" "$@"',
        sys.executable,
        "-c",
        ASK.format(str(folder)),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()


def test_processes_that_share_a_folder_have_the_same_identities(tmp_path: Path) -> None:
    assert asked(tmp_path) == [node_id(tmp_path), process_space()]
    assert is_here(node_id(tmp_path), tmp_path)


def test_a_folder_that_was_copied_or_made_again_elsewhere_is_another_one(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    before = folder_id(first)
    shutil.copytree(first, tmp_path / "copy")
    assert folder_id(tmp_path / "copy") != before
    (tmp_path / "link").symlink_to(first)
    assert folder_id(tmp_path / "link") == before
    assert not is_here(node_id(first), tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        folder_id(tmp_path / "none")


@needs_namespaces
def test_a_container_with_the_same_name_and_paths_is_another_node(tmp_path: Path) -> None:
    apart = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
    own = node_id(tmp_path)
    node, space = asked(tmp_path, *apart, before=f"mount -t tmpfs none {tmp_path}")
    assert node.rpartition("-")[0] == own.rpartition("-")[0], "the host name is the same"
    assert node != own
    assert space != process_space()
    assert not is_here(node, tmp_path)
    # One that shares this folder, as with `docker run --ipc host`, maps the same arenas.
    node, space = asked(tmp_path, *apart)
    assert node == own
    assert space != process_space()


@needs_namespaces
def test_a_process_of_another_pid_namespace_is_not_taken_for_one_of_this(tmp_path: Path) -> None:
    code = (
        "import os; from orchestration.processes.handles import Process; "
        "print(Process.of(os.getpid()))"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    text = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    assert text.startswith("1:")
    assert Process.parse(text) is None
    own = Process.of(1)
    assert Process.parse(str(own)) == own
    assert Process.parse(f"1:{own.born}") is None
    assert Process.parse("1") is None


def test_the_own_address_is_one_of_this_machine() -> None:
    assert is_own(own_address())
    assert is_own("localhost")
    assert not is_own("10.99.99.99")
    assert route_to("127.0.0.7") == "127.0.0.1"
    assert [
        is_loopback(host)
        for host in ("localhost", "::1", "127.0.0.7", "0.0.0.0", "10.0.0.1", "no.such.name")
    ] == ([True, True, True, False, False, False])


LINK = (
    "ip link add {0} type veth peer name {0}peer && ip addr add {1}/24 dev {0} && ip link set "
    "{0} up"
)


@needs_namespaces
@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (["true"], "127.0.0.1"),
        ([LINK.format("a0", "10.1.2.3")], "10.1.2.3"),
        (
            [
                LINK.format("a0", "10.1.2.3"),
                LINK.format("b0", "10.7.7.7"),
                "ip link set b0peer up && ip route add default via 10.7.7.1 dev b0",
            ],
            "10.7.7.7",
        ),
    ],
    ids=["no network", "no default route", "default route"],
)
def test_the_own_address_is_that_of_the_default_route_or_of_an_interface(
    commands: list[str], expected: str
) -> None:
    ask = "from pipeline.node import own_address; print(own_address())"
    script = " && ".join(["ip link set lo up", *commands, 'exec "$0" "$@"'])
    command = ["unshare", "--net", "sh", "-c", script, sys.executable, "-c", ask]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert made.stdout.strip() == expected, made.stderr
