"""Each page at the widths of a phone, a tablet, a laptop and a large screen, in both colours: nothing
keeps anybody out, and nothing reaches out of its box.

With ASYNCDOCK_SHOTS=FOLDER, pictures are written there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.browser import CHROMIUM, DRIVER, WITHOUT, Browser, chromium
from tests.api.dashboard.test_room import NAME, OUTSIDE
from tests.api.site import Site, site

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=WITHOUT),
    pytest.mark.timeout(240),
]
WIDTHS = {390: 844, 800: 1100, 1280: 900, 1920: 1080}
SHORT = {"train.steps": 12, "rollout.max_tokens": 8}
BROKEN = 'extends = "mock"\nname = "mine"\n\n[train]\nsteps = 10\nstepz = 3\n\n[[reward.functions]]\nname = "none-such"\n'
RUN = "return document.querySelector('.run-head .state')?.innerText === arguments[0]"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("service")) as started:
        yield started


@pytest.fixture(scope="module")
def runs(served: Site) -> dict[str, str]:
    """Ids by what has become of the run."""
    finished = served.finished({**SHORT, "name": NAME, "checkpoint.every": 4})
    failed = served.submit(
        {
            **SHORT,
            "name": "judged",
            "reward.functions": [{"name": "exact_number"}],
            "guard.on_alarm": "fail",
        }
    )
    served.until(lambda: served.run(failed)["state"] == "failed", "a run has failed")
    with served.running({**SHORT, "train.steps": 4000, "train.mock.step_seconds": 0.2}):
        empty = served.submit({**SHORT, "name": f"{NAME[:50]}-never-begun"})
        served.ask(empty, "stop")
    return {"finished": finished, "failed": failed, "empty": empty}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


def written(browser: Browser) -> None:
    """A recipe as text, with what is wrong in it."""
    browser.until("return document.querySelector('#recipe-name')?.options.length")
    browser.named("TOML", "field").click()
    browser.js(
        "const text = document.querySelector('#recipe-text'); text.value = arguments[0];"
        "text.dispatchEvent(new Event('input', {bubbles: true}))",
        BROKEN,
    )
    browser.until("return document.querySelectorAll('.wrong-lines li').length >= 2")


def look(browser: Browser, name: str) -> list[str]:
    """Return what is wrong with the page as it is."""
    if folder := os.environ.get("ASYNCDOCK_SHOTS"):
        (Path(folder) / f"{name}.png").write_bytes(browser.picture())
    wrong = [f"{name}: {fault}" for fault in browser.axe()]
    wrong += [f"{name}: {text} is outside" for text in browser.js(OUTSIDE)]
    if (wider := browser.overflow()) > 0:
        wrong.append(f"{name}: {wider} pixels wider than the window")
    return wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_each_page_has_room_and_keeps_nobody_out(
    browser: Browser, served: Site, runs: dict[str, str], width: int, scheme: str
) -> None:
    browser.shape(width, WIDTHS[width], scheme=scheme)
    browser.enter(served.url, served.own_token)
    wrong = []
    for what, run in runs.items():
        browser.js("location.hash = arguments[0]", f"#/runs/{run}")
        browser.until(RUN, "stopped" if what == "empty" else what)
        if what != "empty":
            browser.until("return document.querySelectorAll('.plot canvas').length >= 7")
        wrong += look(browser, f"{what}-{width}-{scheme}")
    browser.js("location.hash = arguments[0]", f"#/runs/{runs['finished']}/fork")
    browser.until("return document.querySelector('.problems.sound')")
    wrong += look(browser, f"fork-{width}-{scheme}")
    browser.js("location.hash = '#/new'")
    written(browser)
    wrong += look(browser, f"toml-{width}-{scheme}")
    assert wrong == []
