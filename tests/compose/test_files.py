"""The stack's files keep what compose/README.md promises, and are what their readers take:
compose's schema, a Dockerfile linter, the versions that the project allows."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.compose.sandbox import ROOT

pytest.importorskip(
    "dockerfile_parse", reason="dockerfile-parse is not installed; pip install -e '.[dev]'"
)

from tests.compose.image import let_through, stages
from tests.compose.services import FOLDER, in_bytes, load, ports

SERVICES = load()["services"]
OURS = {name: spec for name, spec in SERVICES.items() if spec["image"].startswith("asyncdock")}


def tool(name: str) -> list[str]:
    """A program of the environment that runs the tests; skips where it is not."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; pip install -e '.[dev]'")
    return [found]


def test_compose_yaml_is_valid_by_the_compose_specification() -> None:
    command = [
        *tool("check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
        str(FOLDER / "compose.yaml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_schema_is_one_that_refuses(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(
        (FOLDER / "compose.yaml").read_text().replace("read_only: true", "readonly: true")
    )
    command = [*tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(wrong)]
    assert subprocess.run(command, capture_output=True).returncode != 0


def test_the_dockerfile_has_nothing_for_a_linter_to_say() -> None:
    done = subprocess.run(
        [*tool("hadolint"), str(FOLDER / "Dockerfile")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_scripts_are_posix_shell() -> None:
    for script in ("setup", "entrypoint.sh"):
        subprocess.run(["sh", "-n", str(FOLDER / script)], check=True)


# --- every service
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_do_no_more_than_it_needs(name: str) -> None:
    spec = SERVICES[name]
    assert spec["read_only"]
    assert spec["cap_drop"] == ["ALL"]
    assert spec["security_opt"] == ["no-new-privileges:true"]
    assert int(spec["user"].split(":")[0]) > 0
    assert not {"privileged", "cap_add", "pid", "ipc", "devices", "env_file"} & set(spec)
    assert all("docker.sock" not in mount for mount in spec.get("volumes", []))


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_limits_and_one_version(name: str) -> None:
    spec = SERVICES[name]
    assert {"cpus", "memory", "pids"} <= set(spec["deploy"]["resources"]["limits"])
    assert spec["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
    _, _, tag = spec["image"].partition(":")
    assert re.search(r"\d+\.\d+\.\d+", tag), f"{spec['image']} may be another image tomorrow"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_asks_for_no_more_processors_than_any_machine_has(name: str) -> None:
    """The engine refuses a limit above the machine's processors; 0 is none."""
    assert float(SERVICES[name]["deploy"]["resources"]["limits"]["cpus"]) <= 1
    given = load({"AGENT_CPUS": "2.5"})["services"][name]["deploy"]["resources"]["limits"]["cpus"]
    assert (float(given) == 2.5) == (name in ("agent", "ray-host"))


@pytest.mark.parametrize("name", SERVICES)
def test_an_older_engine_takes_the_health_check(name: str) -> None:
    assert "start_interval" not in SERVICES[name]["healthcheck"]  # refused before Docker Engine 25


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_stays_has_a_health_check_and_is_started_again(name: str) -> None:
    spec = SERVICES[name]
    # tokens, model, demo: they do one thing and end
    ends = spec["restart"].startswith("on-failure")
    assert spec["restart"] in ("unless-stopped", "on-failure:3", "no")
    if ends or spec["restart"] == "no":
        assert spec["healthcheck"] == {"disable": True}
    else:
        assert spec["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
        assert {"interval", "timeout", "retries", "start_period"} <= set(spec["healthcheck"])


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_names_is_there(name: str, tmp_path: Path) -> None:
    spec = SERVICES[name]
    whole = load()
    for mount in spec.get("volumes", []):
        source = mount.split(":")[0]
        assert (FOLDER / source).exists() if source.startswith(".") else source in whole["volumes"]
        assert not source.startswith(".") or mount.endswith(":ro")
    assert set(spec.get("secrets", [])) <= set(whole["secrets"])
    assert set(spec.get("networks", [])) <= set(whole["networks"])
    for other, how in spec.get("depends_on", {}).items():
        # an optional one makes `up` with a profile replace the container
        assert how.keys() == {"condition"}
        awaited = how["condition"] == "service_healthy"
        assert awaited == ("test" in whole["services"][other]["healthcheck"])


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_open_to_this_machine_alone(name: str) -> None:
    assert all(address == "127.0.0.1" for address, _, _ in ports(SERVICES[name]))


def test_an_agent_has_memory_to_share_and_no_way_out() -> None:
    """64 MiB, what a container has by default, is the arena of one run."""
    agent = SERVICES["agent"]
    assert in_bytes(agent["shm_size"]) >= 2**30
    assert in_bytes(agent["deploy"]["resources"]["limits"]["memory"]) >= 2 * in_bytes(
        agent["shm_size"]
    )
    assert [load()["networks"][network] for network in agent["networks"]] == [{"internal": True}]


def test_the_index_forgets_nothing() -> None:
    lines = (FOLDER / "redis" / "redis.conf").read_text().splitlines()
    settings = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert (settings["appendonly"], settings["maxmemory-policy"]) == ("yes", "noeviction")
    limit = in_bytes(SERVICES["redis"]["deploy"]["resources"]["limits"]["memory"])
    assert 1.5 * in_bytes(settings["maxmemory"].removesuffix("b")) <= limit


# --- secrets
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER, tmp_path / "compose", ignore=shutil.ignore_patterns("secrets"))
    return tmp_path / "compose"


def test_the_secrets_of_setup_are_private(folder: Path) -> None:
    done = subprocess.run([folder / "setup"], check=True, capture_output=True, text=True)
    made = {path.name: path.read_text() for path in (folder / "secrets").iterdir()}
    assert set(made) == {*load()["secrets"], "authorization"}
    assert made["authorization"] == f"Authorization: Bearer {made['token']}"
    assert stat.S_IMODE((folder / "secrets").stat().st_mode) == 0o700
    # What compose mounts keeps owner and mode, and the containers' users are not who ran setup.
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder / "secrets").iterdir()} == {0o644}
    for name in ("token", "metrics_token"):
        assert re.fullmatch(r"adock_[0-9a-f]{12}_[A-Za-z0-9_-]{43}\n", made[name])
    password = re.search(r":([0-9a-f]{64})@redis:6379", made["index_url"])
    assert password
    assert f">{password[1]} " in made["index_users"]
    assert not any(text.strip() in done.stdout + done.stderr for text in made.values())


def test_setup_again_changes_nothing_and_elsewhere_makes_others(
    folder: Path, tmp_path: Path
) -> None:
    subprocess.run([folder / "setup"], check=True, capture_output=True)
    first = {path.name: path.read_text() for path in (folder / "secrets").iterdir()}
    again = subprocess.run([folder / "setup"], check=True, capture_output=True, text=True)
    assert first == {path.name: path.read_text() for path in (folder / "secrets").iterdir()}
    assert again.stderr == ""
    (folder / "secrets" / "token").unlink()
    subprocess.run([folder / "setup"], check=True, capture_output=True)
    other = {path.name: path.read_text() for path in (folder / "secrets").iterdir()}
    assert {name for name in first if first[name] != other[name]} == {"token", "authorization"}


def test_no_secret_is_tracked_or_sent_to_the_build() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "compose"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not [
        path for path in tracked.stdout.split() if "secrets" in path or path.endswith(".env")
    ]
    ignored = subprocess.run(
        ["git", "check-ignore", "compose/secrets/token", "compose/.env"], cwd=ROOT
    )
    assert ignored.returncode == 0
    assert not any(
        let_through(path)
        for path in ("compose/secrets/token", "compose/.env", "runs/x", ".git/config")
    )
    for spec in SERVICES.values():
        for name, value in spec.get("environment", {}).items():
            assert not re.search("PASSWORD|TOKEN|SECRET|_INDEX", name) or value.startswith(
                "/run/secrets/"
            )


def test_the_entrypoint_puts_a_secret_in_the_environment_and_says_when_it_cannot(
    tmp_path: Path,
) -> None:
    (tmp_path / "url").write_text("redis://:a b$c@redis\n")
    entry = str(FOLDER / "entrypoint.sh")
    given = {"PATH": "/usr/bin:/bin", "ASYNCDOCK_INDEX_FILE": str(tmp_path / "url")}
    done = subprocess.run(
        [entry, "printenv", "ASYNCDOCK_INDEX"], env=given, capture_output=True, text=True
    )
    assert done.stdout == "redis://:a b$c@redis\n"
    given["ASYNCDOCK_INDEX_FILE"] = "/nowhere"
    done = subprocess.run(
        [entry, "printenv", "ASYNCDOCK_INDEX"], env=given, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "compose/setup" in done.stderr


# --- the image
# --------------------------------------------------------------------------------------------------


def test_the_image_is_of_two_stages_without_root_and_without_what_builds() -> None:
    found = stages()
    final = found["asyncdock"]
    assert list(found)[-1] == ""
    assert found[""].base == "asyncdock"
    assert not found[""].steps
    assert {re.sub(r"[^:]*:", "", stage.base) for stage in found.values() if ":" in stage.base} == {
        "3.11.14-slim-bookworm"
    }
    assert final.last("USER") == "10001:10001" == SERVICES["api"]["user"]
    assert [value for name, value in final.steps if name == "COPY" and "--from=build" in value]
    assert "pip uninstall" in final.last("RUN") or any(
        "pip uninstall" in value for name, value in final.steps
    )
    assert final.last("HEALTHCHECK")
    assert final.command("ENTRYPOINT")
    steps = [step for stage in found.values() for step in stage.steps]
    assert not [
        value
        for name, value in steps
        if name == "ADD" or (re.search(r"https?://|apt-get|curl|wget", value) and name == "RUN")
    ]
    assert all(
        "--no-deps" in value for name, value in steps if name == "RUN" and "pip install" in value
    )


def test_the_image_begins_what_compose_begins_by_itself() -> None:
    command = stages()["asyncdock"].command("CMD")
    assert command[:2] == SERVICES["api"]["command"][:2] == ["asyncdock", "serve"]
    assert stages()["asyncdock"].command("ENTRYPOINT") == ["asyncdock-entrypoint"]
    built = {name: spec["build"]["target"] for name, spec in OURS.items() if "build" in spec}
    # an image that two services build is two images
    assert built == {"tokens": "asyncdock", "model": "model"}
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert {spec["image"].split(":")[1] for spec in OURS.values()} == {version}


def pinned(name: str) -> dict[str, Version]:
    lines = (FOLDER / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(key): Version(value) for key, value in pairs}


def test_the_image_has_every_requirement_in_a_version_that_we_allow() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    versions = pinned("requirements.txt")
    for requirement in map(Requirement, project["dependencies"]):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier
    # pip then refuses the build that brings gigabytes of CUDA
    assert versions["torch"].local == "cpu"
    assert not set(versions) & set(pinned("requirements-model.txt"))


@pytest.mark.parametrize(
    "recipe", sorted((FOLDER / "recipes").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_recipes_of_the_stack_are_whole(recipe: Path) -> None:
    with recipe.open("rb") as file:
        parsed: dict[str, Any] = tomllib.load(file)
    assert parsed["name"] == recipe.stem
    assert parsed["description"]
