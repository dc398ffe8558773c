"""Texts stay where there is room for them: long names and large numbers, at both widths and in both
colours."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.browser import CHROMIUM, DRIVER, WITHOUT, Browser, chromium
from tests.api.site import Site, site

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=WITHOUT),
    pytest.mark.timeout(240),
]

NAME = "a-run-with-a-name-of-63-letters-without-any-room-to-break-it-ab"
SHORT = {"name": NAME, "train.steps": 12, "rollout.max_tokens": 8, "train.mock.step_seconds": 0.1}
# What the page reads of a run, as a large one would have it; and the boxes of what is written on
# canvases.
LARGE = """
const { Progress } = await import("/dashboard/progress.js");
const it = Progress.prototype;
const getter = (name) => Object.getOwnPropertyDescriptor(it, name).get;
const [last, stages] = [getter("last"), getter("stages")];
Object.defineProperty(it, "last", { get() {
  const step = last.call(this);
  return step && { ...step, step: 159_999, reward_mean: -123456.789, reward_std: 98765.43, tokens_generated: 153.4e9,
    staleness_mean: 1023.97, staleness_max: 1024, kl_behaviour: 1.2345e-7, ess: 0.9876 };
} });
Object.defineProperty(it, "stages", { get() {
  const found = stages.call(this);
  for (const stage of found.values()) {
    stage.workers = Array(128).fill(stage.workers[0]);
    const shares = { busy: 0.34, waiting_input: 0.33, waiting_room: 0.33, other: 0 };
    Object.assign(stage, { rows: 1_234_567.8, queue: 123_456_789, shares });
  }
  return found;
} });
Object.defineProperty(it, "bound", { get: () => 1024 });
Object.defineProperty(it, "total", { get: () => 200_000 });
Object.defineProperty(it, "elapsed", { get: () => 1_234_567 });
const { rate, columns, sync } = it;
it.rate = function (name) { return rate.call(this, name) && 2003e6; };
it.sync = function (data) {
  sync.call(this, { ...data, version: 159_998, exposed_seconds: 123.456, hidden_seconds: 1234.56 });
};
it.columns = function () {
  const found = columns.call(this);
  const large = (values) => values.map((value, at) => (value === null ? null : (value || 1) * -1234.567 * (at + 1)));
  // The last step is a place for a label of the axis, at the edge.
  const many = found.step.length;
  const step = found.step.map((_, at) => Math.round((200_000 * (at + 1)) / many));
  const of = (numbers) => (name) => large(found[numbers](name));
  return { step, get: of("get"), speed: of("speed"), grown: of("grown") };
};
const fill = CanvasRenderingContext2D.prototype.fillText;
window.written = [];
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most = Infinity) {
  fill.call(this, text, x, y, ...(most === Infinity ? [] : [most]));
  const { actualBoundingBoxLeft: left, actualBoundingBoxRight: right, width } = this.measureText(text);
  const { a, e } = this.getTransform();
  const narrow = Math.min(1, most / width);
  const [from, to] = [e + a * (x - left * narrow), e + a * (x + right * narrow)];
  window.written.push({ text: String(text), from, to, width: this.canvas.width, at: this.canvas.className || "chart" });
};
"""
# Texts that reach out of a box around them, unless a box between lets them be scrolled to, or
# shortens them.
OUTSIDE = """
const outside = [];
const shown = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (shown.nextNode()) {
  const text = shown.currentNode;
  const parent = text.parentElement;
  if (!text.data.trim() || !parent.checkVisibility() || parent.closest("svg, .hidden, .skip")) continue;
  const range = document.createRange();
  range.selectNodeContents(text);
  const { left, right } = range.getBoundingClientRect();
  for (let box = parent; box && box !== document.body; box = box.parentElement) {
    if (getComputedStyle(box).display === "inline") continue;
    if (getComputedStyle(box).overflowX !== "visible") break;
    const around = box.getBoundingClientRect();
    if (left >= around.left - 1 && right <= around.right + 1) continue;
    outside.push(`${text.data} (${box.className || box.tagName})`);
    break;
  }
}
for (const node of document.querySelectorAll(".picture .node, .picture .pill")) {
  const around = node.querySelector("rect").getBoundingClientRect();
  const texts = [...node.querySelectorAll("text")].filter((one) => one.textContent && !(one.textContent === "waiting"));
  const boxes = texts.map((one) => one.getBoundingClientRect());
  boxes.forEach((one, at) => {
    if (one.left < around.left || one.right > around.right + 0.5) outside.push(`${texts[at].textContent} (picture)`);
    const beside = (two) => two.left >= one.right - 0.5 || one.left >= two.right - 0.5;
    const below = (two) => two.top >= one.bottom - 4 || one.top >= two.bottom - 4;
    const other = boxes.findIndex((two, which) => which < at && !beside(two) && !below(two));
    if (other >= 0) outside.push(`${texts[other].textContent} over ${texts[at].textContent} (picture)`);
  });
}
return outside;
"""
CUT = "return window.written.filter((one) => one.from < -1 || one.to > one.width + 1)"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("service")) as started:
        yield started


@pytest.fixture(scope="module")
def run(served: Site) -> str:
    return served.finished(SHORT)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1920, 1280, 800, 390])
def test_no_text_leaves_its_box(
    browser: Browser, served: Site, run: str, width: int, scheme: str
) -> None:
    browser.shape(width, 1500, scheme=scheme)
    browser.enter(served.url, served.own_token)
    browser.asynchronous(LARGE)
    browser.js("location.hash = arguments[0]", f"#/runs/{run}")
    browser.until("return document.querySelectorAll('.plot canvas').length >= 7")
    browser.until(
        "return window.written.some((one) => one.text === '200,000')",
        why="the last step has a label",
        seconds=40,
    )
    browser.until("return document.querySelector('.tiles').innerText.includes('2.00G')")
    browser.until("return document.querySelector('.picture').textContent.includes('1.23M rows/s')")
    if folder := os.environ.get("ASYNCDOCK_SHOTS"):
        (Path(folder) / f"{width}-{scheme}.png").write_bytes(browser.picture())
    outside: list[str] = browser.js(OUTSIDE)
    assert outside == []
    cut: list[dict[str, Any]] = browser.js(CUT)
    assert cut == [], json.dumps(cut)
    assert browser.overflow() <= 0
    browser.complaints()
