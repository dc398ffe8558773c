"""What has to hold after the commands of each section of compose/README.md, beside that they
succeed."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.compose.page import until
from tests.compose.sandbox import ROOT
from tests.compose.stack import ENDED, SLOW, Stack, docker

Expectation = Callable[[Stack], None]

SERVE = ("redis", "api", "agent", "prometheus")
SITE_PACKAGES = "/opt/asyncdock/lib/python3.11/site-packages"
OWN_SIZE_MB = 2500  # of the image: what CUDA's torch would bring is more
GRAFANA_VARIABLES = {"$__rate_interval": "20s", "$__range": "15m", "$run": ".*"}


# ── Start it ──


def every_service_is_healthy(stack: Stack) -> None:
    stack.until_healthy(*SERVE)
    stack.kept = {name: stack.container(name).shown["Id"] for name in SERVE}
    assert stack.container("tokens").shown["State"]["ExitCode"] == 0


def containers_have_no_privileges(stack: Stack) -> None:
    for container in map(stack.container, SERVE):
        user = int(container.shown["Config"]["User"].partition(":")[0])
        for process in container.processes():
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert set(process.uids()) == {user}, (container.name, process.cmdline())
            assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
            assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
        for place in ("/", "/etc", "/usr/bin"):
            assert container.execute("touch", f"{place}/x").returncode != 0, (container.name, place)


def containers_have_limits(stack: Stack) -> None:
    for container in map(stack.container, SERVE):
        limits = container.shown["HostConfig"]
        assert limits["Memory"] > 0, container.name
        assert limits["PidsLimit"] > 0, container.name
        assert (limits["NanoCpus"] > 0) == (container.service != "agent"), container.name


def index_and_agent_have_no_way_out(stack: Stack) -> None:
    """They do not even reach a neighbour on the other network, by its address; who is on that
    network does."""
    for service in ("redis", "agent"):
        for network in stack.container(service).shown["NetworkSettings"]["Networks"]:
            assert (
                docker("network", "inspect", "--format", "{{.Internal}}", network).stdout
                == "true\n"
            ), network
    [front] = stack.container("prometheus").shown["NetworkSettings"]["Networks"].values()
    connect = f"import socket; socket.create_connection(('{front['IPAddress']}', 9090), 5)"
    from_api = stack.container("api").execute("python", "-c", connect)
    assert from_api.returncode == 0, from_api.stderr
    assert stack.container("agent").execute("python", "-c", connect).returncode != 0


def ports_are_open_to_this_machine_alone(stack: Stack) -> None:
    for container in stack.containers():
        for places in (container.shown["NetworkSettings"]["Ports"] or {}).values():
            assert all(place["HostIp"] == "127.0.0.1" for place in places or []), container.name


def the_log_of_tokens_has_no_warning(stack: Stack) -> None:
    log = stack.container("tokens").logs()
    assert "scope admin" in log
    assert "scope read" in log
    assert not re.search("warning|chmod", log), log


def the_image_has_what_is_written_down(stack: Stack) -> None:
    api = stack.container("api")
    image = stack.container("api").shown["Config"]["Image"]
    lines = (ROOT / "compose" / "requirements.txt").read_text().splitlines()
    written = {line.replace("-", "_") for line in lines if line and not line.startswith("#")}
    names = api.execute("ls", SITE_PACKAGES).stdout.split()
    infos = (name.removesuffix(".dist-info") for name in names if name.endswith(".dist-info"))
    installed = {info.replace("-", "==", 1) for info in infos}
    assert {name for name in installed if not name.startswith("asyncdock")} == written
    folders = ["pipeline", "stages", "orchestration", "api", "recipes"]
    files = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lacking = "for path; do [ -f $path ] || echo $path; done"
    words = ["sh", "-c", f"cd {SITE_PACKAGES}; {lacking}", "sh", *files.stdout.split()]
    assert api.execute(*words).stdout == ""
    assert api.execute("ls", f"{SITE_PACKAGES}/torch/include").returncode != 0
    size = int(docker("image", "inspect", "--format", "{{.Size}}", image).stdout) / 1e6
    print(f"         the image has {size / 1e3:.2f} GB", flush=True)
    assert size < OWN_SIZE_MB


def requests_need_a_token_with_the_right_scope(stack: Stack) -> None:
    metrics = stack.secret("metrics_token")
    assert stack.ask("/v1/runs", token="")[0] == 401
    assert stack.ask("/v1/runs")[0] == 200
    assert stack.ask("/metrics", token="")[0] == 401
    assert stack.ask("/metrics", token=metrics)[0] == 200
    assert (
        stack.ask("/v1/runs", method="POST", body={"recipe_name": "mock"}, token=metrics)[0] == 403
    )


def the_index_accepts_its_own_user_only(stack: Stack) -> None:
    redis = stack.container("redis")
    [password] = re.findall(r":([0-9a-f]{64})@", stack.secret("index_url"))
    assert "NOAUTH" in redis.execute("redis-cli", "ping").stdout
    assert (
        "NOPERM"
        in redis.execute("redis-cli", "--user", "health", "--pass", "none", "get", "x").stdout
    )
    known = ["redis-cli", "--user", "asyncdock", "--pass", password]
    assert redis.execute(*known, "ping").stdout == "PONG\n"
    for words in (["config", "get", "dir"], ["flushall"], ["shutdown"], ["acl", "list"]):
        assert "NOPERM" in redis.execute(*known, *words).stdout


def the_advice_of_demo_works_on_this_machine(stack: Stack) -> None:
    """The command that `demo` advises shows the run, in the same folder, for as long as one
    looks."""
    output = next(
        text for command, text in stack.outputs.items() if "run --rm demo " in f"{command} "
    )
    [advice] = re.findall(r"Watch it: (.*)", output)
    watch = subprocess.Popen(
        f"exec {advice} --plain",
        shell=True,
        cwd=stack.home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert watch.stdout is not None
        shown = ""
        for line in watch.stdout:
            shown += line
            if re.search(r"step +\d+", shown):
                return
        raise AssertionError(f"{advice}\n{shown}")
    finally:
        watch.send_signal(signal.SIGINT)
        watch.wait(SLOW)


def a_killed_api_and_agent_are_started_again_and_the_run_goes_on(stack: Stack) -> None:
    stack.begin("demo")
    before = stack.until_run("demo", lambda view: view["steps_done"] > 0, "a step")
    stack.container("api").kill()
    stack.container("agent").kill()
    stack.until_run(
        "demo", lambda view: view["steps_done"] > before["steps_done"] + 2, "more steps than before"
    )
    stack.until_healthy("api", "agent")
    assert {each: stack.container(each).shown["RestartCount"] for each in ("api", "agent")} == {
        "api": 1,
        "agent": 1,
    }


# ── With curl ──


def the_mock_run_ends_with_checkpoints_and_logs(stack: Stack) -> None:
    view = stack.until_run("mock", lambda view: view["state"] in ENDED, "ended")
    assert (view["state"], view["steps_done"]) == ("finished", view["steps"]), view["reason"]
    assert stack.ask(f"/v1/runs/{view['id']}/checkpoints")[1]["checkpoints"]
    status, logs = stack.ask(f"/v1/runs/{view['id']}/logs")
    assert status == 200
    assert "update" in logs


def every_query_of_the_dashboard_has_data(stack: Stack) -> None:
    """Of the run of `demo`. What stands for Grafana's variables is what Grafana would put there."""
    stack.begin("demo")
    dashboard = json.loads((ROOT / "compose/grafana/dashboards/asyncdock.json").read_text())
    [scrape] = until(lambda: stack.query('up{job="asyncdock"}'), SLOW, "Prometheus' scrape of api")
    assert scrape["value"][1] == "1"
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    empty = {target["expr"] for target in targets}

    def all_have_data() -> bool:
        for expression in sorted(empty):
            asked = expression
            for name, value in GRAFANA_VARIABLES.items():
                asked = asked.replace(name, value)
            assert "$" not in asked
            if any(series["value"][1] != "NaN" for series in stack.query(asked)):
                empty.discard(expression)
        assert not empty, empty
        return True

    until(all_have_data, SLOW, "data for each panel")
    [choice] = dashboard["templating"]["list"]
    label = re.fullmatch(r"label_values\((\w+), run\)", choice["definition"])
    assert label
    assert {series["metric"]["run"] for series in stack.query(label[1])}


def the_alert_rules_are_evaluated(stack: Stack) -> None:
    with urllib.request.urlopen(f"{stack.prometheus}/api/v1/rules", timeout=60) as response:
        groups = json.load(response)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    assert {rule["health"] for rule in rules} == {"ok"}


def health_checks_fail_while_redis_is_paused_and_pass_again(stack: Stack) -> None:
    stack.compose("pause", "redis")
    try:
        for name in ("api", "agent"):
            failing = lambda name=name: stack.container(name).health == "unhealthy"  # noqa: E731
            until(failing, SLOW, f"{name} unhealthy")
    finally:
        stack.compose("unpause", "redis")
    stack.until_healthy(*SERVE)


def a_run_is_stopped(stack: Stack) -> None:
    stack.begin("demo")
    stack.stop("demo")


# ── the other sections ──


def nothing_else_was_begun_again(stack: Stack) -> None:
    """`up` with a profile leaves the containers alone that ran before."""
    now = {name: stack.container(name).shown["Id"] for name in SERVE}
    assert now == stack.kept, f"{now} instead of {stack.kept}"


def the_small_model_trains_for_three_steps(stack: Stack) -> None:
    view = stack.until_run("small-model", lambda view: view["steps_done"] >= 3, "three steps")
    assert view["reward"] > 0, view
    stack.stop("small-model")


def a_run_is_on_the_two_hosts(stack: Stack) -> None:
    view = stack.until_run("ray", lambda view: view["state"] in ENDED, "ended")
    assert (view["state"], view["steps_done"]) == ("finished", 20), view["reason"]
    read = ["sh", "-c", f"cat /data/*/runs/{view['id']}/metrics.jsonl"]
    lines = stack.container("agent").execute(*read).stdout.splitlines()
    events = [event["data"] for event in map(json.loads, lines) if event["kind"] == "worker"]
    ready = {
        event["worker"]: event["node"]
        for event in events
        if event["change"] == "ready" and event.get("host")
    }
    assert {"update-0", "rollout-0", "rollout-1"} <= ready.keys()
    assert len(set(ready.values())) == 2, ready


def one_agent_holds_one_folder(stack: Stack) -> None:
    """After three have been healthy, which `--wait` says: their folders are there, and the one that
    is left has one."""
    agent = stack.container("agent")
    folders = agent.execute("sh", "-c", "ls -d /data/agent-*/agent.lock").stdout.split()
    assert folders == [f"/data/agent-{number}/agent.lock" for number in (1, 2, 3)], folders
    stack.until_healthy("agent")


def command_line(process: psutil.Process) -> str:
    """The command of ``process``; "": it has ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def no_secret_is_on_a_command_line_or_in_a_log(stack: Stack) -> None:
    names = ("token", "metrics_token", "grafana_password")
    words = [stack.secret(name) for name in names] + re.findall(
        r":([0-9a-f]{64})@", stack.secret("index_url")
    )
    for container in stack.containers():
        running = container.processes() if container.shown["State"]["Running"] else []
        lines = "".join(map(command_line, running))
        seen = json.dumps(container.shown["Config"]) + container.logs() + lines
        assert not [word for word in words if word in seen], container.name
    logs = list(stack.logs_of_runs())
    assert any(logs)
    assert not [word for word in words if any(word in log for log in logs)]


def only_the_new_token_opens_the_api(stack: Stack) -> None:
    listed = next(text for command, text in stack.outputs.items() if "token list" in command)
    identity = re.search(r"adock_([0-9a-f]{12})_", stack.secret("token"))
    assert identity
    assert identity[1] in listed
    assert stack.ask("/v1/runs")[0] == 200
    old = stack.outputs["the token before"]
    assert old != stack.secret("token")
    assert stack.ask("/v1/runs", token=old)[0] == 401


def prometheus_still_scrapes(stack: Stack) -> None:
    began = time.time()
    up = 'up{job="asyncdock"}'

    def scraped() -> bool:
        [when], [outcome] = stack.query(f"timestamp({up})"), stack.query(up)
        assert float(when["value"][1]) > began, "no scrape since"
        assert outcome["value"][1] == "1", outcome
        return True

    until(scraped, SLOW, "a scrape that succeeds, after all was begun again")


def an_agent_ends_cleanly_when_it_is_stopped(stack: Stack) -> None:
    stack.compose("stop", "agent")
    assert stack.container("agent").shown["State"]["ExitCode"] == 0
    stack.compose("up", "--detach", "--wait")


def nothing_is_left(stack: Stack) -> None:
    label = f"label=com.docker.compose.project={stack.name}"
    for kind in ("container", "network", "volume"):
        everything = ["--all"] if kind == "container" else []
        assert docker(kind, "ls", *everything, "--quiet", "--filter", label).stdout == "", kind


AFTER: dict[str, list[Expectation]] = {
    "Start it": [
        every_service_is_healthy,
        the_advice_of_demo_works_on_this_machine,
        a_killed_api_and_agent_are_started_again_and_the_run_goes_on,
        containers_have_no_privileges,
        containers_have_limits,
        index_and_agent_have_no_way_out,
        ports_are_open_to_this_machine_alone,
        the_log_of_tokens_has_no_warning,
        the_image_has_what_is_written_down,
        requests_need_a_token_with_the_right_scope,
        the_index_accepts_its_own_user_only,
    ],
    "With curl": [
        the_mock_run_ends_with_checkpoints_and_logs,
        every_query_of_the_dashboard_has_data,
        the_alert_rules_are_evaluated,
        a_run_is_stopped,
        health_checks_fail_while_redis_is_paused_and_pass_again,
    ],
    "The real small model": [the_small_model_trains_for_three_steps],
    "A Ray cluster": [nothing_else_was_begun_again, a_run_is_on_the_two_hosts],
    "More agents": [one_agent_holds_one_folder, no_secret_is_on_a_command_line_or_in_a_log],
    "Another token, another password": [
        only_the_new_token_opens_the_api,
        prometheus_still_scrapes,
        every_service_is_healthy,
        an_agent_ends_cleanly_when_it_is_stopped,
    ],
    "Stop it": [nothing_is_left],
}
