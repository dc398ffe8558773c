"""The table of all runs and the comparison, as a person uses them; and the file of a comparison."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestration.service.own_services import find_service
from orchestration.state.labels import Labels, write_labels
from tests.api.browser import CHROMIUM, DRIVER, WITHOUT, Browser, chromium
from tests.api.cli.service.test_view import asyncdock, viewing
from tests.api.site import Site, site
from tests.orchestration.compared import compared_runs

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=WITHOUT),
    pytest.mark.timeout(240),
]
SHAPES = ((390, "dark"), (800, "light"), (1280, "dark"), (1920, "light"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compared") / "runs"
    first, *_ = compared_runs(root)
    write_labels(first, Labels(("good",), "a long note " * 20))
    shutil.copytree(first, root / ("a-run-with-a-long-name-" * 5))
    return root


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


def entered(browser: Browser, url: str, address: str) -> None:
    service = find_service(url)
    assert service is not None
    browser.enter(f"{url}/{address}", service.token)


def test_runs_are_filtered_sorted_and_compared(browser: Browser, folder: Path) -> None:
    """What is chosen is in the address, and a reload shows the same."""
    with viewing(folder) as (url, _):
        browser.shape()
        entered(browser, url, "#/table")
        browser.until("return document.querySelectorAll('.table-page tbody tr').length === 4")
        browser.type("Where", "train.learning_rate=1e-5")
        browser.until("return document.querySelectorAll('.table-page tbody tr').length === 3")
        browser.type("Tag", "good")
        browser.until("return document.querySelectorAll('.table-page tbody tr').length === 2")
        browser.click("Columns")
        browser.js("document.getElementById('table-columns').value = 'learning'")
        browser.js("document.getElementById('table-columns').dispatchEvent(new Event('input'))")
        browser.until("return document.querySelectorAll('.choices input').length >= 1")
        browser.js(
            "[...document.querySelectorAll('.choices label')].find((one) => "
            "one.innerText.trim() === 'train.learning_rate').querySelector('input').click()"
        )
        browser.click("train.learning_rate")
        browser.until("return document.querySelector('[aria-sort=descending]') !== null")
        address = browser.js("return location.hash")
        for part in ("tag=good", "where=train.learning_rate", "sort=-train.learning_rate"):
            assert part in address
        browser.open(browser.js("return location.href"))
        browser.until("return document.querySelectorAll('.table-page tbody tr').length === 2")
        browser.type("Tag", " ")
        browser.type("Where", " ")
        browser.until("return document.querySelectorAll('.table-page tbody tr').length === 4")
        for run in ("b", "c"):
            browser.js(f"document.querySelector('[aria-label=\"Select {run}\"]').click()")
        browser.click("Compare 2 runs")
        browser.until("return document.querySelectorAll('.legend li').length === 2")
        browser.until("return document.querySelector('.curves canvas') !== null")
        assert browser.text("h1") == "2 runs, 2 settings"
        assert "learning_rate 0.0001" in browser.text(".legend")
        browser.js("document.querySelector('.legend button').click()")
        assert (
            browser.js("return document.querySelectorAll('.legend [aria-pressed=true]').length")
            == 1
        )
        assert browser.complaints() == []


def test_pages_fit_every_window(browser: Browser, folder: Path) -> None:
    with viewing(folder) as (url, _):
        runs = ",".join(sorted(path.name for path in folder.iterdir()))
        for width, scheme in SHAPES:
            browser.shape(width, 900, scheme=scheme)
            entered(browser, url, "#/table")
            browser.until("return document.querySelectorAll('.table-page tbody tr').length === 4")
            assert (browser.overflow(), browser.axe()) == (0, [])
            entered(browser, url, f"#/compare/runs={runs}&fold=1&by=hours")
            browser.until("return document.querySelector('.curves canvas') !== null")
            browser.until("return document.querySelectorAll('.comparison tbody tr').length === 6")
            assert (browser.overflow(), browser.axe()) == (0, [])


def test_the_file_of_a_comparison_needs_nothing_else(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    asyncdock("compare", folder, "--html", tmp_path / "runs.html")
    for width, scheme in SHAPES[:2]:
        browser.shape(width, 900, scheme=scheme)
        browser.open((tmp_path / "runs.html").as_uri())
        browser.until("return document.querySelector('.curves canvas') !== null")
        assert browser.text("h1") == "4 runs, 2 settings"
        browser.js("document.querySelector('[value=tokens]').click()")
        browser.until("return document.querySelector('.curves .at').innerText.includes('tokens')")
        assert (browser.overflow(), browser.axe(), browser.complaints()) == (0, [], [])


def test_an_interval_is_drawn_whole(browser: Browser, folder: Path) -> None:
    line = {"x": [1, 2, 3], "y": [0.1, 0.2, 0.3], "half": [None, 5.0, 0.1]}
    setting = {"recipe": {}, "runs": ["a"], "results": {}, "steps": None}
    data = {"runs": [], "settings": [setting], "keys": [], "metrics": [], "curves": [line]}
    with viewing(folder) as (url, _):
        entered(browser, url, "#/table")
        low, high = browser.asynchronous(
            "const { Comparison } = await import('/dashboard/charts/comparison.js');"
            "const chosen = { metric: 'reward_mean', by: 'step', fold: true };"
            "const shown = new Comparison({ load: () => arguments_[0], metrics: [], chosen });"
            "document.querySelector('main').append(shown.element); await shown.show();"
            "await new Promise(requestAnimationFrame);"
            "const { min, max } = shown.curves.drawn.scales.y; return [min, max];",
            data,
        )
    assert low < 0.2 - 5.0
    assert high > 0.2 + 5.0


def test_tags_and_notes_are_written_on_the_page(browser: Browser, tmp_path: Path) -> None:
    with site(tmp_path) as service:
        run = _waiting(service)
        browser.shape()
        browser.enter(f"{service.url}#/table", service.own_token)
        browser.click(f"Edit tags and notes of {run}")
        browser.type("Tags, with blanks between them", "-good")
        browser.click("Save")
        browser.until("return document.querySelector('dialog .wrong').innerText.includes('no tag')")
        browser.type("Tags, with blanks between them", "good first")
        browser.type("Notes", "the one to keep")
        assert browser.axe("dialog") == []
        browser.click("Save")
        browser.until("return document.querySelectorAll('.tag').length === 2")
        view = service.run(run)
        assert (view["tags"], view["notes"]) == (["first", "good"], "the one to keep")


def _waiting(service: Site) -> str:
    """Submit a run, and return its id."""
    body = {"recipe_name": "mock", "overrides": {"train.steps": 1}}
    answer = service.ask_for("POST", "v1/runs", body)
    assert answer.status == 201, answer
    return str(answer.body["id"])
