"""Debian's Chromium without a screen, driven by selenium as a person would: by what is seen, and by
keys."""

from __future__ import annotations

import base64
import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import JavascriptException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
WITHOUT = "Chromium is not installed: apt-get install chromium chromium-driver"
AXE = Path(__file__).parent / "vendor" / "axe.min.js.gz"  # axe-core 4.14.1, MPL-2.0 (axe.LICENSE)
SECONDS = 90.0  # for which a condition is waited for: a machine may be busy
LOOK_SECONDS = 0.05  # between two looks at it

# What a person would call a control: its label, or its text.
NAMED = """
const [name, role] = arguments;
const text = (node) => (node.getAttribute("aria-label") || node.innerText || "").replace(/\\s+/g, " ").trim();
const seen = (node) => node.checkVisibility() && !node.disabled;
if (role === "field") {
  for (const label of document.querySelectorAll("label")) {
    if (label.innerText.split("\\n")[0].trim() === name && label.control && seen(label.control)) return label.control;
  }
  return null;
}
for (const node of document.querySelectorAll("button, a, summary, [role=tab]")) {
  if (text(node) === name && seen(node)) return node;
}
return null;
"""


class Browser:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    # ── how it looks ──

    def shape(
        self, width: int = 1280, height: int = 900, *, scheme: str = "light", sharp: float = 1
    ) -> None:
        """A window of this size in CSS pixels; narrow ones are phones. ``scheme``: light or
        dark."""
        screen = {
            "width": width,
            "height": height,
            "deviceScaleFactor": sharp,
            "mobile": width < 500,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def picture(self) -> bytes:
        """Return a picture of the page, as PNG."""
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        return base64.b64decode(shot["data"])

    # ── what a person does ──

    def open(self, url: str) -> None:
        self.driver.get("about:blank")
        self.driver.get(url)

    def enter(self, url: str, token: str) -> None:
        """Open ``url`` as one who has given ``token`` in this tab."""
        self.open(url)
        self.js(
            "sessionStorage.clear(); sessionStorage.setItem('asyncdock.token', arguments[0])", token
        )
        self.open(url)

    def named(self, name: str, role: str = "control") -> WebElement:
        """The control called so, once it can be used."""
        control = self.until(NAMED, name, role, why=f"a {role} called {name!r}")
        assert isinstance(control, WebElement)
        return control

    def click(self, name: str) -> None:
        """Click what is called so. The page may create it again while it is looked for."""
        for _ in range(5):
            try:
                control = self.named(name)
                # not beneath the page's own bar
                self.js("arguments[0].scrollIntoView({block: 'center'})", control)
                return control.click()
            except StaleElementReferenceException:
                continue
        raise AssertionError(f"{name!r} does not keep still")

    def type(self, label: str, text: str) -> None:
        field = self.named(label, "field")
        field.clear()
        field.send_keys(text)

    def keys(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        chain = webdriver.ActionChains(self.driver)
        for key in keys:
            chain.send_keys(key)
        chain.perform()

    # ── what is there ──

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def asynchronous(self, script: str, *arguments: Any) -> Any:
        """``script`` as the body of an async function. What it throws is raised."""
        wrapped = (
            "const done = arguments[arguments.length - 1];"
            f"(async (...arguments_) => {{ {script} }})(...[...arguments].slice(0, -1))"
            ".then((value) => done({value}), (error) => done({error: String(error?.stack ?? "
            "error)}));"
        )
        answer = self.driver.execute_async_script(wrapped, *arguments)
        assert "error" not in answer, answer["error"]
        return answer.get("value")

    def until(self, script: str, *arguments: Any, why: str = "", seconds: float = SECONDS) -> Any:
        """Return the result of ``script``, once it has one.

        It may ask of what is not there yet: that is not yet, too.
        """
        end = time.monotonic() + seconds
        message = ""
        while time.monotonic() < end:
            try:
                if result := self.js(script, *arguments):
                    return result
                message = ""
            except JavascriptException as error:
                message = f" ({error.msg})"
            time.sleep(LOOK_SECONDS)
        shown = self.js("return document.body ? document.body.innerText : ''")
        raise AssertionError(
            f"not within {seconds:g} s: {why or script}{message}\n\nthe page says:\n{shown[:3000]}"
        )

    def text(self, selector: str) -> str:
        return str(
            self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def focused(self) -> dict[str, Any]:
        """Of what has the focus: its name, and whether one sees that."""
        return self.js(
            "const at = document.activeElement;const labels = [...(at.labels ?? [])].map((label) "
            "=> label.innerText).join(' ');const name = at.getAttribute('aria-label') || labels || "
            "at.innerText || at.id || at.tagName;const drawn = at.matches('.segments input') ? "
            "at.nextElementSibling : at;const style = getComputedStyle(drawn);const seen = "
            "style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1;return {name: "
            "name.replace(/\\s+/g, ' ').trim(), tag: at.tagName, id: at.id, seen};"
        )

    def complaints(self) -> list[str]:
        """Errors that the page has logged since it was asked last, breaches of its security policy
        among them. What the network answered is left out."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE" and entry["source"] != "network"
        ]

    def axe(self, part: str = "html") -> list[str]:
        """Return the faults that axe-core finds in a part of the page for people who use it
        otherwise than by looking and pointing."""
        # The page's own policy forbids every other script; this one comes in by the debugger's
        # door.
        if not self.js("return 'axe' in window"):
            source = gzip.decompress(AXE.read_bytes()).decode()
            self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": f"{source}\n;0"})
        violations = self.asynchronous(
            "const {violations} = await axe.run(arguments_[0], {resultTypes: ['violations'], "
            "runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', "
            "'best-practice']});return violations.map((one) => `${one.id}: ${one.help}: ` + "
            "one.nodes.slice(0, 5).map((node) => `${node.html.slice(0, 160)} "
            "${node.failureSummary}`).join(' | '));",
            part,
        )
        return list(violations)

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return int(self.js("return document.documentElement.scrollWidth - window.innerWidth"))


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of one's own, without a past."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    with tempfile.TemporaryDirectory(prefix="adk-chromium-") as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
        for argument in (
            "--headless=new",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--disable-background-networking",
            f"--user-data-dir={profile}",
            *root,
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        try:
            driver.set_script_timeout(SECONDS)
            browser = Browser(driver)
            browser.shape()
            yield browser
        finally:
            driver.quit()
