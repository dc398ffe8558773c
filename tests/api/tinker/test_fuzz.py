"""A server under messages that no client should send, with a small count;
``benchmarks/service/tinker_fuzz.py`` has the large one."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.service.tinker_fuzz import Outcome, fuzz, judge, judge_result
from benchmarks.service.tinker_messages import OPERATIONS, Message, Messages, Things

OWN = Things("mine", "mine:train:0", "mine:sample:0", "r", "q", "tinker://mine/weights/x", "x")
OTHER = Things(*["theirs"] * 7)


@pytest.mark.timeout(600)
async def test_messages_that_no_client_sends_harm_nobody() -> None:
    with TemporaryDirectory(prefix="adk-") as folder:  # short: it has a Unix socket's path
        outcome = await fuzz(Path(folder), 500, seed=1, connections=2, steps=4)
    assert not outcome.faults, "\n".join(outcome.shown)
    assert outcome.messages >= 500
    assert outcome.statuses["200"] > 20
    assert outcome.statuses["422"] > 20


def test_every_operation_is_sent_each_kind_of_message() -> None:
    messages = Messages(random.Random(1), [OTHER], "/outside")
    sent = [messages.message(OWN, 4) for _ in range(20_000)]
    assert {message.operation.path for message in sent} == {each.path for each in OPERATIONS}
    stolen = [message for message in sent if message.is_stolen]
    assert all("theirs" in f"{each.path} {each.body!r}" for each in stolen)
    assert len(stolen) > 1000


@pytest.mark.parametrize(
    ("fault", "status", "content"),
    [
        ("an error of the server", 500, b'{"detail": "body"}'),
        ("what another tenant wrote", 200, b'{"name": "SECRET"}'),
        ("another tenant's thing", 200, b"{}"),
        ("names no field", 422, b'{"detail": "It is wrong."}'),
        ("no problem", 400, b"Bad Request"),
    ],
)
def test_a_server_that_does_harm_is_found_out(fault: str, status: int, content: bytes) -> None:
    outcome = Outcome()
    message = Message(OPERATIONS[0], "/", {}, None, "none", is_stolen=True)
    judge(outcome, message, status, "application/json", content, ["SECRET"])
    assert fault in outcome.faults
    assert outcome.shown


@pytest.mark.parametrize(
    ("fault", "content"),
    [
        ("a failure of the server", b'{"error": "data: x", "category": "server"}'),
        ("names no field", b'{"error": "no", "category": "user"}'),
        ("what another tenant wrote", b'{"error": "SECRET, path", "category": "user"}'),
        ("another tenant's thing", b'{"model_id": "theirs"}'),
    ],
)
def test_an_answer_that_does_harm_is_found_out(fault: str, content: bytes) -> None:
    outcome = Outcome()
    judge_result(outcome, "r", 200, "application/json", content, ["SECRET"], is_stolen=True)
    assert dict(outcome.faults) == {fault: 1}
