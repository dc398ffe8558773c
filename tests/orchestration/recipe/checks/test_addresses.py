"""What `auto` stands for, and which addresses no run can work with."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.supervise.scale import scaled
from pipeline.node import own_address
from tests.orchestration.runs import MOCK
from tests.servers import self_signed

HOSTS = {"launch.launcher": "process", "launch.remote_rollouts": 1}
RAY = {"launch.launcher": "ray"}


def with_keys(changes: dict[str, Any]) -> Recipe:
    data = {name: dict(value) if isinstance(value, dict) else value for name, value in MOCK.items()}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        data.setdefault(section, {})[name] = value
    return parse_recipe(data)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("shared_memory", "127.0.0.1", "", "")),
        (HOSTS, ("network", "auto", "auto", "auto")),
        (RAY, ("network", "auto", "auto", "auto")),
        ({**RAY, "pipeline.index": "redis://10.0.0.9"}, ("network", "auto", "auto", "")),
        ({"sync.transport": "network"}, ("network", "127.0.0.1", "", "")),
        ({**HOSTS, "pipeline.serve": "0.0.0.0"}, ("network", "0.0.0.0", "0.0.0.0", "auto")),
        ({**RAY, "pipeline.serve": "0.0.0.0"}, ("network", "0.0.0.0", "0.0.0.0", "auto")),
        ({"pipeline.serve": "0.0.0.0"}, ("shared_memory", "0.0.0.0", "0.0.0.0", "")),
        (
            {**HOSTS, "pipeline.serve": "127.0.0.1:7"},
            ("network", "127.0.0.1", "127.0.0.1", "127.0.0.1:7"),
        ),
        (
            {**RAY, "pipeline.serve": "127.0.0.1:7"},
            ("network", "auto", "127.0.0.1", "127.0.0.1:7"),
        ),
        (
            {**HOSTS, "pipeline.serve": own_address(), "pipeline.index": "redis://10.0.0.9"},
            ("network", own_address(), own_address(), ""),
        ),
    ],
)
def test_one_key_says_all_and_those_that_are_given_win(
    changes: dict[str, Any], expected: tuple[str, ...]
) -> None:
    recipe = with_keys(changes)
    derived = (
        recipe.weight_transport,
        recipe.sync_address,
        recipe.warehouse_address,
        recipe.index_address,
    )
    assert derived == expected
    again = Recipe.from_json(recipe.to_json())
    assert again.sync_address == expected[1], "a resumed run may have another launcher"


@pytest.mark.parametrize("others", [HOSTS, RAY], ids=["hosts", "ray"])
@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"pipeline.index": "unix:///run/x.sock"}, r"pipeline\.index = .*is on this machine alone"),
        ({"pipeline.index": "redis://0.0.0.0"}, r"pipeline\.index = .*stands for all addresses"),
        ({"pipeline.serve": ""}, r"pipeline\.serve = .*is empty, but other machines start workers"),
        *(
            (
                {"pipeline.serve": address, "pipeline.index": "rediss://a.server"},
                r"pipeline\.serve = .*this machine alone, and pipeline\.index",
            )
            for address in ("127.0.0.1", "127.0.0.7", "localhost", "::1")
        ),
        ({"sync.transport": "shared_memory"}, r"sync\.transport = .*is the memory of one machine"),
        ({"pipeline.serve": "10.99.99.99"}, r"pipeline\.serve = .*cannot be listened on"),
        (
            {"pipeline.serve": "::", "pipeline.index": "redis://10.0.0.9"},
            r"pipeline\.serve = .*IPv6 alone, and .* by IPv4",
        ),
        (
            {"pipeline.serve": "0.0.0.0", "pipeline.index": "redis://[fd00::9]"},
            r"pipeline\.serve = .*IPv4 alone, and .* by IPv6",
        ),
        (
            {"pipeline.serve": "0.0.0.0:7"},
            r"pipeline\.serve = .*the port is that of an embedded index at one address",
        ),
        (
            {"pipeline.serve": f"{own_address()}:7", "pipeline.index": "redis://10.0.0.9"},
            r"pipeline\.serve = .*the port is that of an embedded index",
        ),
        ({"pipeline.index_serve": "10.0.0.1"}, r"index_serve = .*write `pipeline\.serve`"),
        ({"sync.serve": "10.0.0.1"}, r"sync\.serve = .*write `pipeline\.serve`"),
    ],
)
def test_addresses_that_other_machines_cannot_reach_are_refused(
    others: dict[str, Any], changes: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(RecipeError, match=wrong):
        with_keys({**others, **changes})


@pytest.mark.parametrize("others", [HOSTS, RAY], ids=["hosts", "ray"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline.index": "redis://a.server"},
        {"pipeline.index": "redis://127.0.0.1", "pipeline.serve": "0.0.0.0"},
        {"pipeline.serve": "0.0.0.0"},
        {"pipeline.serve": "127.0.0.1"},
        {"pipeline.serve": own_address()},
    ],
)
def test_addresses_that_a_run_works_with_are_accepted(
    others: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert with_keys({**others, **changes}).spans_machines


def test_without_other_machines_the_weights_stay_here_and_a_warehouse_is_for_whom_the_index_is_for() -> (
    None
):
    elsewhere = {"pipeline.index": "redis://a.server"}
    assert with_keys({**elsewhere, "sync.transport": "network"}).sync_address == "127.0.0.1"
    with pytest.raises(
        RecipeError,
        match=r"pipeline\.serve = .*is reached from this machine "
        r"alone",
    ):
        with_keys({**elsewhere, "pipeline.serve": "127.0.0.1"})
    with pytest.raises(RecipeError, match=r"pipeline\.serve = .*cannot be listened on"):
        with_keys({"sync.transport": "network", "pipeline.serve": "10.99.99.99"})


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "http://10.0.0.1:8265", "ray://10.0.0.1", "10.0.0.1:x", "a b:1"]
)
def test_what_is_no_address_of_a_cluster_is_refused(address: str) -> None:
    with pytest.raises(
        RecipeError,
        match=r"launch\.address = .*is no address of a Ray cluster; "
        r"write HOST:6379",
    ):
        with_keys({**RAY, "launch.address": address})


def test_a_certificate_is_of_the_address_that_others_use(tmp_path: Path) -> None:
    def tls(folder: Path) -> dict[str, Any]:
        files = {"certificate": "cert.pem", "key": "key.pem", "authority": "cert.pem"}
        return {f"pipeline.tls_{key}": str(folder / name) for key, name in files.items()}

    for name, addresses in (("right", [own_address()]), ("wrong", [])):
        (tmp_path / name).mkdir()
        self_signed(tmp_path / name, *addresses)
    right = tls(tmp_path / "right")
    assert with_keys({**HOSTS, **right}).pipeline.tls_certificate
    with pytest.raises(
        RecipeError,
        match=rf"tls_certificate = .*is not accepted for '{own_address()}', the address of this",
    ):
        with_keys({**HOSTS, **tls(tmp_path / "wrong")})
    assert with_keys({**tls(tmp_path / "wrong"), "pipeline.serve": "127.0.0.1"}), "which is in it"


def test_a_port_that_the_run_listens_on_does_not_keep_it_from_being_scaled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    recipe = with_keys({**HOSTS, "pipeline.serve": f"127.0.0.1:{port}"})
    with socket.create_server(("127.0.0.1", port)):
        assert scaled(recipe, 2).rollout.workers == 2
        with pytest.raises(RecipeError, match=r"pipeline\.serve = .*cannot be listened on"):
            with_keys({**HOSTS, "pipeline.serve": f"127.0.0.1:{port}"})


@pytest.mark.parametrize(
    ("transport", "wrong"),
    [
        ("collective", r"sync\.transport = \"collective\": has another name now; write 'network'"),
        (["collective"], r"sync\.transport = \[.*\]: is not allowed"),
        ("networks", r"sync\.transport = \"networks\": is not allowed; .*'network'"),
    ],
)
def test_the_old_name_of_the_transport_names_the_new_one(transport: Any, wrong: str) -> None:
    with pytest.raises(RecipeError, match=wrong):
        with_keys({"sync.transport": transport})
