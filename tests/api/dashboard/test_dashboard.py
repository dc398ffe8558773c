"""The dashboard in a real browser: a whole run by clicks, by keys alone, on a phone, in the dark,
against hostile text."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import time
import tomllib
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selenium.webdriver.common.keys import Keys

from pipeline.data.events import PromptEvent
from tests.api.browser import CHROMIUM, DRIVER, WITHOUT, Browser, chromium
from tests.api.site import Site, site

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=WITHOUT),
    pytest.mark.timeout(240),
]

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "api" / "dashboard"
HOSTILE = "<img src=x onerror='window.broken=1'><script>window.broken=1</script>{{7*7}}\u202e"
# A mock run that goes on for longer than any test; some steps a second.
STEPS = 4000
TOKENS = 8
STEP_SECONDS = 0.1
ENDLESS = {
    "train.steps": STEPS,
    "rollout.max_tokens": TOKENS,
    "train.mock.step_seconds": STEP_SECONDS,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("service")) as started:
        yield started


@pytest.fixture(scope="module")
def one_browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(one_browser: Browser, served: Site) -> Iterator[Browser]:
    """A page without a past; what it complains of by the test's end is an error.

    A run that the test leaves goes with it.
    """
    before = served.active()
    one_browser.shape()
    one_browser.enter(served.url, served.own_token)
    one_browser.complaints()
    yield one_browser
    complaints = one_browser.complaints()
    served.end_all_but(before)
    assert complaints == []


@pytest.fixture(scope="module")
def ended(served: Site) -> str:
    """A finished run whose recipe says what may not be believed."""
    hostile = {
        "description": HOSTILE,
        "prompts.template": HOSTILE.replace("{", "(").replace("}", ")") + "{prompt}",
    }
    return served.finished(
        {
            "name": "looked-at",
            "train.steps": 6,
            "rollout.max_tokens": TOKENS,
            "prompts.max_prompt_tokens": 512,
        }
        | hostile
    )


@pytest.fixture(scope="module")
def alarmed(served: Site) -> str:
    """A run whose reward is always 0: the mock's responses are no numbers."""
    changes = {"name": "alarmed", "train.steps": 10, "reward.functions": [{"name": "exact_number"}]}
    return served.finished(changes | {"rollout.max_tokens": TOKENS, "guard.on_alarm": "warn"})


def module(name: str) -> str:
    return f"const it = await import('/dashboard/{name}.js');"


# --------------------------------------------------------------------------------------------------
# A run


def test_alarms_are_on_the_chart_where_they_happened_and_in_a_list(
    browser: Browser, served: Site, alarmed: str
) -> None:
    browser.open(f"{served.url}#/runs/{alarmed}")
    browser.until("return document.querySelectorAll('.chart .mark').length")
    marks = browser.js(
        "return [...document.querySelectorAll('.chart .mark')].map((mark) => "
        "[mark.closest('.chart').querySelector('h3').innerText, mark.title])"
    )
    assert [title for title, _ in marks] == ["Variety"]
    assert marks[0][1].startswith(
        "Alarm at step 8: share of groups with equal rewards: rewards are equal in all groups of "
        "the first 8 steps"
    )
    places = browser.js(
        "const mark = document.querySelector('.chart .mark'), over = "
        "mark.parentElement.getBoundingClientRect(), at = mark.getBoundingClientRect(); return "
        "[(at.left + at.width / 2 - over.left) / over.width, over.width]"
    )
    assert places[0] == pytest.approx(7 / 9, abs=0.02), "step 8 of 1 to 10"
    says = (
        "return [...document.querySelectorAll('.alarm-says')].filter((one) => "
        "!one.hidden).map((one) => one.innerText)"
    )
    assert browser.js(says) == []
    browser.js("document.querySelector('.chart:has(.mark) .plot').focus()")
    for key in (Keys.HOME, *[Keys.ARROW_RIGHT] * 7):
        browser.keys(key)
    assert browser.js(says) == [marks[0][1]]
    assert "Alarm at step 8: share of groups with equal rewards" in browser.text(".findings")
    browser.click("Alarms")
    texts = browser.js(
        "return [...document.querySelectorAll('#view-alarms li > *')].map((each) => each.innerText)"
    )
    assert texts[0] == "Step 8: share of groups with equal rewards equal_groups"
    assert texts[1].startswith("rewards are equal in all groups of the first 8 steps")
    assert "reward functions return" in texts[2]
    assert len(texts) == 3, "the stream and the list of alarms have the same one"
    (alarm,) = served.get(f"v1/runs/{alarmed}/stages").body["alarms"]
    assert (alarm["metric"], alarm["step"], alarm["value"]) == ("equal_groups", 8, 1.0)


def test_trajectories_are_shown_in_their_tile_and_part_by_part(
    browser: Browser, served: Site
) -> None:
    small = {"train.steps": 3, "train.groups_per_step": 2, "algorithm.group_size": 4}
    run = served.finished({"name": "played", **small}, recipe="guess")
    browser.open(f"{served.url}#/runs/{run}")
    tile = (
        "const tile = [...document.querySelectorAll('.tile')].find((one) => "
        "one.querySelector('dt').innerText === 'Turns a trajectory' && !one.hidden); "
        "return tile?.querySelector('dd').innerText ?? null"
    )
    browser.until(
        tile.replace("return tile", "return /ended/.test(tile").replace("?? null", "?? '')")
    )
    counts = served.get(f"v1/runs/{run}/stages").body["trajectories"]
    ended = sum(count for name, count in counts.items() if name.startswith("ended_"))
    shown = browser.js(tile)
    assert f"{counts['turns'] / ended:.1f}" in shown
    assert f"{ended:.0f} ended" in shown
    browser.until("return document.querySelectorAll('.samples li').length > 0")
    samples = served.get(f"v1/runs/{run}/samples?limit=25").body["samples"]
    rows = browser.js(
        "return [...document.querySelectorAll('.samples li')].map((entry) => "
        "[...entry.querySelectorAll('tbody tr')].map((row) => row.cells[1].textContent))"
    )
    assert rows == [[str(part["tokens"]) for part in each["segments"]] for each in samples]
    texts = browser.js(
        "return [...document.querySelectorAll('.samples li')].map((entry) => "
        "[...entry.querySelectorAll('pre')].at(-1).textContent)"
    )
    assert texts == ["".join(part["text"] for part in each["segments"]) for each in samples]


def test_the_picture_shows_what_the_server_has_added_up(
    browser: Browser, served: Site, ended: str
) -> None:
    browser.open(f"{served.url}#/runs/{ended}")
    browser.until("return /busy/.test(document.querySelector('#picture-says').textContent)")
    says = browser.js("return document.querySelector('#picture-says').textContent")
    stages = served.get(f"v1/runs/{ended}/stages").body["stages"]
    assert len(stages) == 4
    for stage in stages:
        recent = {
            name: sum(worker["recent"][name] for worker in stage["workers"])
            for name in ("busy", "waiting_input", "waiting_room", "wall")
        }
        busy, for_input, for_room = (
            f"{100 * recent[name] / recent['wall']:.0f} %"
            for name in ("busy", "waiting_input", "waiting_room")
        )
        assert (
            f"{stage['name']} {busy} busy, {for_input} waiting for input, {for_room} waiting for "
            f"room, {stage['workers'][0]['queue_depth']} rows in its queue"
        ) in says


def test_a_whole_run_is_started_watched_paused_and_stopped_in_the_page(
    browser: Browser, served: Site
) -> None:
    browser.click("New run")
    browser.named("Recipe", "field")
    browser.type("Name", "watched")
    browser.type("Optimizer steps", str(STEPS))
    browser.type("Tokens of a response", str(TOKENS))
    browser.click("Change another key")
    browser.type("Key", "train.mock.step_seconds")
    browser.type("Value", str(STEP_SECONDS))
    browser.until("return document.body.innerText.includes('The recipe is sound.')")
    browser.click("Start the run")
    run = browser.until("return location.hash.startsWith('#/runs/') && location.hash.slice(7)")
    browser.until("return document.querySelector('.run-head .state')?.innerText === 'running'")
    assert browser.text("#connection") == "Live"

    # The charts move: every one has a line for at least five steps, and goes on.
    browser.click("Table of Staleness")
    rows = "return document.querySelectorAll('.chart:nth-child(5) tbody tr').length"
    browser.until(f"{rows.replace('return ', 'return (')}) >= 5")
    seen = browser.js(rows)
    browser.until(
        f"return document.querySelectorAll('.chart:nth-child(5) tbody tr').length > {seen}"
    )
    painted = browser.js(
        "return [...document.querySelectorAll('.plot canvas')].map((canvas) => new Set(new "
        "Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, "
        "canvas.height).data.buffer)).size)"
    )
    assert len(painted) == 13, "the mock measures no entropy"
    assert min(painted) > 10
    bounds = browser.js(
        "return [...document.querySelectorAll('.chart:nth-child(5) tbody tr')].map((row) => "
        "[...row.cells].map((cell) => Number(cell.innerText)))"
    )
    assert all(most <= bound == 1 for _, most, _, bound in bounds)

    # The picture and the timeline say what the stages do.
    browser.until("return document.querySelectorAll('.node .strong').length === 4")
    browser.until("return /busy \\d+ %/.test(document.querySelector('.node-rollout').textContent)")
    assert "rows in its queue" in browser.js(
        "return document.querySelector('#picture-says').textContent"
    )
    overlap = browser.until(
        "return document.querySelector('#timeline-says').innerText.match(/beside it for (\\d+) % "
        "of that/)?.[1]"
    )
    assert int(overlap) > 0

    browser.click("Pause")
    browser.until("return document.querySelector('.run-head .state').innerText === 'paused'")
    assert served.run(run)["state"] == "paused"
    browser.click("Resume")
    browser.until("return document.querySelector('.run-head .state').innerText === 'running'")
    steps = served.run(run)["steps_done"]
    browser.until(
        f"return Number(document.querySelector('.track[role]').ariaValueNow) > {steps + 1}"
    )

    browser.click("Show")
    browser.until("return document.querySelectorAll('.samples li').length === 25")
    browser.js("document.querySelector('.samples summary').click()")
    sample = browser.text(".samples li")
    assert "Prompt" in sample
    assert re.search(r"made by\s+\d+ by v\d+", sample)
    browser.click("More filters and columns")
    browser.type("staleness from", "1")
    browser.click("Show")
    browser.until("return document.querySelectorAll('.samples li').length > 0")
    found = browser.until(
        "return [...document.querySelectorAll('.samples details')].map((one) => { one.open = true; "
        "return one.innerText.match(/staleness\\s+(\\d+)/)?.[1]; })"
    )
    assert set(found) == {"1"}

    browser.click("Checkpoint")
    browser.click("Checkpoints")
    browser.until("return document.querySelector('#view-checkpoints tbody tr')")
    browser.click("Logs")
    browser.until("return document.querySelector('.log').innerText.includes('rollout')")
    browser.click("What if")
    browser.type("rollout workers", "2")
    browser.click("Simulate")
    browser.until(
        "return /tokens\\/s with rollout.workers = "
        "2/.test(document.querySelector('#view-what-if').innerText)"
    )
    browser.click("Workers")
    browser.until("return document.querySelectorAll('#view-workers tbody tr').length >= 4")

    browser.click("Scale")
    browser.js("document.querySelector('#dialog-number').value = '2'")
    assert browser.axe() == []
    browser.click("Scale the run")
    browser.until(
        "return [...document.querySelectorAll('#view-workers tbody tr')].some((row) => "
        "row.innerText.includes('rollout-1'))"
    )

    browser.click("Stop")
    browser.click("Cancel")
    assert served.run(run)["state"] == "running"
    browser.click("Stop")
    browser.click("Stop the run")
    browser.until("return document.querySelector('.run-head .state').innerText === 'stopped'")
    browser.until("return document.querySelector('#connection').innerText === 'Ended'")
    browser.until(
        "return document.querySelector('#runs-list [aria-current]').innerText.includes('stopped')"
    )
    browser.click("Delete")
    browser.click("Delete everything")
    browser.until(
        f"return !document.querySelector('#runs-list').innerText.includes({json.dumps('watched')})"
    )
    assert served.get(f"v1/runs/{run}").status == 404
    elsewhere = browser.js(
        "return performance.getEntriesByType('resource').map((one) => one.name)"
        ".filter((name) => !name.startsWith(location.origin))"
    )
    assert elsewhere == []


@pytest.fixture(scope="class")
def going(served: Site) -> Iterator[str]:
    """A run that goes on while the tests of a class look at it."""
    with served.running(ENDLESS) as run:
        yield run


class TestARunThatGoesOn:
    def test_the_page_goes_on_when_the_server_was_killed_and_is_there_again(
        self, going: str, browser: Browser, served: Site
    ) -> None:
        browser.open(f"{served.url}#/runs/{going}")
        browser.until("return Number(document.querySelector('.track[role]').ariaValueNow) >= 3")
        served.kill()
        try:
            browser.until(
                "return document.querySelector('#connection').innerText === 'Connecting again…'"
            )
        finally:
            served.start()
        before = served.run(going)["steps_done"]
        browser.until("return document.querySelector('#connection').innerText === 'Live'")
        browser.until(
            f"return Number(document.querySelector('.track[role]').ariaValueNow) > {before + 2}"
        )
        browser.click("Table of Reward")
        steps = browser.js(
            "return [...document.querySelectorAll('.chart tbody tr th')].map((cell) => "
            "Number(cell.innerText))"
        )
        assert all(later == earlier + 1 for later, earlier in pairwise(steps)), (
            f"steps are missing: {steps}"
        )

    def test_the_epoch_of_each_source_of_prompts_stands_beside_the_step(
        self, going: str, browser: Browser, served: Site
    ) -> None:
        for number, epochs in enumerate(({"gsm8k": 1}, {"gsm8k": 2, "sums": 7})):
            served.emit(going, PromptEvent(change="epoch", reason="", epochs=epochs))
            if not number:
                browser.open(f"{served.url}#/runs/{going}")
            expected = ", ".join(f"epoch {epoch} of {source}" for source, epoch in epochs.items())
            browser.until(
                f"return /step \\d+ of {STEPS:,}, "
                f"{expected}$/m.test(document.querySelector('.run-head').innerText)"
            )
            shown = lambda: served.get(f"v1/runs/{going}/stages").body["epochs"]  # noqa: E731
            served.until(
                lambda shown=shown, epochs=epochs: shown() == epochs, f"the stages show {epochs}"
            )

    def test_nothing_moves_as_events_come(self, going: str, browser: Browser, served: Site) -> None:
        browser.open(f"{served.url}#/runs/{going}")
        browser.until("return document.querySelectorAll('.plot canvas').length >= 7")
        browser.until("return /busy/.test(document.querySelector('#picture-says').textContent)")
        browser.js(
            "window.moved = []; new PerformanceObserver((list) => { for (const one of "
            "list.getEntries()) moved.push([one.value, one.sources.map(({node}) => "
            "node?.className ?? '')]); }).observe({type: 'layout-shift'});"
        )
        before = served.run(going)["steps_done"]
        browser.until(
            f"return Number(document.querySelector('.track[role]').ariaValueNow) > {before + 8}"
        )
        moved = browser.js("return window.moved")
        assert sum(value for value, _ in moved) < 0.01, moved

    def test_further_runs_wait_in_a_queue_and_say_so(
        self, going: str, browser: Browser, served: Site
    ) -> None:
        waiting = [served.submit({"name": f"waits-{number}"} | ENDLESS) for number in (1, 2)]
        browser.open(f"{served.url}#/runs/{waiting[1]}")
        browser.until(
            "return document.querySelector('.run-head').innerText.includes('Place 2 in the queue')"
        )
        browser.until(
            "return document.querySelector('#runs-list').innerText.includes('place 1 in the queue')"
        )
        browser.type("Name contains", "waits-1")
        browser.until("return document.querySelectorAll('#runs-list li').length === 1")
        browser.click("Stop")
        browser.click("Stop the run")
        browser.until("return document.querySelector('.run-head .state').innerText === 'stopped'")


def test_what_is_wrong_with_a_recipe_stands_beside_its_field_with_the_fix(
    browser: Browser, served: Site
) -> None:
    browser.open(f"{served.url}#/new")
    browser.type("Optimizer steps", "0")
    assert browser.named("Optimizer steps", "field").get_attribute("title") == (
        "Optimizer steps of the whole run."
    )
    browser.type("Staleness bound", "-1")
    browser.click("Start the run")
    beside = (
        "return document.getElementById(arguments[0].getAttribute('aria-describedby'))?.innerText"
    )
    for label, fix in (
        ("Optimizer steps", "use a value >= 1"),
        ("Staleness bound", "use a value >= 0"),
    ):
        field = browser.named(label, "field")
        assert fix in browser.until(beside, field)
        assert field.get_attribute("aria-invalid") == "true"
    assert browser.text(".problems").startswith("2 things are wrong.")
    assert "Optimizer steps" in browser.focused()["name"]

    browser.named("TOML", "field").click()
    text = browser.named("Recipe as TOML", "field")
    assert text.get_attribute("value") == (
        'extends = "mock"\nname = "mock"\n\n[train]\nsteps = 0\n\n[pipeline]\nstaleness = -1\n'
    ), "what was changed is taken along"
    lines = (
        "return [...document.querySelectorAll('.wrong-lines li')].map((one) => "
        "[one.querySelector('button').innerText, one.querySelector('code').innerText])"
    )
    browser.until(f"{lines.replace('return ', 'return (')}).length === 2")
    assert browser.js(lines) == [["Line 5", "train.steps"], ["Line 8", "pipeline.staleness"]]
    text.clear()
    text.send_keys("[train")
    browser.until("return /^Line 1/.test(document.querySelector('.wrong-lines').innerText)")
    text.clear()
    text.send_keys('{"name": "mine", "train": {"stepz": 3}}')
    browser.until("return /train.stepz/.test(document.querySelector('.wrong-lines').innerText)")
    assert "add a [model] section" in browser.text(".wrong-lines")
    text.clear()
    text.send_keys('extends = "mock"\nname = "typed"\n\n[train]\nlearning_r')
    browser.click("learning_rate")
    browser.until("return document.activeElement.id === 'recipe-text'")
    browser.keys("1e-4")
    browser.until("return document.querySelector('.problems.sound')")
    assert "Peak learning rate" in browser.text(".hints")


def test_a_run_is_continued_and_forked_from_the_checkpoint_that_is_chosen(
    browser: Browser, served: Site
) -> None:
    run = served.finished(
        {"name": "again", "train.steps": 4, "checkpoint.every": 2, "rollout.max_tokens": TOKENS}
    )
    browser.open(f"{served.url}#/runs/{run}")
    browser.click("Continue")
    field = browser.named("Optimizer steps", "field")
    assert field.get_attribute("value") == "8", "it has made all of its steps"
    browser.type("Optimizer steps", "3")
    browser.click("Continue the run")
    browser.until("return /nothing to resume/.test(document.querySelector('.grid').innerText)")
    browser.type("Optimizer steps", "6")
    browser.click("Change another key")
    browser.type("Key", "model.source")
    browser.type("Value", "tiny")
    browser.click("Continue the run")
    browser.until("return /cannot change in a resumed run/.test(document.body.innerText)")
    assert "Value" in browser.focused()["name"]
    browser.click("Remove this key")
    browser.until("return document.querySelector('.problems.sound')")
    browser.click("Continue the run")
    served.until(lambda: served.run(run)["steps_done"] == 6, "it goes on")
    browser.until("return document.querySelector('.run-head .state')?.innerText === 'finished'")

    browser.click("Checkpoints")
    browser.click("Fork from version 4")
    assert browser.until("return document.querySelector('#begins-with')?.value") == "4"
    browser.type("Name", "other")
    browser.type("Staleness bound", "2")
    browser.until("return document.querySelector('.problems.sound')")
    assert browser.axe() == []
    browser.click("Start the fork")
    browser.until("return document.querySelector('.run-head h1')?.innerText === 'other'")
    (fork,) = [one for one in served.runs() if one["name"] == "other"]
    assert (fork["steps"], fork["recipe"]["pipeline"]["staleness"]) == (6, 2)
    served.until(lambda: served.run(fork["id"])["state"] == "finished", "the fork has finished")


def test_the_lines_of_keys_are_found_in_toml(browser: Browser) -> None:
    text = (
        'name = "a"\nlist = [\n  1,\n]\ntext = """\n[not.a.table]\nkey = 1\n"""\n[train]\n'
        'steps = 3 # [a]\nmock.seconds = 1\n[[reward.functions]]\n"name" = "x"\n'
        '[[reward.functions]]\nname = "y"\n'
    )
    found = browser.asynchronous(module("pages/text") + "return it.keysOf(arguments_[0]);", text)
    assert found == [
        [0, "name"],
        [1, "list"],
        [4, "text"],
        [8, "train"],
        [9, "train.steps"],
        [10, "train.mock.seconds"],
        [11, "reward.functions.0"],
        [12, "reward.functions.0.name"],
        [13, "reward.functions.1"],
        [14, "reward.functions.1.name"],
    ]


# --------------------------------------------------------------------------------------------------
# Samples

PLACES = (
    "return [...document.querySelectorAll('.samples [data-place]')].map((one) => one.dataset.place)"
)
COUNT = "return document.querySelectorAll('.samples li').length === {}"


def place_of(sample: dict[str, Any]) -> str:
    return f"step {sample['step']}, group {sample['group']}, place {sample['place']}"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_samples_are_filtered_and_compared_and_the_address_keeps_it(
    browser: Browser, served: Site, ended: str, width: int, scheme: str
) -> None:
    browser.shape(width, 844, scheme=scheme)
    browser.open(f"{served.url}#/runs/{ended}")
    browser.until(COUNT.format(25))
    browser.click("More filters and columns")
    for label, text in (("best", "2"), ("worst", "1"), ("columns to show", "length, answer")):
        browser.type(label, text)
    browser.click("Show")
    browser.until(COUNT.format(3))
    path = f"v1/runs/{ended}/samples"
    ranked = served.get(f"{path}?best=2&worst=1").body["samples"]
    assert browser.js(PLACES) == [place_of(sample) for sample in ranked]
    assert "length 8, answer " in browser.text(".samples summary")
    browser.js("location.reload()")
    browser.until(COUNT.format(3))
    assert browser.js(PLACES) == [place_of(sample) for sample in ranked]
    browser.js(
        "document.querySelectorAll('.samples details').forEach((one) => { one.open = true })"
    )
    assert browser.axe() == []
    for at in (0, 2):
        browser.js(f"document.querySelectorAll('.samples [data-place]')[{at}].click()")
    label = f"{place_of(ranked[0])} beside {place_of(ranked[2])}"
    seen = f"return document.querySelector('.pair section')?.ariaLabel === '{label}'"
    browser.until(seen)
    assert (browser.axe(), browser.overflow()) == ([], 0)
    marks = browser.js("return document.querySelectorAll('.pair mark').length")
    assert marks > 0, "other responses"
    assert "≠" in browser.text(".pair .differs")
    browser.js("location.reload()")
    browser.until(seen)
    browser.click("Close")
    browser.js(
        "document.querySelectorAll('.samples details').forEach((one) => { one.open = true })"
    )
    browser.click("Same prompt in other steps")
    prompt = ranked[0]["prompt_id"]
    same = served.get(f"{path}?prompt_id={prompt}&limit=25").body["samples"]
    browser.until(COUNT.format(len(same)))
    assert browser.js(PLACES) == [place_of(sample) for sample in same]
    browser.click("Clear")
    browser.until(COUNT.format(25))
    assert browser.js("return location.hash") == f"#/runs/{ended}"
    steps = sorted({sample["step"] for sample in served.get(f"{path}?limit=200").body["samples"]})
    browser.type("step", str(steps[0]))
    browser.type("beside step", str(steps[-1]))
    browser.type("best", "2")
    browser.click("Show")
    browser.until("return document.querySelectorAll('.pairs > li').length === 2")
    labels = browser.js(
        "return [...document.querySelectorAll('.pairs section')].map((one) => one.ariaLabel)"
    )
    for label in labels:
        assert re.match(rf"step {steps[0]}, .* beside step {steps[-1]}, ", label)
    assert (browser.axe(), browser.overflow()) == ([], 0)
    browser.type("beside step", "")
    browser.type("conditions", "lenght>3")
    browser.click("Show")
    browser.until("return /No sample has a column 'lenght'/.test(document.body.innerText)")
    assert "length" in browser.text(".view [role=status]")


WORDS = st.lists(
    st.sampled_from(["one", "two", " ", "\n", "ß", "日", ",", "<b>", "_"]), max_size=12
)


def test_a_difference_is_the_fewest_words(browser: Browser) -> None:
    def difference(left: str, right: str) -> Any:
        script = module("pages/beside") + "return it.difference(...arguments_);"
        return browser.asynchronous(script, left, right)

    assert difference("a cat sat here", "a dog sat") == [
        [["a ", False], ["cat", True], [" sat", False], [" here", True]],
        [["a ", False], ["dog", True], [" sat", False]],
    ]

    @settings(max_examples=60, deadline=None)
    @given(left=WORDS, right=WORDS)
    def holds(left: list[str], right: list[str]) -> None:
        sides = difference("".join(left), "".join(right))
        for side, words in zip(sides, (left, right), strict=True):
            assert "".join(text for text, _ in side) == "".join(words)
        common = ["".join(text for text, marked in side if not marked) for side in sides]
        assert common[0] == common[1]
        assert (left == right) <= (not any(marked for side in sides for _, marked in side))

    holds()
    long = ["word"] * 3000
    sides = difference(" ".join(["a", *long, "z"]), " ".join(["b", *long[1:], "c"]))
    assert [[marked for _, marked in side] for side in sides] == [[True], [True]], (
        "beyond a bound all is marked"
    )


# --------------------------------------------------------------------------------------------------
# Hostile text


def test_what_a_recipe_says_stays_text(browser: Browser, served: Site, ended: str) -> None:
    """Anyone with a token of scope run may submit a recipe."""
    browser.open(f"{served.url}#/runs/{ended}")
    browser.until("return document.querySelectorAll('.samples li').length > 0")
    browser.click("Recipe")
    shown = browser.js("return document.querySelector('main').textContent")
    assert shown.count("<script>window.broken=1</script>") >= 3
    assert browser.js("return document.querySelectorAll('main img, main script').length") == 0
    assert browser.js("return window.broken ?? null") is None


def test_every_field_of_a_sample_stays_text(browser: Browser) -> None:
    sample = {
        "prompt": HOSTILE,
        "response": HOSTILE,
        "reward": 1,
        "rewards": {HOSTILE: 1, "b": 0},
        "advantage": 1,
        "step": HOSTILE,
        "group": HOSTILE,
        "place": HOSTILE,
        "tokens": 3,
        "versions": [[HOSTILE, HOSTILE]],
        "segments": [
            {
                **{"generated": True, "tokens": 3, "text": HOSTILE * 2, "reward": 0.5},
                "pieces": [[3, 1, HOSTILE], [4, 2, HOSTILE]],
                "calls": [{"name": HOSTILE, "arguments": {"a": HOSTILE}}],
                "seconds": {"engine": 1.5, "waiting": None, "environment": 0.25},
            },
            {"generated": False, "tokens": 2, "text": "observed text", "reward": None},
        ],
        "ending": HOSTILE,
        "staleness": 0,
        "truncated": False,
    }
    shown = browser.asynchronous(
        module("pages/samples") + "const entry = new it.Samples(null, 'run').entry(arguments_[0]); "
        "document.body.append(entry);const shown = [entry.textContent, "
        "entry.querySelectorAll('img, script').length, entry.querySelector('pre .quiet').textContent,"
        "[...entry.querySelectorAll('pre .by')].map((each) => [each.className, each.title]),"
        "[...entry.querySelectorAll('tbody tr')].map((row) => [...row.cells].slice(0, -2).map("
        "(cell) => cell.textContent))];"
        " entry.remove(); return shown;",
        sample,
    )
    assert shown[0].count("<script>window.broken=1</script>") >= 10
    assert shown[1:3] == [0, "observed text"]
    assert shown[3] == [["by by-1", "v3, 1 tokens"], ["by by-0", "v4, 2 tokens"]]
    assert shown[4] == [
        ["turn 1", "3", "v3 v4", "0.5", "1.5 s", "–", "0.25 s"],
        ["observed", "2", "", "", "", "", ""],
    ]


def test_samples_side_by_side_have_the_colours_that_each_has_alone(browser: Browser) -> None:
    """What differs is marked within them, also across their ends."""
    turn = {"generated": True, "tokens": 3, "text": "", "reward": None, "calls": [], "seconds": {}}
    observed = {"generated": False, "tokens": 2, "text": " seen ", "reward": None}
    left = {"segments": [turn | {"pieces": [[3, 1, "one tw"], [4, 2, "o"]]}, observed]}
    right = {"masked": [[False, 1, "one "], [True, 1, "three seen "]]}
    facts = {"prompt": "", "reward": 1, "step": 1, "group": 0, "versions": []}
    pair = [
        facts | left | {"place": 0, "response": "one two seen "},
        facts | right | {"place": 1, "response": "one three seen "},
    ]
    sides = browser.asynchronous(
        module("pages/beside") + "const shown = it.beside(...arguments_[0]);"
        "return [...shown.querySelectorAll('[aria-label^=Response] , pre')].slice(-2).map((pre) => "
        "[pre.textContent, [...pre.querySelectorAll('mark')].map((each) => each.textContent), "
        "[...pre.querySelectorAll('span')].map((each) => [each.className, each.textContent])]);",
        pair,
    )
    assert sides == [
        [
            "one two seen ",
            ["tw", "o"],
            [["by by-1", "one tw"], ["by by-0", "o"], ["quiet", " seen "]],
        ],
        ["one three seen ", ["three"], [["quiet", "one "]]],
    ]


def test_the_speed_of_a_step_after_a_resume_is_by_its_own_seconds(browser: Browser) -> None:
    steps = [
        {"step": 1, "time": 100, "seconds": 2, "tokens_generated": 500},
        {"step": 2, "time": 102, "seconds": 2, "tokens_generated": 1500},
        {"step": 3, "time": 9102, "seconds": 4, "tokens_generated": 1900},
    ]
    speeds = browser.asynchronous(
        module("progress") + "const progress = new it.Progress({}, () => 0);"
        "for (const step of arguments_[0]) progress.step(step);"
        "return progress.columns().speed('tokens_generated');",
        steps,
    )
    assert speeds == [None, 500, 100]


def test_the_speed_of_an_ended_run_is_its_mean(browser: Browser) -> None:
    """Its last steps make no tokens: the responses were there before."""
    steps = [
        {"step": step, "seconds": 2, "tokens_generated": min(500 * step, 1500)}
        for step in range(1, 14)
    ]
    rates = browser.asynchronous(
        module("progress") + "const progress = new it.Progress({}, () => 0);"
        "for (const step of arguments_[0]) progress.step(step);"
        "const running = progress.rate(); progress.state = 'finished';"
        "return [running, progress.rate()];",
        steps,
    )
    assert rates == [0, 1000 / 24]


@pytest.mark.parametrize("address", ["#/nonsense", "#nonsense", "#/nonsense/a/b"])
def test_an_address_of_no_page_says_so_and_leads_to_the_runs(
    browser: Browser, served: Site, address: str
) -> None:
    browser.open(f"{served.url}{address}")
    browser.until("return document.querySelector('main h1')?.textContent === 'Nothing is here'")
    assert address in browser.js("return document.querySelector('main').textContent")
    assert browser.js("return document.querySelector('main a').getAttribute('href')") == "#/"


def test_branches_are_marked_and_all_parts_of_a_long_trajectory_are_seen(browser: Browser) -> None:
    text = "a long observation " * 8
    parts = [
        {"generated": False, "tokens": 40, "text": text, "branch": branch, **shares}
        for branch, shares in ((0, {"shares": 0}), (0, {}), (1, {"shares": 40}), (1, {}))
        for _ in range(1 if shares else 9)
    ]
    marks, cells, fits = browser.asynchronous(
        module("pages/samples") + "const entry = new it.Samples(null, 'run').entry(arguments_[0]); "
        "document.querySelector('main').append(entry); entry.classList.add('samples'); "
        "entry.firstChild.open = true; const scroll = entry.querySelector('.table-scroll');"
        "const shown = [[...entry.querySelectorAll('pre .branch')].map((mark) => mark.textContent),"
        "[...entry.querySelectorAll('tbody td[colspan]')].map((cell) => cell.textContent),"
        "[scroll.scrollHeight <= scroll.clientHeight, scroll.scrollWidth <= scroll.clientWidth]];"
        " entry.remove(); return shown;",
        {"prompt": "", "response": "", "reward": 1, "segments": parts},
    )
    assert marks == ["\nbranch 1 "]
    assert cells == ["goes on behind 40 tokens of the response"]
    assert fits == [True, True]


def test_a_script_that_got_into_the_page_would_not_run(browser: Browser) -> None:
    tried = browser.js(
        "const got = []; const attempt = (what) => { try { what(); got.push('allowed'); } "
        "catch (error) { got.push(error.name); } };"
        "attempt(() => { document.body.innerHTML += '<b>x</b>'; });"
        "attempt(() => { document.createElement('script').textContent = 'window.broken=1'; });"
        "attempt(() => { setTimeout('window.broken=1'); }); return got;"
    )
    assert tried == ["TypeError"] * 3
    assert len(browser.complaints()) >= 2  # the browser reports each breach
    policy = browser.asynchronous(
        "return (await fetch('/')).headers.get('Content-Security-Policy');"
    )
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


# --------------------------------------------------------------------------------------------------
# Who may look


def test_a_server_that_wants_a_token_is_given_one_and_it_is_kept_in_the_tab_alone(
    one_browser: Browser, tmp_path: Path
) -> None:
    with site(tmp_path) as locked:
        token = locked.token("read")
        one_browser.open(locked.url)
        one_browser.type("Token", "adk_wrong")
        one_browser.click("Sign in")
        one_browser.until("return document.body.innerText.includes('does not accept this token')")
        one_browser.type("Token", token)
        one_browser.click("Sign in")
        one_browser.until("return document.querySelector('main').innerText.includes('No run yet')")
        kept = one_browser.js(
            "return [Object.values(sessionStorage), localStorage.length, document.cookie, "
            "location.href]"
        )
        assert kept == [[token], 0, "", locked.url]
        # A reader's token may read; a forbidden action is reported.
        one_browser.click("New run")
        one_browser.named("Recipe", "field")
        one_browser.until("return document.querySelector('#recipe-name').options.length > 0")
        one_browser.click("Start the run")
        one_browser.until(
            "return document.querySelector('.problems').innerText.includes('scope run')"
        )
        one_browser.click("Sign out")
        one_browser.named("Token", "field")
        assert one_browser.js("return sessionStorage.length") == 0
        one_browser.complaints()


def test_a_link_signs_the_browser_in_once_and_for_all_tabs(
    one_browser: Browser, tmp_path: Path
) -> None:
    """Used twice, or after the server was started anew, it says so and how to go on."""
    form = "return document.querySelector('main').innerText"
    with site(tmp_path) as locked:
        link = locked.link()
        one_browser.shape()
        one_browser.open(link)
        one_browser.until("return document.querySelector('main').innerText.includes('No run yet')")
        kept = one_browser.js(
            "return [Object.values(localStorage), sessionStorage.length, document.cookie, "
            "location.href, history.length]"
        )
        assert kept[0][0].startswith("adock-session_")
        assert kept[1:4] == [0, "", f"{locked.url}#/"], (
            "the code is not in the address, and there is no cookie"
        )
        first = one_browser.driver.current_window_handle
        one_browser.driver.switch_to.new_window("tab")
        one_browser.open(locked.url)
        one_browser.until(
            "return document.querySelector('main').innerText.includes('No run yet')",
            why="a second tab",
        )

        one_browser.open(link)
        one_browser.until(f"{form}.includes('This link was used already')")
        assert "This browser is signed in already." in one_browser.text("main")
        one_browser.click("All runs")
        one_browser.until("return document.querySelector('main').innerText.includes('No run yet')")

        # the tab that hears of it first forgets the session, and the others have none then
        second = one_browser.driver.current_window_handle
        for tab in (first, second):
            one_browser.driver.switch_to.window(tab)
            one_browser.driver.get("about:blank")
        locked.kill()
        locked.start()
        one_browser.open(locked.url)
        one_browser.until(f"{form}.includes('This sign-in has ended: the server was started anew')")
        assert "asyncdock link" in one_browser.text("main")
        assert one_browser.js("return localStorage.length") == 0
        assert one_browser.axe("main") == []
        if folder := os.environ.get("ASYNCDOCK_SHOTS"):
            (Path(folder) / "sign-in-ended.png").write_bytes(one_browser.picture())

        one_browser.open(link)
        one_browser.until(f"{form}.includes('is of a server that has ended')")
        if folder := os.environ.get("ASYNCDOCK_SHOTS"):
            (Path(folder) / "link-used.png").write_bytes(one_browser.picture())
        # in the same tab: only the fragment changes
        one_browser.js("location.href = arguments[0]", locked.link())
        one_browser.until("return document.querySelector('main').innerText.includes('No run yet')")
        session = one_browser.js("return Object.values(localStorage)[0]")
        one_browser.click("Sign out")
        one_browser.named("Token", "field")
        assert one_browser.js("return localStorage.length") == 0
        answer = one_browser.asynchronous(
            "return (await fetch('v1/runs', {headers: {Authorization: `Bearer "
            "${arguments_[0]}`}})).status;",
            session,
        )
        assert answer == 401, "the server has forgotten the session, too"
        one_browser.driver.close()
        one_browser.driver.switch_to.window(first)
        one_browser.complaints()


# --------------------------------------------------------------------------------------------------
# By keys alone, by ear, on a phone, in the dark


def test_a_run_can_be_started_and_stopped_with_the_keyboard_alone(
    browser: Browser, served: Site
) -> None:
    browser.open(f"{served.url}#/new")
    # the fields come once the server has answered what the recipe says
    browser.named("Optimizer steps", "field")

    def tab_to(name: str, *, key: str = Keys.TAB, most: int = 80) -> None:
        """Press Tab until the control called so has the focus.

        Wherever it stops on the way is seen.
        """
        for _ in range(most):
            browser.keys(key)
            at = browser.focused()
            if at["tag"] not in ("BODY", "HTML"):
                assert at["seen"], f"the focus is not seen on {at}"
            if at["name"].startswith(name):
                return
        raise AssertionError(f"{name!r} is not reached with the keyboard")

    def reads(*keys: str, begins: str) -> None:
        """These keys on a chart read a step aloud.

        A late event may be read aloud right after it: press them again.
        """
        for _ in range(20):
            browser.keys(*keys)
            if browser.js("return document.querySelector('#spoken').innerText").startswith(begins):
                return
            time.sleep(0.5)
        raise AssertionError(f"{begins!r} is not read aloud")

    browser.js("document.activeElement.blur()")
    tab_to("Skip to the run")
    browser.keys(Keys.ENTER)
    assert browser.js("return document.activeElement.tagName") == "H1"
    tab_to("Name")
    browser.keys("by-keys")
    tab_to("Optimizer steps")
    browser.keys(str(STEPS))
    tab_to("Tokens of a response")
    browser.keys(str(TOKENS))
    tab_to("Change another key")
    browser.keys(Keys.ENTER)
    browser.keys("train.mock.step_seconds", Keys.TAB, str(STEP_SECONDS))
    tab_to("Start the run")
    browser.keys(Keys.ENTER)
    browser.until("return document.querySelector('.run-head .state')?.innerText === 'running'")
    assert browser.js("return document.activeElement.tagName") == "H1", (
        "one reads on at the new page's heading"
    )
    tab_to("Pause")
    browser.keys(Keys.SPACE)
    browser.until("return document.querySelector('.run-head .state').innerText === 'paused'")
    browser.until(
        "return document.activeElement.innerText === 'Resume'",
        why="the focus on what took Pause's place",
    )
    browser.keys(Keys.SPACE)
    browser.until("return document.querySelector('.run-head .state').innerText === 'running'")
    browser.until("return document.querySelectorAll('.plot canvas').length >= 7")
    browser.until("return document.querySelector('.track[role]').ariaValueNow >= 3")
    browser.js("document.querySelector('.plot').focus()")
    reads(Keys.HOME, begins="Reward at step 1:")
    reads(Keys.HOME, Keys.ARROW_RIGHT, begins="Reward at step 2:")
    browser.keys(Keys.ESCAPE)
    tab_to("Samples")
    browser.keys(Keys.ARROW_RIGHT)
    assert browser.focused()["name"] == "Workers"
    browser.keys(Keys.END)
    assert browser.js("return document.querySelector('[aria-selected=true]').innerText") == "Recipe"
    tab_to("Stop", key=Keys.SHIFT + Keys.TAB)
    browser.keys(Keys.ENTER)
    browser.until("return document.querySelector('dialog[open]')")
    browser.keys(Keys.ESCAPE)
    browser.until("return !document.querySelector('dialog')")
    assert browser.focused()["name"] == "Stop", "the focus goes back to where it was"
    browser.keys(Keys.ENTER)
    browser.until("return document.querySelector('dialog[open]')")
    tab_to("Stop the run", most=4)
    browser.keys(Keys.ENTER)
    browser.until("return document.querySelector('.run-head .state').innerText === 'stopped'")
    browser.until(
        "return document.querySelector('#spoken').textContent.includes('stopped')",
        why="a word of it by ear",
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_nothing_keeps_anybody_out_at_any_width_and_in_either_colour_scheme(
    browser: Browser, served: Site, ended: str, width: int, scheme: str
) -> None:
    """axe-core finds nothing, and nothing is wider than the window."""
    browser.shape(width, 844, scheme=scheme)
    for place, there in (
        ("#/", "document.querySelector('#runs-list li')"),
        ("#/new", "document.querySelector('#recipe-name')?.options.length"),
        (
            f"#/runs/{ended}",
            "document.querySelectorAll('.plot canvas').length >= 7 && "
            "document.querySelector('.samples li')",
        ),
    ):
        browser.open(f"{served.url}{place}")
        browser.until(f"return {there}")
        assert browser.axe() == [], place
        assert browser.overflow() <= 0, place
    for view in ("Workers", "Checkpoints", "Logs", "What if", "Recipe"):
        browser.click(view)
        assert browser.axe(".browser") == [], view  # around it all is as it was
        assert browser.overflow() <= 0, view
    browser.js("document.querySelectorAll('.as-table').forEach((one) => { one.open = true; })")
    browser.click("Delete")
    assert browser.axe() == [], "a question"
    browser.click("Cancel")
    dark = browser.js(
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((one) => one "
        "< 60)"
    )
    assert dark == (scheme == "dark")


def rules(scheme: str) -> dict[str, str]:
    """The colours that the style sheet gives by name."""
    style = (PAGE / "dashboard.css").read_text()
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", style)
    return {name: light if scheme == "light" else dark for name, light, dark in found}


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, between 1 and 21."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = (
        np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        @ rgb
    )
    x, y, z = np.cbrt(np.clip(xyz / [0.9505, 1.0, 1.089], 1e-6, None))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
SIGHT = {
    name: np.array(rows).reshape(3, 3)
    for name, rows in {
        "usual": [1, 0, 0, 0, 1, 0, 0, 0, 1],
        "protanopia": [
            0.152286,
            1.052583,
            -0.204868,
            0.114503,
            0.786281,
            0.099216,
            -0.003882,
            -0.048116,
            1.051998,
        ],
        "deuteranopia": [
            0.367322,
            0.860646,
            -0.227968,
            0.280085,
            0.672501,
            0.047413,
            -0.01182,
            0.04294,
            0.968881,
        ],
        "tritanopia": [
            1.255528,
            -0.076749,
            -0.178779,
            -0.078411,
            0.930809,
            0.147602,
            0.004733,
            0.691367,
            0.3039,
        ],
    }.items()
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_distinguished_and_read(scheme: str) -> None:
    colours = rules(scheme)
    for text, ground in product(
        ("text", "muted", "good", "bad", "watch", "accent"), ("surface", "page", "raised")
    ):
        assert contrast(colours[text], colours[ground]) >= 4.5, f"{text} on {ground}"
    drawn = [name for name in colours if name.startswith(("series-", "share-", "stage-"))]
    for name in drawn:
        assert contrast(colours[name], colours["surface"]) >= 2.9, name
    shares = [name for name in drawn if name.startswith("share-")]
    for sight, seen in SIGHT.items():
        for group in (["series-1", "series-2"], shares):
            points = {name: lab(np.clip(seen @ linear(colours[name]), 0, 1)) for name in group}
            for one, other in product(group, group):
                if one < other:
                    assert np.linalg.norm(points[one] - points[other]) > 20, (
                        f"{one} and {other} with {sight}"
                    )


# --------------------------------------------------------------------------------------------------
# Its parts, in the browser


def dispatched(text: str) -> list[dict[str, str]]:
    """The events of a whole stream, straight from the standard's words."""
    events = []
    kind = ""
    data = []
    last = ""
    for line in re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))[:-1]:
        name, colon, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append({"id": last, "kind": kind or "message", "data": "\n".join(data)})
            kind = ""
            data = []
        elif colon and not name:
            continue
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        elif name == "id" and "\0" not in value:
            last = value
    return events


LINES = st.sampled_from(
    [
        "data: a",
        "data:b",
        "data",
        "data:  c",
        "event: step",
        "event",
        "id: 7-1",
        "id",
        "id: x\x00y",
        ": beat",
        ":",
        "",
        "",
        "",
        "retry: 5",
        "no field",
    ]
)
ENDED_LINES = st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r\n", "\r"])), max_size=14)
IN_A_PAGE = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(lines=ENDED_LINES, cuts=st.lists(st.integers(0, 90), max_size=6), bom=st.booleans())
@IN_A_PAGE
def test_a_stream_is_read_the_same_however_it_is_cut(
    browser: Browser, lines: list[tuple[str, str]], cuts: list[int], bom: bool
) -> None:
    text = "\ufeff" * bom + "".join(line + end for line, end in lines)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[begin:end] for begin, end in pairwise(places)]
    found = browser.asynchronous(
        module("stream") + "const [parser, encoder, decoder] = [new it.Parser(), new "
        "TextEncoder(), new TextDecoder()];"
        # removes a byte-order mark
        "const decode = (part) => decoder.decode(encoder.encode(part), { stream: true });"
        "return arguments_[0].flatMap((part) => parser.push(decode(part)));",
        [*parts, "\n"] if text.endswith("\r") else parts,
    )
    assert found == dispatched(text)


TICKS = 40
INTERVALS = st.lists(
    st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)).map(sorted), max_size=8
)


@given(one=INTERVALS, other=INTERVALS)
@IN_A_PAGE
def test_the_overlap_of_the_timeline_is_that_of_its_instants(
    browser: Browser, one: list[list[int]], other: list[list[int]]
) -> None:
    found = browser.asynchronous(
        module("charts/timeline") + "const [a, b] = arguments_[0].map((list) => "
        "it.union(list));return [it.total(a), it.total(b), "
        "it.total(it.both(a, b)), Math.max(0, ...it.depth([a, "
        "b]).map((one) => one[1]))];",
        [one, other],
    )
    in_one, in_other = ({t for a, b in spans for t in range(a, b)} for spans in (one, other))
    shared = in_one & in_other
    assert found == [
        len(in_one),
        len(in_other),
        len(shared),
        2 if shared else int(bool(in_one | in_other)),
    ]


def test_numbers_are_written_as_a_person_reads_them(browser: Browser) -> None:
    wanted = {
        0: "0",
        99.9: "100",
        150: "150",
        15.26: "15",
        1234.5: "1,235",
        0.00123: "0.0012",
        -0.0069: "−0.0069",
        1e-5: "1e−5",
    }
    found = browser.asynchronous(
        module("format") + "return arguments_[0].map((value) => it.number(value, 2));", list(wanted)
    )
    assert found == list(wanted.values())
    missing = browser.asynchronous(
        module("format") + "return [it.number(null), it.number(NaN), it.percent(undefined)];"
    )
    assert missing == ["–"] * 3
    counts = browser.asynchronous(
        module("format") + "return arguments_[0].map(it.count);",
        [9999, 10_000, 96_139, 999_499, 999_500, 1_234_567],
    )
    assert counts == ["9,999", "10k", "96.1k", "999k", "1.00M", "1.23M"]


def test_labels_of_an_axis_differ(browser: Browser) -> None:
    labels = browser.asynchronous(
        module("charts/charts") + "const chart = new it.Chart({title: 'a', series: []});"
        "return [[0.196, 0.197, 0.198], [0, 5, 10]].map((values) => chart.labels(values));"
    )
    assert labels == [["0.196", "0.197", "0.198"], ["0", "5", "10"]]


# --------------------------------------------------------------------------------------------------
# The page that the API is read in


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_the_api_shows_every_operation_and_loads_nothing_from_elsewhere(
    browser: Browser, served: Site, width: int, scheme: str
) -> None:
    browser.shape(width, 844, scheme=scheme)
    browser.open(f"{served.url}docs")
    browser.until("return document.querySelector('section > details')")
    document = served.get("openapi.json").body
    assert browser.js("return document.querySelectorAll('section > details').length") == sum(
        len(methods) for methods in document["paths"].values()
    )
    browser.js("document.querySelector('#submit_run').open = true")
    browser.js(
        "document.querySelectorAll('#submit_run details').forEach((answer) => { answer.open "
        "= true; })"
    )
    browser.until("return document.querySelectorAll('#submit_run details table').length > 0")
    assert "overrides" in browser.text("#submit_run")
    assert "recipe_name" in browser.text("#submit_run")
    browser.js("document.querySelector('#stream').open = true")
    browser.js(
        "document.querySelectorAll('#stream details').forEach((answer) => { answer.open = true; })"
    )
    browser.until(
        "return document.querySelector('#stream').innerText.includes('An optimizer step was made.')"
    )
    assert "dropped" in browser.text("#stream")
    assert "`" not in browser.text("#submit_run"), "code is shown as code"
    assert browser.axe() == []
    assert browser.overflow() <= 0
    browser.type("Find an operation", "writes checkpoint POST")
    browser.until("return document.querySelector('#found').innerText === '1 found'")
    left = "return document.querySelector('section:not([hidden]) > details:not([hidden])').id"
    assert browser.js(left) == "checkpoint_run"
    asked = browser.js("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert {one.removeprefix(served.url) for one in asked} == {
        "docs/reference.css",
        "docs/reference.js",
        "openapi.json",
    }


# --------------------------------------------------------------------------------------------------
# Its files


def test_an_installed_package_has_every_file_of_the_page() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["api"]
    listed = subprocess.run(
        ["git", "ls-files", "api/dashboard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    files = [str(path.relative_to(ROOT / "api")) for path in PAGE.rglob("*") if path.is_file()]
    assert not listed or sorted(f"api/{file}" for file in files) == sorted(listed)
    for file in files:
        assert any(fnmatch.fnmatch(file, pattern) for pattern in packaged), file


def test_the_page_loads_nothing_from_elsewhere() -> None:
    """No address of another machine in what is ours, but names of namespaces and sources of what is
    vendored."""
    for path in PAGE.iterdir():
        if path.is_file():
            found: list[Any] = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text())
            assert [url for url in found if "www.w3.org" not in url] == [], path
