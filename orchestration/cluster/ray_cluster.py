"""The Ray cluster of a run: where it is, and whether it lets this program in.

The process of a run's Ray driver begins here.

launch.address ─▶ find: itself; `auto`: RAY_ADDRESS, else the cluster of `ray start` here, else `local`
                    └▶ ask: does it answer, take the token, have the same Ray and Python?
                         ├▶ ClusterRefused
                         └▶ Cluster, with the environment of the driver, which imports Ray only then

Ray by itself takes 20 s to report a missing token as a timeout, and sends one only where its own
mode says so. A process whose mode is not the cluster's cannot be answered. So the cluster is asked
first, in one call of gRPC, without Ray.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestration.processes.environment import importable
from pipeline.compat.extras import extra, is_installed

AUTO = "auto"
LOCAL = "local"
CLIENT = "ray://"
# marks the cluster that a run has started for itself: no other run joins it
OWN_RESOURCE = "asyncdock-run"
ANSWER_SECONDS = 10.0
# key and namespace
METADATA = ("ray.rpc.InternalKVGcsService/InternalKVGet", b"\n\x10CLUSTER_METADATA\x12\x07cluster")
CLIENT_INFO = ("ray.rpc.RayletDriver/ClusterInfo", b"")


class ClusterRefused(ValueError):
    """There is no such cluster, or it does not take this program; the message says why and what to
    do."""


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that a run can use.

    ``address``: for `ray.init`. ``token``: where the token is from; "" where the cluster asks for
    none. ``environment``: of the process that imports Ray. ``ray``: the cluster's version, "" where
    it was not told.
    """

    address: str
    token: str = ""
    ray: str = ""
    environment: dict[str, str] = field(default_factory=dict, repr=False)


def find(
    address: str, environment: Mapping[str, str] = os.environ, key: str = "launch.address"
) -> Cluster:
    """Return the cluster of ``address``, the value of ``key``. Raises ClusterRefused."""
    if address != AUTO:
        return _open(address, f"{key} = {address!r}", environment)
    ray_address = environment.get("RAY_ADDRESS", "")
    if ray_address not in ("", AUTO):
        return _open(ray_address, f"{key} = 'auto', RAY_ADDRESS = {ray_address!r}", environment)
    began = _address_of_ray_start(environment)
    by_itself = _asks_by_itself(environment)
    has_ended = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    if began and (by_itself or _reply(began, METADATA, "")[0] not in has_ended):
        return _open(began, f"{key} = 'auto', the cluster of this machine at {began}", environment)
    running = sorted(
        {node["gcs-address"] for node in _nodes_here(environment) if _is_joinable(node)}
    )
    running = [each for each in running if by_itself or _began_by_ray_start(each, environment)]
    if len(running) > 1:
        raise ClusterRefused(
            f"{key} = 'auto': this machine belongs to several Ray clusters, {', '.join(running)}; "
            "give one of them, here or as RAY_ADDRESS"
        )
    if running:
        return _open(
            running[0], f"{key} = 'auto', the cluster of this machine at {running[0]}", environment
        )
    return _open(LOCAL, f"{key} = 'auto'", environment)


def described(address: str) -> str:
    """Return in words which cluster a run at ``address`` has. Raises ClusterRefused."""
    cluster = look(address)
    if cluster.address == LOCAL:
        return (
            f"cluster: none on this machine; the run starts one with Ray {cluster.ray}, and ends it"
        )
    version = f", Ray {cluster.ray}" if cluster.ray else ""
    token = f", with the token of {cluster.token}" if cluster.token else ""
    return f"cluster: {cluster.address}{version}{token}"


def look(address: str) -> Cluster:
    """Return what :func:`find` does, from a process of its own: the threads of gRPC would not
    outlive a fork."""
    command = [sys.executable, "-P", "-m", __spec__.name, address]
    process = subprocess.run(
        command, env=importable(os.environ), stdout=subprocess.PIPE, text=True, check=True
    )
    reply = json.loads(process.stdout)
    if "failed" in reply:
        raise ClusterRefused(reply["failed"])
    return Cluster(**reply)


def _open(address: str, where: str, environment: Mapping[str, str]) -> Cluster:
    """Return the cluster at ``address``, once it takes this program.

    ``where``: how it is called in messages.
    """
    if address == LOCAL:
        ray_environment = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
        if environment.get("RAY_AUTH_MODE", "token") == "token":
            # which no other program knows
            ray_environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        return Cluster(LOCAL, ray=importlib.metadata.version("ray"), environment=ray_environment)
    server = address.removeprefix(CLIENT)
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}", server):
        raise ClusterRefused(
            f"{where}: is no address of a Ray cluster; write HOST:6379, or ray://HOST:10001"
        )
    if _asks_by_itself(environment):
        return Cluster(address)
    through_client = address.startswith(CLIENT)
    call = CLIENT_INFO if through_client else METADATA
    code, reply = _reply(server, call, "")
    token = ""
    source = ""
    if code == "UNAUTHENTICATED":
        token, source = _token(where, environment)
        code, reply = _reply(server, call, token)
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        raise ClusterRefused(
            f"{where}: refuses the token of {source}; take the one that `ray get-auth-token` "
            f"prints on its head"
        )
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        fix = (
            "start it (`ray start --head`), or leave the address out for the cluster of this "
            "machine"
        )
        raise ClusterRefused(f"{where}: nothing answers there ({_last_part(reply)}); {fix}")
    if not through_client and (code or b"{" not in reply):
        fix = "give its HOST:6379, or ray://HOST:10001 for the port of Ray's client"
        raise ClusterRefused(f"{where}: what answers there is not the head of a Ray cluster; {fix}")
    versions = {} if through_client else json.loads(reply[reply.index(b"{") :])
    _compare(versions, where, environment)
    if not through_client and sys.platform == "linux" and not _has_node_here(server):
        fix = f"run `ray start --address={server}` here, or give its ray://HOST:10001"
        raise ClusterRefused(f"{where}: this machine is no node of that cluster; {fix}")
    mode = (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        if token
        else {"RAY_AUTH_MODE": "disabled"}
    )
    return Cluster(address, source, versions.get("ray_version", ""), mode)


def _asks_by_itself(environment: Mapping[str, str]) -> bool:
    """Return whether Ray connects in a way that is not imitated here: TLS of its own, tokens of
    Kubernetes."""
    own_tls = environment.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    return own_tls or environment.get("RAY_AUTH_MODE") == "k8s" or not is_installed("grpc")


def _reply(server: str, call: tuple[str, bytes], token: str) -> tuple[str, Any]:
    """Return the name of gRPC's status, "" for success, and the reply's bytes or the text of the
    error."""
    with extra("ray"):
        import grpc

    method, request = call
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(server, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return "", channel.unary_unary(f"/{method}")(
                request, timeout=ANSWER_SECONDS, metadata=metadata
            )
        except grpc.RpcError as error:
            return error.code().name, error.details() or ""


def _last_part(text: str) -> str:
    """Return the cause at the end of a message of gRPC.

    >>> _last_part("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused")
    'Connection refused'
    """
    return text.rpartition(": ")[2]


def _token(where: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the token, and where it is from, in Ray's order.

    Raises ClusterRefused where there is none.
    """
    if token := environment.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    named = environment.get("RAY_AUTH_TOKEN_PATH", "")
    path = (
        Path(named)
        if named
        else Path(environment.get("HOME") or Path.home()) / ".ray" / "auth_token"
    )
    try:
        token = path.read_text().strip()
    except OSError as error:
        token = ""
        named = named and f" (RAY_AUTH_TOKEN_PATH = {named!r}: {error.strerror})"
    if not token:
        fix = (
            f"set RAY_AUTH_TOKEN to what `ray get-auth-token` prints on its head, or put that "
            f"into {path}"
        )
        raise ClusterRefused(f"{where}: asks for a token, and there is none{named}; {fix}")
    return token, str(path)


def _compare(cluster: Mapping[str, str], where: str, environment: Mapping[str, str]) -> None:
    """Raise ClusterRefused where the cluster has another Ray or Python than this program."""
    ray_here = importlib.metadata.version("ray")
    ray_there = cluster.get("ray_version", "")
    if ray_there and ray_there != ray_here:
        fix = f"pip install 'ray[serve]=={ray_there}'"
        raise ClusterRefused(
            f"{where}: has Ray {ray_there}, and this environment {ray_here}; {fix}"
        )
    python_here = platform.python_version()
    python_there = cluster.get("python_version", "")
    parts = 2 if environment.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL") == "minor" else 3
    if python_there and python_there.split(".")[:parts] != python_here.split(".")[:parts]:
        versions = f"has Python {python_there}, and this environment {python_here}"
        raise ClusterRefused(f"{where}: {versions}; Ray asks for the same one")


def _temporary_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder in which `ray start` records its cluster."""
    return Path(environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp") / "ray"  # noqa: S108  (read, as Ray has it)


def _address_of_ray_start(environment: Mapping[str, str]) -> str:
    """Return what the last `ray start` of this machine has recorded; "" for nothing.

    The cluster may have ended.
    """
    try:
        return (_temporary_folder(environment) / "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


def _began_by_ray_start(address: str, environment: Mapping[str, str]) -> bool:
    """Return whether the cluster at ``address`` is not that of another program, which ends it with
    itself.

    One that does not tell without its token counts.
    """
    code, reply = _reply(address, METADATA, "")
    if code == "UNAUTHENTICATED":
        try:
            code, reply = _reply(address, METADATA, _token("", environment)[0])
        except ClusterRefused:
            return True
    if code or b"{" not in reply:
        return code in ("UNAUTHENTICATED", "PERMISSION_DENIED")
    return not json.loads(reply[reply.index(b"{") :]).get("ray_init_cluster")


def _is_joinable(node: Mapping[str, str]) -> bool:
    return OWN_RESOURCE not in node.get("static_resource_list", "")


def _nodes_here(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the options of the raylets of this user on this machine; those below ``RAY_TMPDIR``
    where that is set."""
    below = str(_temporary_folder(environment)) if environment.get("RAY_TMPDIR") else ""
    for process in _raylets():
        options = _options(process)
        is_own = process.stat().st_uid == os.getuid()
        if (
            is_own
            and options.get("gcs-address")
            and (not below or options.get("temp_dir") == below)
        ):
            yield options


def _has_node_here(server: str) -> bool:
    """Return whether a raylet of this machine, of any user, has a head on the port of ``server``:
    its host has several names."""
    port = server.rpartition(":")[2]
    return any(
        _options(process).get("gcs-address", "").rpartition(":")[2] == port
        for process in _raylets()
    )


def _raylets() -> Iterator[Path]:
    """Yield the folders in /proc of the raylets of this machine (Linux alone)."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().partition(b"\0")[0].endswith(b"/raylet"):
                yield process
        except OSError:  # it has ended
            continue


def _options(process: Path) -> dict[str, str]:
    try:
        parts = (process / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    pairs = [part[2:].partition("=") for part in parts if part.startswith("--")]
    return {name: value for name, _, value in pairs}


def main() -> None:
    """Find the cluster of `launch.address`, the first argument, and be the driver of a run there;
    ``cpus``, the second one: of a node that is started for it. Without that one, print the cluster.
    """
    address, *cpus = sys.argv[1:]
    try:
        cluster = find(address)
    except ClusterRefused as refused:
        return print(json.dumps({"failed": str(refused)}), flush=True)
    if not cpus:
        shown = asdict(cluster)
        del shown["environment"]
        return print(json.dumps(shown))
    os.environ |= cluster.environment
    # imports Ray, which reads the environment once
    from orchestration.cluster.ray_driver import Driver

    Driver(OWN_RESOURCE if cluster.address == LOCAL else "").run(cluster.address, float(cpus[0]))


if __name__ == "__main__":
    main()
