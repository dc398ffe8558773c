"""The pictures of the dashboard in the documentation, taken of a real run: ``python -m
tests.api.screenshots [FOLDER]``.

Needs Chromium and its driver. Starts a service of its own and a run of the recipe ``tiny`` in it,
with another one that waits, and looks.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.api.browser import CHROMIUM, DRIVER, WITHOUT, Browser, chromium
from tests.api.site import site

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
# With a KL term, so that there is a reference stage; slower to learn than the recipe, so that there
# is something to see.
LEARNS = {
    "name": "letters",
    "train.steps": 160,
    "train.learning_rate": 1e-3,
    "algorithm.options": {"kl_coef": 0.001},
    "evaluate.every": 10,
}
STEPS = 110  # after which it is looked at
SHOTS = (  # name, width, height, pixels for one of CSS, colour scheme
    ("dashboard-light", 1280, 1500, 1.0, "light"),
    ("dashboard-dark", 1280, 1500, 1.0, "dark"),
    ("dashboard-phone", 390, 844, 2.0, "light"),
)


def take(browser: Browser, url: str, token: str, folder: Path) -> None:
    """All pictures of the run at ``url``."""
    for name, width, height, sharp, scheme in SHOTS:
        browser.shape(width, height, scheme=scheme, sharp=sharp)
        browser.enter(url, token)
        browser.until("return document.querySelectorAll('.plot canvas').length >= 7")
        browser.until(
            f"return Number(document.querySelector('.track[role]').ariaValueNow) >= {STEPS}",
            seconds=400,
        )
        browser.until(
            "return /Other stages worked/.test(document.querySelector('#timeline-says').innerText)"
        )
        browser.until(
            "return performance.getEntriesByType('resource').some((one) => "
            "/metrics[?]/.test(one.name))"
        )
        path = folder / f"{name}.png"
        # 256 colours are enough for a page of flat ones, and a third of the bytes.
        picture = Image.open(io.BytesIO(browser.picture())).convert("RGB")
        picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            path, optimize=True
        )
        print(f"{path} {path.stat().st_size / 1024:.0f} KiB")


def main(folder: Path) -> None:
    if not (CHROMIUM and DRIVER):
        sys.exit(WITHOUT)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="adk-site-") as data,
        site(Path(data)) as served,
        chromium() as browser,
    ):
        served.finished({"name": "warm-up", "train.steps": 10})
        run = served.submit(LEARNS, recipe="tiny")
        served.submit({"name": "next-one"})
        take(browser, f"{served.url}#/runs/{run}", served.own_token, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
