"""The stack's services run as compose.yaml says, in bubblewrap instead of an engine: their own commands, users, mounts,
secrets and health checks, with Debian's redis-server and Prometheus. A mock run is driven over REST with the very commands
that compose/README.md shows."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is not installed; pip install -e '.[dev]'")

from tests.compose.containers import FOLDER, Stack
from tests.compose.sandbox import missing
from tests.servers import REDIS, WITHOUT_REDIS

MISSING = missing("prometheus", "curl", "wget") or (WITHOUT_REDIS if REDIS is None else "")

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(900)]

SLOW = 240.0  # seconds; a deadline, for a machine that is busy with other things
ENDED = ("finished", "stopped", "failed")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.up("agent", "prometheus")  # and by what they depend on: redis, tokens, api
        yield stack


def ask(stack: Stack, url: str, *, method: str = "GET", body: Any = None, token: str = "token") -> tuple[int, Any]:
    """Status and answer of a request from the machine that the stack runs on, with the secret ``token`` ("": without)."""
    headers = {"Authorization": f"Bearer {stack.secret(token)}"} if token else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers | {"Content-Type": "application/json"}, method=method)

    def answer() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    status, text = stack.inside(answer)
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()


API = "http://127.0.0.1:8765"
PROMETHEUS = "http://127.0.0.1:9090"


def query(stack: Stack, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers now: one entry for each series."""
    url = f"{PROMETHEUS}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    status, answer = ask(stack, url, token="")
    assert status == 200, (expression, answer)
    return answer["data"]["result"]


def run_of(stack: Stack, run: str) -> dict[str, Any]:
    status, view = ask(stack, f"{API}/v1/runs/{run}")
    assert status == 200, view
    return view


def commands(title: str) -> str:
    """The shell block below a heading of compose/README.md."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}$.*?^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


# The tests go in order: what the first ones start the later ones look at, and the last ones break.


def test_every_service_is_healthy_as_a_user_without_privileges(stack: Stack) -> None:
    for name in ("redis", "api", "agent", "prometheus"):
        container = stack.containers[name]
        stack.wait(container.healthy, SLOW, container)
        user = int(container.spec["user"].split(":")[0])
        assert container.processes()
        for process in container.processes():
            assert set(process.uids()) == {user}
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
            assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
        for place in ("/", "/etc", "/usr/bin"):
            assert container.execute(["touch", f"{place}/x"]).returncode != 0


def test_one_command_starts_a_run_and_the_readmes_curl_another(stack: Stack) -> None:
    stack.up("demo")
    demo = stack.containers["demo"]
    assert demo.process.wait(SLOW) == 0, demo.logs()
    shown = stack.shell(commands("With curl"))
    assert re.search(r'"state": ?"(created|starting|running)"', shown)
    status, page = ask(stack, f"{API}/v1/runs")
    assert status == 200
    assert sorted(run["name"] for run in page["runs"]) == ["demo", "mock"]


def test_requests_need_a_token_with_the_right_scope(stack: Stack) -> None:
    assert ask(stack, f"{API}/v1/runs", token="")[0] == 401
    assert ask(stack, f"{API}/v1/runs")[0] == 200
    assert ask(stack, f"{API}/metrics", token="")[0] == 401
    assert ask(stack, f"{API}/metrics", token="metrics_token")[0] == 200
    started = ask(stack, f"{API}/v1/runs", method="POST", body={"recipe_name": "mock"}, token="metrics_token")
    assert started[0] == 403


def test_the_index_accepts_its_own_user_only(stack: Stack) -> None:
    redis, password = stack.containers["redis"], re.findall(r":([0-9a-f]{64})@", stack.secret("index_url"))[0]
    assert "NOAUTH" in redis.execute(["redis-cli", "ping"]).stdout
    assert "NOPERM" in redis.execute(["redis-cli", "--user", "health", "--pass", "none", "get", "x"]).stdout
    known = ["redis-cli", "--user", "asyncdock", "--pass", password]
    assert redis.execute([*known, "ping"]).stdout == "PONG\n"
    for dangerous in (["config", "get", "dir"], ["flushall"], ["shutdown"], ["acl", "list"]):
        assert "NOPERM" in redis.execute([*known, *dangerous]).stdout


def test_every_query_of_the_dashboard_has_data(stack: Stack) -> None:
    """Of the demo run, which goes on meanwhile. What stands for Grafana's variables is what Grafana would put there."""
    dashboard = json.loads((FOLDER / "grafana/dashboards/asyncdock.json").read_text())
    variables = {"$__rate_interval": "20s", "$__range": "15m", "$run": ".*"}
    stack.wait(lambda: bool(query(stack, 'up{job="asyncdock"}')), SLOW, stack.containers["prometheus"])
    [target] = query(stack, 'up{job="asyncdock"}')
    assert target["value"][1] == "1"
    empty: dict[str, str] = {}
    for panel in dashboard["panels"]:
        for wanted in panel.get("targets", []):
            expression = wanted["expr"]
            for name, value in variables.items():
                expression = expression.replace(name, value)
            assert "$" not in expression
            empty[f"{panel['title']}: {expression}"] = expression

    def all_have_data() -> bool:
        for title, expression in list(empty.items()):
            found = query(stack, expression)
            if any(series["value"][1] != "NaN" for series in found):
                del empty[title]
        return not empty

    deadline = time.monotonic() + SLOW
    while not all_have_data():
        assert time.monotonic() < deadline, empty
        time.sleep(1.0)  # a scrape comes every five seconds
    [choice] = dashboard["templating"]["list"]
    label = re.fullmatch(r"label_values\((\w+), run\)", choice["definition"])
    assert label
    assert {series["metric"]["run"] for series in query(stack, label[1])}


def test_no_alert_fires_on_a_healthy_stack(stack: Stack) -> None:
    status, answer = ask(stack, f"{PROMETHEUS}/api/v1/rules", token="")
    rules = [rule for group in answer["data"]["groups"] for rule in group["rules"]]
    assert status == 200
    assert rules
    assert {rule["health"] for rule in rules} == {"ok"}
    assert not query(stack, 'ALERTS{alertstate="firing"}')


def test_a_run_ends_with_its_checkpoints_and_logs(stack: Stack) -> None:
    mock = ask(stack, f"{API}/v1/runs?name=mock")[1]["runs"][0]["id"]
    stack.wait(lambda: run_of(stack, mock)["state"] in ENDED, SLOW, stack.containers["agent"])
    view = run_of(stack, mock)
    assert (view["state"], view["steps_done"]) == ("finished", view["steps"])
    assert ask(stack, f"{API}/v1/runs/{mock}/checkpoints")[1]["checkpoints"]  # read from the agent's volume
    status, logs = ask(stack, f"{API}/v1/runs/{mock}/logs")
    assert status == 200
    assert "update" in logs


def test_a_run_is_on_the_two_hosts_of_the_ray_profile(stack: Stack) -> None:
    stack.services["ray-host again"] = stack.services["ray-host"]  # its second replica
    names = ("ray-head", "ray-host", "ray-host again")
    stack.up(*names[1:])  # and the head, by which they depend on it
    view, deadline = {"reason": "launch.address"}, time.monotonic() + SLOW
    # A cluster that is still starting may have no room, or no time, for a run: it is refused, and posted again.
    while view["reason"].startswith("launch.address") and time.monotonic() < deadline:
        started = ask(stack, f"{API}/v1/runs", method="POST", body={"recipe_name": "ray"})
        assert started[0] == 201, started
        run = started[1]["id"]
        watched = [stack.containers[name] for name in names]
        stack.wait(lambda run=run: run_of(stack, run)["state"] in ENDED, SLOW, *watched)
        view = run_of(stack, run)
    assert (view["state"], view["steps_done"]) == ("finished", 20), view
    [metrics] = (stack.folder / "volumes/data").glob(f"*/runs/{run}/metrics.jsonl")
    events = [json.loads(line)["data"] for line in metrics.read_text().splitlines() if '"kind": "worker"' in line]
    ready = {event["worker"]: event["node"] for event in events if event["change"] == "ready" and event.get("host")}
    assert {"update-0", "rollout-0", "rollout-1"} <= ready.keys()
    assert len(set(ready.values())) == 2, "both hosts have workers"
    for name in names:
        stack.containers[name].kill()


def test_no_secret_is_on_a_command_line_or_in_a_log(stack: Stack) -> None:
    words = [stack.secret(name) for name in ("token", "metrics_token", "grafana_password")]
    words += re.findall(r":([0-9a-f]{64})@", stack.secret("index_url"))
    for container in stack.containers.values():
        output = container.logs() + "".join(" ".join(process.cmdline()) for process in container.processes())
        assert not [word for word in words if word in output], container.name
    logs = list((stack.folder / "volumes/data").glob("*/runs/*/logs/*"))
    assert logs
    assert not [path for path in logs if any(word in path.read_text(errors="replace") for word in words)]


def test_another_agent_works_beside_the_first_in_a_folder_of_its_own(stack: Stack) -> None:
    """``docker compose up --scale agent=2``: the same service once more, on the same volumes."""
    stack.services["agent again"] = stack.services["agent"]
    stack.up("agent again")
    first, second = stack.containers["agent"], stack.containers["agent again"]
    assert first.healthy()
    folders = stack.folder / "volumes/data"
    assert sorted(path.parent.name for path in folders.glob("*/agent.lock")) == ["agent-1", "agent-2"]
    second.kill()
    assert first.healthy()


def test_a_run_survives_the_death_of_api_and_agent(stack: Stack) -> None:
    """The agent's processes, the run's among them, and its shared memory go with its container; the next one goes on."""
    _, page = ask(stack, f"{API}/v1/runs?name=demo")
    run = page["runs"][0]["id"]
    before = run_of(stack, run)
    assert before["state"] == "running", before
    stack.containers["api"].kill()
    stack.containers["agent"].kill()
    stack.up("api", "agent")
    stack.wait(
        lambda: run_of(stack, run)["state"] == "running" and run_of(stack, run)["steps_done"] > before["steps_done"],
        SLOW,
        stack.containers["agent"],
    )
    assert ask(stack, f"{API}/v1/runs/{run}/stop", method="POST")[0] == 202
    stack.wait(lambda: run_of(stack, run)["state"] in ENDED, SLOW, stack.containers["agent"])
    assert run_of(stack, run)["state"] == "stopped"


def test_health_checks_fail_while_the_index_does_not_answer_and_pass_again(stack: Stack) -> None:
    redis = stack.containers["redis"]
    redis.signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor() as at_once:  # each waits for its time limit
            checks = {name: at_once.submit(stack.containers[name].healthy) for name in ("redis", "api", "agent")}
        assert {name: check.result() for name, check in checks.items()} == dict.fromkeys(checks, False)
    finally:
        redis.signal(signal.SIGCONT)
    for name in ("redis", "api", "agent"):
        stack.wait(stack.containers[name].healthy, SLOW, stack.containers[name])


def test_an_agent_that_has_ended_is_not_healthy(stack: Stack) -> None:
    agent, api = stack.containers["agent"], stack.containers["api"]
    agent.signal(signal.SIGTERM)
    assert agent.process.wait(SLOW) == 0  # within its stop_grace_period
    # Its health check in another container of the same volumes: what is missing is the agent alone.
    api.spec = api.spec | {"healthcheck": agent.spec["healthcheck"]}
    api.variables |= {"ASYNCDOCK_INDEX_FILE": "/run/secrets/index_url"}
    assert not api.healthy()
