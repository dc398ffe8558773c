"""Checks of addresses: of the index, of this machine and of the cluster, and whether those reach one
another.

    index ── reached from other machines ──▶ this machine is too, by the same version of IP
          └─ on this machine alone ────────▶ so may it be: all workers are here

A value of `auto` is derived in :mod:`orchestration.recipe.schema`, and fits by itself.
"""

from __future__ import annotations

import ipaddress
import operator
import os
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

from orchestration.cluster_backends import CLUSTERS
from orchestration.recipe.checks.registry import Environment, check, machine_check, problem
from orchestration.recipe.schema import Recipe
from pipeline.compat.extras import install, is_installed
from pipeline.index.address import Address
from pipeline.node import AUTO, is_loopback, is_unspecified, own_address
from pipeline.problems import Problem

REACH = ("launch.remote_rollouts", "launch.launcher", "pipeline.index", "pipeline.serve")
TLS = ("pipeline.tls_certificate", "pipeline.tls_key", "pipeline.tls_authority")


def index_host(recipe: Recipe) -> str:
    """Returns the host at which the index is reached; "" where that is derived, or is a Unix
    socket."""
    if recipe.index_address not in ("", AUTO):
        return recipe.warehouse_address
    if recipe.pipeline.index.startswith(("redis://", "rediss://")):
        return urlsplit(recipe.pipeline.index).hostname or "localhost"
    return ""


@check(*REACH, "sync.transport", *TLS)
def tls_files_fit(recipe: Recipe) -> Iterator[Problem]:
    files = {key: operator.attrgetter(key)(recipe) for key in TLS}
    if not any(files.values()):
        return
    for key, value in files.items():
        if not value:
            yield Problem(
                key, value, "is missing", f"give all of {', '.join(files)}, or none for no TLS"
            )
        elif not os.path.isfile(value):
            yield Problem(key, value, "is no file", "give the path of a PEM file")
    if not recipe.warehouse_address and recipe.weight_transport != "network":
        reason = "serves nothing: no other node connects, so that TLS protects nothing"
        fix = "set pipeline.serve to this node's address, or take the tls_ keys out"
        yield problem(recipe, "pipeline.serve", reason, fix)
    if all(os.path.isfile(value) for value in files.values()):
        try:
            recipe.pipeline.tls_contexts()
        except OSError as error:
            fix = "give a PEM certificate with its own private key, and the authority's certificate"
            yield problem(recipe, "pipeline.tls_certificate", f"cannot be used ({error})", fix)


@check("launch.placement", "external", "rollout.workers", "sync.transport", *REACH)
def other_machines_reach_the_run(recipe: Recipe) -> Iterator[Problem]:
    launch = recipe.launch
    pipeline = recipe.pipeline
    if not recipe.spans_machines:
        return
    where = "other machines start workers"
    no_rollouts = recipe.colocated or not recipe.runs_stage("rollout")
    if launch.remote_rollouts and (launch.remote_rollouts > recipe.rollout.workers or no_rollouts):
        reason = f"is more than rollout.workers = {recipe.rollout.workers}"
        if no_rollouts:
            reason = "are rollout workers, of which this run starts none by themselves"
        yield problem(recipe, "launch.remote_rollouts", reason, "lower it, or set rollout.workers")
    if launch.remote_rollouts and launch.launcher != "process":
        one = "places all of them itself" if launch.on_cluster else "has one process"
        yield problem(
            recipe, "launch.launcher", f"{one}, but {where}", "set launch.launcher = 'process'"
        )
    if pipeline.index.startswith("unix://"):
        fix = "set 'embedded', or the redis:// or rediss:// URL of a server that all machines reach"
        yield problem(recipe, "pipeline.index", f"is on this machine alone, but {where}", fix)
    if not pipeline.serve:
        fix = "set 'auto', or the address of this machine"
        yield problem(recipe, "pipeline.serve", f"is empty, but {where}", fix)
    if recipe.weight_transport != "network":
        reason = f"is the memory of one machine, but {where}"
        yield problem(recipe, "sync.transport", reason, "set 'auto' or 'network'")


@check(
    "launch.launcher",
    "launch.placement",
    "launch.address",
    "rollout.device",
    "train.device",
)
def a_cluster_places_the_workers(recipe: Recipe) -> Iterator[Problem]:
    launch = recipe.launch
    cluster = launch.cluster
    if cluster is None:
        if launch.address != type(launch)().address:
            names = " or ".join(map(repr, CLUSTERS))
            fix = f"set launch.launcher = {names}, or leave it out"
            yield problem(recipe, "launch.address", "is of a cluster", fix)
        return
    if cluster.extra and not is_installed(cluster.extra):
        reason = f"needs {cluster.title}, which is not installed"
        yield problem(recipe, "launch.launcher", reason, install(cluster.extra))
    if not cluster.address.fullmatch(launch.address):
        reason = f"is no address of a {cluster.title} cluster"
        yield problem(recipe, "launch.address", reason, cluster.address_fix)
    if recipe.colocated:
        launcher = f"launch.launcher = {launch.launcher!r}"
        reason = f"is of one machine so far, while {launcher} places workers on several"
        yield problem(recipe, "launch.placement", reason, "set launch.placement = 'separate'")
    for key in ("rollout.device", "train.device"):
        device = operator.attrgetter(key)(recipe)
        if device is not None and ":" in device:
            kind = device.partition(":")[0]
            reason = f"has the number of a device, which {cluster.title} gives"
            yield problem(recipe, key, reason, f"set {kind!r}")


@machine_check(*REACH)
def the_address_reaches_as_far_as_the_index(
    recipe: Recipe, environment: Environment
) -> Iterator[Problem]:
    """What listens on this machine alone is of no use to those that reach the index from another
    one. All addresses of one version of IP do not answer at an address of the other."""
    host = index_host(recipe)
    if is_unspecified(host):
        reason = f"stands for all addresses of a machine ({host}), and leads to none of them"
        yield problem(recipe, "pipeline.index", reason, "give the address of the server")
        return
    here_alone = is_loopback(host) if host else not recipe.spans_machines
    address = recipe.warehouse_address
    if address not in ("", AUTO) and is_loopback(address) and not here_alone:
        reason = (
            "is reached from this machine alone, and pipeline.index leads to the index from others "
            "too"
        )
        fix = "set 'auto', or the address of this machine on its network"
        yield problem(recipe, "pipeline.serve", reason, fix)
    if is_unspecified(address):
        leading = "" if here_alone else host
        if not leading and environment.here and not recipe.launch.on_cluster:
            leading = own_address()
        literal = _version(address)
        version = _version(leading)
        if version and version != literal:
            reason = (
                f"stands for addresses of IPv{literal} alone, and other machines reach "
                f"this one by IPv{version}"
            )
            fix = "set 'auto', or the address that other machines use"
            yield problem(recipe, "pipeline.serve", reason, fix)


@machine_check(*REACH)
def the_address_is_of_this_machine(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    if not environment.here or recipe.warehouse_address in ("", AUTO):
        return
    text = recipe.pipeline.serve
    try:
        Address.parse(text)
        if Address.split(text)[1] and recipe.index_address != text:
            raise ValueError("the port is that of an embedded index at one address")
    except (OSError, ValueError) as error:
        reason = f"cannot be listened on ({error})"
        fix = "give a name or an address of this machine, with or without a free port"
        yield problem(recipe, "pipeline.serve", reason, fix)


@machine_check(*REACH, *TLS)
def the_certificate_is_of_the_address(
    recipe: Recipe, environment: Environment
) -> Iterator[Problem]:
    """Others check the certificate of this machine against the address by which they reach it."""
    if not environment.here or not recipe.pipeline.tls_certificate:
        return
    address = recipe.warehouse_address
    if address == AUTO or is_unspecified(address):
        is_known = recipe.index_address and not recipe.launch.on_cluster
        address = own_address() if is_known else ""
    if address and (refused := _refused_certificate(recipe, address)):
        reason = f"is not accepted for {address!r}, the address of this machine ({refused})"
        fix = (
            "give one with that name or address among its subjectAltNames, signed by "
            "pipeline.tls_authority"
        )
        yield problem(recipe, "pipeline.tls_certificate", reason, fix)


def _refused_certificate(recipe: Recipe, address: str) -> str:
    """Returns why a client does not accept the recipe's certificate of a server at ``address``; ""
    where it does. Both ends of the handshake are here."""
    contexts = recipe.pipeline.tls_contexts()
    assert contexts is not None
    to_server = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    server = contexts[0].wrap_bio(to_server, to_client, server_side=True)
    client = contexts[1].wrap_bio(to_client, to_server, server_hostname=address)
    for end in (client, server, client):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return str(getattr(error, "verify_message", "") or error)
    return ""


def _version(address: str) -> int:
    """Returns the version of IP of a literal ``address``; 0 for a name."""
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return 0
