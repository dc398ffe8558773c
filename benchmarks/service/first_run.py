"""A new user's path, timed: from `git clone` to a run started over REST with curl, watched, and
finished.

    clone ─▶ environment ─▶ asyncdock serve ─▶ curl POST /v1/runs ─▶ curl …/metrics/stream ─▶ finished
                                └─ the dashboard in a browser, where Chromium and selenium are there (--browser)

    python -m benchmarks.service.first_run [REPOSITORY] [--browser] [--recipe mock]

Needs git, curl and Python >= 3.11, and a package index for pip; pip's cache is not used. Nothing is
taken from this checkout but, when no REPOSITORY is given, its commits. Everything is made in a new
folder and removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
SECONDS = 120.0  # for anything that is waited for


class Walk:
    """The steps, each with its command as a person types it and the seconds that it took."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str, float]] = []

    @contextmanager
    def step(self, what: str, typed: str) -> Iterator[None]:
        print(f"$ {typed}", flush=True)
        began = time.perf_counter()
        yield
        self.steps.append((what, typed, time.perf_counter() - began))
        print(f"  {what}: {self.steps[-1][2]:.1f} s", flush=True)

    def table(self) -> str:
        lines = ["| step | typed | seconds |", "|---|---|---|"]
        lines += [f"| {what} | `{typed}` | {seconds:.1f} |" for what, typed, seconds in self.steps]
        return "\n".join(
            [*lines, f"| **all of it** | | **{sum(seconds for *_, seconds in self.steps):.1f}** |"]
        )


def curl(header: Path, *arguments: str) -> str:
    command = [
        "curl",
        "--silent",
        "--show-error",
        "--fail-with-body",
        "--header",
        f"@{header}",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        sys.exit(f"curl {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def line_of(process: subprocess.Popen[str], begins: str) -> str:
    """The next line of ``process`` that begins so."""
    assert process.stdout is not None
    deadline = time.monotonic() + SECONDS
    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = process.stdout.readline()
        if line.startswith(begins):
            return line.strip()
        if not line:
            break
    sys.exit(f"{process.args!r} did not say {begins!r} within {SECONDS:.0f} s")


@contextmanager
def served(bin_: Path, folder: Path, walk: Walk) -> Iterator[str]:
    """``asyncdock serve`` until the end of the block; its URL."""
    command = [str(bin_ / "asyncdock"), "serve", "--data", "my-service", "--listen", "127.0.0.1:0"]
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            with walk.step("the service is up", "asyncdock serve --data my-service"):
                url = line_of(server, "AsyncDock serves").split()[-1]
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(SECONDS)


def watched_with_curl(header: Path, url: str, run: str, walk: Walk) -> list[str]:
    """The names of the events until the run's end, as curl prints them."""
    path = f"/v1/runs/{run}/metrics/stream"
    command = ["curl", "--silent", "--no-buffer", "--header", f"@{header}", f"{url}{path}"]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout is not None
        with walk.step(
            "its first optimizer step is seen", f"curl -N $URL{path} -H @my-service/authorization"
        ):
            line_of(reader, "event: step")
        kinds = ["step"]
        with walk.step("the run has ended", "(the same)"):
            for line in reader.stdout:
                if line.startswith("event: "):
                    kinds.append(line.removeprefix("event: ").strip())
        reader.wait(SECONDS)
        return kinds
    finally:
        reader.kill()
        reader.wait()


def seen_in_a_browser(bin_: Path, url: str, run: str, walk: Walk) -> None:
    """The dashboard shows the run's name."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or sys.exit(
        "--browser needs Chromium: apt install chromium"
    )
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        with walk.step(
            "the dashboard shows it", "asyncdock link, and open what it prints in a browser"
        ):
            link = subprocess.run(
                [bin_ / "asyncdock", "link", "--server", url],
                capture_output=True,
                text=True,
                check=True,
            )
            driver.get(link.stdout.strip())
            WebDriverWait(driver, SECONDS).until(
                lambda page: (
                    run in page.page_source
                    and "running" in page.find_element("tag name", "body").text
                )
            )
    finally:
        driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "repository", nargs="?", default=str(HERE), help="what git clones; default: this checkout"
    )
    parser.add_argument("--recipe", default="mock")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--browser", action="store_true", help="also open the dashboard (chromium, selenium)"
    )
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    walk = Walk()
    folder = Path(tempfile.mkdtemp(prefix="first-run-"))
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    os.environ.clear()
    os.environ.update(clean)
    try:
        with walk.step("cloned", "git clone URL asyncdock && cd asyncdock"):
            clone = folder / "asyncdock"
            subprocess.run(["git", "clone", "--quiet", options.repository, str(clone)], check=True)
        bin_ = clone / ".venv" / "bin"
        with walk.step("an environment", "python3 -m venv .venv"):
            subprocess.run([options.python, "-m", "venv", str(clone / ".venv")], check=True)
        with walk.step("installed", ".venv/bin/pip install -e ."):
            pip = [
                str(bin_ / "pip"),
                "install",
                "--quiet",
                "--no-cache-dir",
                "--disable-pip-version-check",
                "-e",
                ".",
            ]
            subprocess.run(pip, cwd=clone, check=True)
        with served(bin_, clone, walk) as url:
            body = json.dumps(
                {"recipe_name": options.recipe, "overrides": {"train.steps": options.steps}}
            )
            header = clone / "my-service" / "authorization"
            typed = f"curl $URL/v1/runs -H @my-service/authorization --json '{body}'"
            with walk.step("the run is submitted", typed):
                run = json.loads(curl(header, "--json", body, f"{url}/v1/runs"))
            if options.browser:
                seen_in_a_browser(bin_, url, run["id"], walk)
            kinds = watched_with_curl(header, url, run["id"], walk)
            with walk.step(
                "it is asked how it went",
                f"curl $URL/v1/runs/{run['id']} -H @my-service/authorization",
            ):
                ended = json.loads(curl(header, f"{url}/v1/runs/{run['id']}"))
        if ended["state"] != "finished" or kinds[-1] != "end":
            sys.exit(
                f"the run is {ended['state']} ({ended['reason']}), and its stream ended with "
                f"{kinds[-1]!r}"
            )
        print(f"\n{walk.table()}\n")
        installed = sum(
            file.stat().st_size
            for file in clone.rglob("*")
            if file.is_file() and not file.is_symlink()
        )
        print(
            f"{ended['steps_done']} steps, {len(kinds)} events read; the folder holds "
            f"{installed / 2**20:,.0f} MiB"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
