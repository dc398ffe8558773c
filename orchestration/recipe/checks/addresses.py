"""Checks of addresses: of the index, the warehouse, the weights and the cluster, and whether those
reach one another.

    index ── reached from other machines ──▶ warehouse and weights are too, by the same version of IP
          └─ on this machine alone ────────▶ so may they be: all workers are here

A value of `auto` is derived in :mod:`orchestration.recipe.schema`, and fits by itself.
"""

from __future__ import annotations

import ipaddress
import operator
import os
import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

from orchestration.recipe.checks.registry import Environment, check, machine_check, problem
from orchestration.recipe.problems import value_or_none
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections.clusters import CLUSTERS
from pipeline.compat.extras import install, is_installed
from pipeline.index.address import Address, redacted
from pipeline.node import AUTO, is_loopback, own_address
from pipeline.problems import Problem

REACH = ("launch.remote_rollouts", "launch.launcher", "pipeline.index", "pipeline.index_serve")
SERVED = ("pipeline.serve", "sync.transport", "sync.serve")
TLS = ("pipeline.tls_certificate", "pipeline.tls_key", "pipeline.tls_authority")


def index_host(recipe: Recipe) -> str:
    """Returns the host at which the index is reached; "" where that is derived, or is a Unix
    socket."""
    text = recipe.index_address
    if text and text != AUTO:
        return value_or_none(lambda: Address.split(text)[0]) or ""
    if recipe.pipeline.index.startswith(("redis://", "rediss://")):
        return urlsplit(recipe.pipeline.index).hostname or "localhost"
    return ""


def served_addresses(recipe: Recipe) -> dict[str, str]:
    """Returns the addresses that are given for warehouse and weights, by key; none that are derived
    or not used."""
    served = {"pipeline.serve": recipe.warehouse_address}
    if recipe.weight_transport == "network":
        served["sync.serve"] = recipe.sync_address
    return {
        key: address
        for key, address in served.items()
        if operator.attrgetter(key)(recipe) not in ("", AUTO)
    }


@check("pipeline.index_serve", "pipeline.index")
def the_index_that_is_served_is_the_runs_own(recipe: Recipe) -> Iterator[Problem]:
    if recipe.pipeline.index_serve not in ("", AUTO) and recipe.pipeline.index != "embedded":
        reason = (
            f"is for an embedded index, and pipeline.index = {redacted(recipe.pipeline.index)!r}"
        )
        yield problem(recipe, "pipeline.index_serve", reason, "take one of the two out")


@check(*REACH, *SERVED, *TLS)
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
    if (
        not recipe.warehouse_address
        and not recipe.index_address
        and recipe.weight_transport != "network"
    ):
        reason = "serves nothing: no other node connects, so that TLS protects nothing"
        fix = "set pipeline.serve to this node's address, or take the tls_ keys out"
        yield problem(recipe, "pipeline.serve", reason, fix)
    if all(os.path.isfile(value) for value in files.values()):
        try:
            recipe.pipeline.tls_contexts()
        except OSError as error:
            fix = "give a PEM certificate with its own private key, and the authority's certificate"
            yield problem(recipe, "pipeline.tls_certificate", f"cannot be used ({error})", fix)


@check("launch.placement", "external", "rollout.workers", *REACH, *SERVED)
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
    if pipeline.index == "embedded" and not pipeline.index_serve:
        fix = "set 'auto', or an address of this machine"
        yield problem(
            recipe,
            "pipeline.index_serve",
            f"leaves the index on this machine alone, but {where}",
            fix,
        )
    if pipeline.index.startswith("unix://"):
        fix = "set 'embedded', or the redis:// or rediss:// URL of a server that all machines reach"
        yield problem(recipe, "pipeline.index", f"is on this machine alone, but {where}", fix)
    if not pipeline.serve:
        fix = "set 'auto', or the address of this machine"
        yield problem(
            recipe, "pipeline.serve", f"is empty, but {where}, which read its prompts", fix
        )
    if recipe.weight_transport != "network":
        reason = f"is the memory of one machine, but {where}"
        yield problem(recipe, "sync.transport", reason, "set 'auto' or 'network'")


@check(
    "launch.launcher",
    "launch.placement",
    "launch.address",
    "rollout.device",
    "train.device",
    "critic.device",
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
    for key in ("rollout.device", "train.device", "critic.device"):
        device = operator.attrgetter(key)(recipe)
        if device is not None and ":" in device:
            kind = device.partition(":")[0]
            reason = f"has the number of a device, which {cluster.title} gives"
            yield problem(recipe, key, reason, f"set {kind!r}")


@machine_check(*REACH, *SERVED)
def served_addresses_reach_as_far_as_the_index(
    recipe: Recipe, environment: Environment
) -> Iterator[Problem]:
    """What listens on this machine alone is of no use to those that reach the index from another
    one. All addresses of one version of IP do not answer at an address of the other."""
    host = index_host(recipe)
    if _version(host) and ipaddress.ip_address(host).is_unspecified and not recipe.index_address:
        reason = f"stands for all addresses of a machine ({host}), and leads to none of them"
        yield problem(recipe, "pipeline.index", reason, "give the address of the server")
        return
    here_alone = is_loopback(host) if host else not recipe.spans_machines
    for key, address in served_addresses(recipe).items():
        reached_by_others = recipe.spans_machines or key == "pipeline.serve"
        if is_loopback(address) and not here_alone and reached_by_others:
            index = "pipeline.index_serve" if recipe.index_address else "pipeline.index"
            reason = (
                f"is reached from this machine alone, and {index} leads to the index from "
                f"others too"
            )
            yield problem(
                recipe, key, reason, "set 'auto', or the address of this machine on its network"
            )
        literal = _version(address)
        if literal and ipaddress.ip_address(address).is_unspecified:
            leading = host if host and (recipe.index_address or not here_alone) else ""
            if not leading and environment.here and not recipe.launch.on_cluster:
                leading = own_address()
            version = _version(leading)
            if version and version != literal:
                reason = (
                    f"stands for addresses of IPv{literal} alone, and other machines reach "
                    f"this one by IPv{version}"
                )
                yield problem(
                    recipe, key, reason, "set 'auto', or the address that other machines use"
                )


@machine_check("launch.remote_rollouts", "launch.launcher", *SERVED)
def served_addresses_are_of_this_machine(
    recipe: Recipe, environment: Environment
) -> Iterator[Problem]:
    served = served_addresses(recipe)
    if recipe.launch.on_cluster:
        served.pop("sync.serve", None)  # an address of the node that Ray gives to the trainer
    for key, address in served.items() if environment.here else ():
        try:
            family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((address, 0), family=family).close()
        except (OSError, UnicodeError) as error:
            reason = f"cannot be listened on ({error})"
            fix = "give a name or an address of this machine, without a port: a free one is taken"
            yield problem(recipe, key, reason, fix)


@machine_check("pipeline.index", "pipeline.index_serve")
def index_can_be_served(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    if not environment.here or (text := recipe.index_address) in ("", AUTO):
        return
    try:
        host = Address.parse(text).host
        if any(
            ipaddress.ip_address(found[4][0]).is_unspecified
            for found in socket.getaddrinfo(host, 0)
        ):
            raise ValueError("it stands for all addresses of this machine")
    except (OSError, ValueError) as error:
        fix = (
            "give an address of this machine that leads here from the others, with or without a "
            "free port"
        )
        yield problem(recipe, "pipeline.index_serve", f"cannot be listened on ({error})", fix)


@machine_check(*REACH, *SERVED, *TLS)
def the_certificate_is_of_the_addresses(
    recipe: Recipe, environment: Environment
) -> Iterator[Problem]:
    """Others check the certificate of this machine against the address by which they reach it."""
    if not environment.here or not recipe.pipeline.tls_certificate:
        return
    given = {
        key: address
        for key, address in served_addresses(recipe).items()
        if not _is_unspecified(address)
    }
    if recipe.index_address:
        given["pipeline.index_serve"] = index_host(recipe)
    if recipe.launch.on_cluster:
        given.pop("sync.serve", None)
    elif recipe.spans_machines:
        given = {key: address or own_address() for key, address in given.items()}
    for key, address in given.items():
        if address and (refused := _refused_certificate(recipe, address)):
            reason = f"is not accepted for {address!r}, {key} ({refused})"
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


def _is_unspecified(address: str) -> bool:
    return bool(_version(address)) and ipaddress.ip_address(address).is_unspecified


def _version(address: str) -> int:
    """Returns the version of IP of a literal ``address``; 0 for a name."""
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return 0
