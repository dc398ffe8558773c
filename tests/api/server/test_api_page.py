"""docs/service.md: every path that it names is one of the API's.

Its commands are executed with its page.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.robustness.api_fuzz import ROOT

PAGE = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")


def test_every_path_that_the_page_names_is_there(tmp_path: Path) -> None:
    from api.server.app import ROUTES
    from api.server.service.operations import operations_of

    known = {re.sub(r"\{[^}]*\}", "{}", o.path) for o in operations_of(ROUTES)}
    for path in re.findall(r"127\.0\.0\.1:8765(/[^\s\"'`?]*)", PAGE):
        template = re.sub(
            r"\$RUN|recipes/mock", lambda m: "{}" if m[0] == "$RUN" else "recipes/{}", path
        )
        assert template in known, path
