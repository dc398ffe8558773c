"""docs/api.md: its commands are run, in their order, against a server; they print what it shows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from benchmarks.fuzz_api import ROOT, Served

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    with Served("--rate", "1000") as (url, _):
        script = "set -e\n" + "".join(blocks).replace("http://127.0.0.1:8765", url)
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^```text\n(rollout\.temperature.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert done.stdout.endswith(shown[0])
    assert '"groups_in_flight":8' in done.stdout


def test_every_path_that_the_page_names_is_there(tmp_path: Path) -> None:
    from api.server.app import ROUTES
    from api.server.operations import operations_of

    known = {re.sub(r"\{[^}]*\}", "{}", o.path) for o in operations_of(ROUTES)}
    for path in re.findall(r"127\.0\.0\.1:8765(/[^\s\"'`?]*)", PAGE):
        template = re.sub(r"\$RUN|recipes/mock", lambda m: "{}" if m[0] == "$RUN" else "recipes/{}", path)
        assert template in known, path
