"""Models of Tinker's clients in the dashboard: who trains what is seen by its own token, live."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from selenium.webdriver.common.keys import Keys

from api.tinker.messages import MESSAGES
from api.tinker.routes import add_routes
from orchestration.calls.service import open_service
from tests.api.browser import CHROMIUM, DRIVER, WITHOUT, Browser, chromium
from tests.api.serving import Client, problem, serving
from tests.api.tinker.test_endpoints import BASE, User
from tests.api.tinker.test_messages import INT64, body, datum, tensor, text

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=WITHOUT),
    pytest.mark.timeout(240),
]
HOSTILE = "<img src=x onerror='window.broken=1'>"
STEPS = 6
ROWS = "return [...document.querySelectorAll('.models tbody tr')].map((row) => row.innerText)"
TITLES = "return [...document.querySelectorAll('.chart h3')].map((title) => title.innerText)"
PLOTS = "return document.querySelectorAll('.plot canvas').length === 8"
SAYS = "return document.querySelector(`#chart-${arguments[0]}-says`).textContent"
TILES = "return document.querySelector('.tiles').innerText.replaceAll('\\n', ' ')"


@asynccontextmanager
async def training_calls(index_url: str, tmp_path: Path, **settings: Any) -> AsyncIterator[Client]:
    entry = "tests.api.dashboard.measured:open_parts"

    def extend(app: web.Application) -> None:
        add_routes(app, lambda: open_service(tmp_path / "calls", [BASE], entry=entry))

    limits = {"no_token": False, "rate": 1e6, "burst": 10**6}
    async with serving(index_url, tmp_path, extend=extend, **limits, **settings) as client:
        yield client


@pytest.fixture
async def client(index_url: str, tmp_path: Path) -> AsyncGenerator[Client, None]:
    async with training_calls(index_url, tmp_path) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture
async def trained(client: Client) -> tuple[User, str]:
    """A user, and a model of some steps."""
    user = await User.of(client, "ann")
    model = await user.model(lora_config={"rank": 8}, user_metadata={"what": HOSTILE})
    await train(user, model, range(STEPS))
    return user, model


async def train(user: User, model: str, steps: range) -> None:
    """Make steps, each on a sequence that was sampled with the model as it was at the first one."""
    number = steps[0]
    saved = await user.post(
        "save_weights_for_sampler",
        model_id=model,
        seq_id=3 * number + 1,
        sampling_session_seq_id=number,
    )
    sampler = (await user.result(saved))["sampling_session_id"]
    for step in steps:
        asked = await user.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=step,
            prompt={"chunks": [{"tokens": [1]}]},
            sampling_params={"max_tokens": 2},
        )
        await user.result(asked)
        origin = {"sequence_id": asked["sample_sequence_ids"][0], "offset": 0, "length": 2}
        span = MESSAGES["Span"](sampled_tokens=origin).SerializeToString()
        row = datum([text(1, 2, 3)], [span], target_tokens=tensor([2, 3, 4], INT64))
        message = MESSAGES["ForwardBackwardRequest"].FromString(body(row, row))
        message.model_id = model
        message.seq_id = 3 * step + 2
        await user.train(message.SerializeToString())
        await user.result(await user.post("optim_step", model_id=model, seq_id=3 * step + 3))
        if step + 1 < steps.stop:
            saved = await user.post(
                "save_weights", model_id=model, seq_id=3 * step + 4, path=f"after-{step}"
            )
            await user.result(saved)


def sign_in(browser: Browser, client: Client, user: User) -> str:
    """Sign in by the key of a client, as a person does. Returns the address of the page."""
    url = str(client.make_url("/"))
    browser.open(url)
    browser.js("sessionStorage.clear(); localStorage.clear()")
    browser.open(url)
    browser.type("Token", user.headers["X-API-Key"])
    browser.click("Sign in")
    return url


async def test_models_are_the_first_page_and_one_is_followed_while_it_trains(
    browser: Browser, client: Client, trained: tuple[User, str]
) -> None:
    user, model = trained

    def enter() -> None:
        browser.shape()
        browser.complaints()
        sign_in(browser, client, user)
        browser.until(f"{ROWS}.length")
        (row,) = browser.js(ROWS)
        words = row.split("\t")
        assert words[0] == model
        assert words[2:6] == ["base", "adapter of rank 8", str(STEPS), "0"]
        browser.until("return document.querySelector('#connection').innerText === 'Live'")
        browser.js("document.querySelector('.models a').focus()")
        browser.keys(Keys.ENTER)
        browser.until(PLOTS)
        assert f"Steps {STEPS}" in browser.js(TILES)

    await asyncio.to_thread(enter)
    await train(user, model, range(STEPS, 2 * STEPS))

    def follow() -> None:
        browser.until(f"{TILES}.includes('Steps {2 * STEPS}')")
        assert browser.js(TITLES) == [
            *("Loss", "Tokens", "Gradient norm", "Learning rate", "Staleness"),
            *("Sampled by the newest weights", "Queue", "Seconds per step"),
        ]
        last = f"at step {2 * STEPS}: "
        assert f"{last}max {STEPS - 1} (from 0 to {STEPS - 1} so far)" in browser.js(
            SAYS, "staleness"
        )
        assert f"{last}in passes 6 (from 6 to 6 so far), of the loss 6" in browser.js(
            SAYS, "tokens"
        )
        assert f"{last}share of tokens 0 (from 0 to 1 so far)" in browser.js(
            SAYS, "sampled-by-the-newest-weights"
        )
        assert f"{last}learning rate 0.0001 " in browser.js(SAYS, "learning-rate")
        browser.js("document.querySelector('.plot').focus()")
        browser.keys(Keys.HOME)
        assert browser.text(".chart .at") == "step 1"
        assert HOSTILE in browser.text(".run-head .id")
        assert browser.js("return window.broken ?? 0") == 0
        browser.click("All models")
        browser.until(f"{ROWS}.length")
        assert browser.complaints() == []

    await asyncio.to_thread(follow)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
async def test_nothing_keeps_anybody_out_of_the_models(
    browser: Browser, client: Client, trained: tuple[User, str], width: int, scheme: str
) -> None:
    user, model = trained

    def look() -> None:
        browser.shape(width, 900, scheme=scheme)
        sign_in(browser, client, user)
        browser.until(f"{ROWS}.length")
        for page, shown in (("models", f"{ROWS}.length"), (f"models/{model}", PLOTS)):
            browser.js("location.hash = arguments[0]", f"#/{page}")
            browser.until(shown)
            assert browser.axe() == []
            assert browser.overflow() <= 0
            ends = "return document.querySelector('.bar-links').getBoundingClientRect().right"
            assert browser.js(ends) <= width
            if folder := os.environ.get("ASYNCDOCK_SHOTS"):
                name = f"{page[:7].replace('/', '-')}-{width}-{scheme}.png"
                (Path(folder) / name).write_bytes(browser.picture())

    await asyncio.to_thread(look)


async def test_another_token_sees_none_of_it(
    browser: Browser, client: Client, trained: tuple[User, str]
) -> None:
    _, model = trained
    stranger = await User.of(client, "bob")

    def look() -> None:
        browser.shape()
        url = sign_in(browser, client, stranger)
        browser.until("return document.querySelector('main').innerText.includes('No model yet')")
        browser.open(f"{url}#/models/{model}")
        browser.until("return document.querySelector('main').innerText.includes('is not there')")

    await asyncio.to_thread(look)


async def test_a_server_that_executes_no_runs_shows_models_alone(
    browser: Browser, index_url: str, tmp_path: Path
) -> None:
    async with training_calls(index_url, tmp_path, runs_of="none") as client:
        user = await User.of(client, "ann")
        refused = await problem(
            await user.ask("POST", "/v1/runs", json={"recipe_name": "mock"}), 403
        )
        assert "asyncdock serve" in refused["fix"]

        def look() -> None:
            browser.shape()
            url = sign_in(browser, client, user)
            browser.until(
                "return document.querySelector('main').innerText.includes('No model yet')"
            )
            for control in ("#new-run", ".runs"):
                shown = f"return document.querySelector('{control}').checkVisibility()"
                assert not browser.js(shown), control
            browser.open(f"{url}#/")
            browser.until("return location.hash === '#/models'")
            assert browser.axe() == []

        await asyncio.to_thread(look)
