"""schemathesis against a real server, all checks, with a small count; ``benchmarks/fuzz_api.py`` has the large one."""

from __future__ import annotations

from benchmarks.fuzz_api import FUZZED, Found, Served, fuzz


def test_the_api_keeps_to_its_document_whatever_it_is_sent() -> None:
    found = Found()
    with Served(*FUZZED) as (url, token):
        fuzz(url, token, found, seed=1, examples=1, seconds=270.0)
    assert not found.failures, "\n".join(found.said)
    assert found.operations >= 17
    assert found.requests > 500
