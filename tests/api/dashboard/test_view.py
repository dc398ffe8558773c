"""The dashboard of ``asyncdock view``: runs of folders, which are shown and cannot be changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.client import SyncClient
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.service.own_services import find_service
from tests.api.browser import CHROMIUM, DRIVER, WITHOUT, chromium
from tests.api.cli.service.test_view import STEPS, asyncdock, viewing

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=WITHOUT),
    pytest.mark.timeout(240),
]
VISIBLE = (
    "return [...document.querySelectorAll('{}')].filter((one) => one.checkVisibility()).length"
)


def test_runs_are_shown_without_what_would_change_them(tmp_path: Path) -> None:
    run = tmp_path / "first"
    asyncdock("run", "mock", "--set", f"train.steps={STEPS}", "--out", run, "--plain")
    with viewing(tmp_path) as (url, _), chromium() as browser:
        service = find_service(url)
        assert service is not None
        with SyncClient(url, service.token) as client:
            code = client.login_link().code
        browser.open(f"{url}/#login={code}")
        browser.until("return document.querySelector('h1')?.innerText === 'mock'")
        browser.until(f"return document.body.innerText.includes('step {STEPS} of {STEPS}')")
        browser.until("return document.querySelectorAll('.chart').length > 5")
        for selector in ("#new-run", ".buttons button", ".buttons a", ".changes a"):
            assert browser.js(VISIBLE.format(selector)) == 0, selector
        assert browser.js(VISIBLE.format(".runs li a")) == 1
        assert browser.axe() == []


def test_several_reward_functions_have_charts_of_their_own(tmp_path: Path) -> None:
    names = ["spelling", "tests.orchestration.rewards.faulty:ranks"]
    functions = ", ".join(f'{{name = "{name}"}}' for name in names)
    changes = ["--set", "train.steps=10", "--set", f"reward.functions=[{functions}]"]
    asyncdock("run", "mock", *changes, "--out", tmp_path / "first", "--plain")
    steps = [event for event in read_metrics(tmp_path / "first" / METRICS) if event.kind == "step"]
    with viewing(tmp_path) as (url, _), chromium() as browser:
        service = find_service(url)
        assert service is not None
        with SyncClient(url, service.token) as client:
            code = client.login_link().code
        browser.open(f"{url}/#login={code}")
        chart = (
            "const charts = [...document.querySelectorAll('.chart')]; const of = (title) => charts"
        )
        chart += ".find((one) => one.querySelector('h3').innerText === title)?.querySelector('.keys').innerText;"
        for title, what in (("Reward by function", "mean"), ("Deviation by function", "std")):
            for name in names:
                expected = steps[-1].data["rewards"][name][what]
                shown = f"parseFloat(of('{title}')?.split('{name}')[1])"
                tolerance = abs(expected) * 0.05
                # the page may not have drawn the last step yet
                browser.until(f"{chart} return Math.abs({shown} - {expected}) <= {tolerance}")
        assert browser.js(f"{chart} return of('Seconds of reward calls')").count(names[1]) == 1
        assert browser.axe() == []
