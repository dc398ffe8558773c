"""The dashboard of ``asyncdock view``: runs of folders, which are shown and cannot be changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.client import SyncClient
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
        for selector in ("#new-run", ".buttons button"):
            assert browser.js(VISIBLE.format(selector)) == 0, selector
        assert browser.js(VISIBLE.format(".runs a")) == 1
        assert browser.axe() == []
