"""Programs outside of a run that mean no good, over HTTP: what they send fails themselves, and
never the run."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import save

from api.external.codec import to_body
from api.server.access.tokens import Tokens
from orchestration.workers.engines import train_engine
from pipeline.index.client import Index
from tests.api.external.test_external import BINARY, EXTERNAL, GET, OWNER, Going, going, put_body
from tests.api.serving import bearer, problem
from tests.orchestration.external.test_session import responses
from tests.orchestration.run.test_run import assert_each_sample_once
from tests.orchestration.runs import MOCK, TINY, recipe

TRAINER: dict[str, Any] = {**TINY, "external": {"stages": ["update"]}}


async def two_bearers(url: str) -> tuple[dict[str, str], dict[str, str]]:
    tokens = Tokens(url)
    # of one user: others get 403 for all of it
    made = [(await tokens.create(OWNER, "run"))[1] for _ in range(2)]
    await tokens.close()
    return bearer(made[0]), bearer(made[1])


@asynccontextmanager
async def index_of(run: Going) -> AsyncGenerator[Index, None]:
    index = Index(run.url, run.id)
    try:
        yield index
    finally:
        await index.close()


async def leases(run: Going) -> dict[str, Any]:
    """What bearers hold and until when, and what was delivered again."""
    async with index_of(run) as index:
        held = [
            lease
            for lease in (await index.stats())["leases"]
            if lease["worker"].startswith("external-")
        ]
        return {"leases": held, "redelivered": (await index.ledger())["redelivered"]}


async def assert_refused(run: Going, token: str, rows: list[int], headers: dict[str, str]) -> None:
    """No call for the lease ``token`` does anything for the bearer of ``headers``."""
    columns = {
        "response_ids": [[5, 6]] * len(rows),
        "rollout_logprobs": [[-1.0, -0.5]] * len(rows),
        "versions": [[0, 2]] * len(rows),
        "truncated": [False] * len(rows),
    }
    begun = {name: values for name, values in columns.items() if name != "truncated"}
    status = 409 if re.fullmatch("[0-9a-f]{32}", token) else 422
    for put in (
        put_body(token, rows, columns),
        put_body(token, rows, begun, park=True),
        put_body(token, step=1),
    ):
        await run.refused(
            status, "POST", "experience", data=put["data"], headers={**put["headers"], **headers}
        )
    path = f"leases/{token}"
    await run.refused(
        409 if status == 409 else 400, "POST", f"{path}/renew?lease=3600", headers=headers
    )
    release = await run.client.post(f"{run.at}/{path}/release", headers=headers)
    assert release.status in (204, 400, 409)


async def test_a_foreign_bearer_can_do_nothing_with_a_lease(index_url: str, tmp_path: Path) -> None:
    """Tokens were 1, 2, 3, and asked neither for owner nor for stage: a foreign bearer renewed
    leases of the run's own workers, had their rows delivered again, and committed into what another
    one had claimed."""
    owner, foreigner = await two_bearers(index_url)
    async with going(index_url, tmp_path, recipe(EXTERNAL, train__steps=2)) as run:
        got = await run.ask("POST", "experience/get", json=GET, headers=owner)
        rows = [row["id"] for row in got["rows"]]
        before = await leases(run)
        assert before["leases"]
        for token in (
            got["token"],
            *(str(n) for n in range(8)),
            "0" * 32,
            got["token"][:-1],
            got["token"].upper(),
        ):
            await assert_refused(run, token, rows, foreigner)
        # who needs no token on loopback is not the owner either
        await assert_refused(run, got["token"], rows, {})
        assert await leases(run) == before
        notify = {"worker": "test", "version": 0}
        await run.ask("POST", "weights/notify", json=notify, headers=foreigner)
        details = await run.refused(
            422, "POST", "experience/get", json={**GET, "version": None}, headers=owner
        )
        assert details["field"] == "version", "the loaded version belongs to another bearer"
        renewed = await run.ask("POST", f"leases/{got['token']}/renew?lease=60", headers=owner)
        assert renewed["token"] == got["token"]
        columns = to_body(
            json.dumps({"token": got["token"], "rows": rows}), responses(len(rows), 0)
        )
        put = {"data": columns, "headers": {**owner, "Content-Type": BINARY}}
        assert (await run.ask("POST", "experience", **put))["left"] == 0


async def test_leases_of_the_runs_own_workers_are_not_for_bearers(
    index_url: str, tmp_path: Path
) -> None:
    """Not even with the token itself, read from the index."""
    _, foreigner = await two_bearers(index_url)
    slow = {"time_scale": 0.5}
    of = recipe({**MOCK, "external": {"stages": ["reward"]}}, rollout__mock=slow, train__steps=50)
    async with going(index_url, tmp_path, of) as run, index_of(run) as index:
        async with asyncio.timeout(30):
            while not (held := await index._redis.hkeys(f"{index.prefix}leases")):
                await index.events(timeout=0.05)
        for token in held:
            await assert_refused(run, token.decode(), [0], foreigner)
        assert (await index.ledger())["redelivered"] == 0


WRONG: dict[str, tuple[Any, str]] = {
    "a logprob that overflows every ratio": (
        {"rollout_logprobs": [[-1e38, -0.5]] * 4},
        "columns.rollout_logprobs",
    ),
    "a logprob that float32 cannot have drawn": (
        {"rollout_logprobs": [[-0.5, -105]] * 4},
        "columns.rollout_logprobs",
    ),
    "a logprob of more than certainty": (
        {"rollout_logprobs": [[0.5, -0.5]] * 4},
        "columns.rollout_logprobs",
    ),
    "a logprob that is not a number": (
        {"rollout_logprobs": [[math.nan, -0.5]] * 4},
        "columns.rollout_logprobs",
    ),
    "a logprob past float32": (
        {"rollout_logprobs": [[-math.inf, -0.5]] * 4},
        "columns.rollout_logprobs",
    ),
    "a logprob too few": ({"rollout_logprobs": [[-0.5]] * 4}, "columns.rollout_logprobs"),
    "a negative token": ({"response_ids": [[5, -1]] * 4}, "columns.response_ids"),
    "a token past the vocabulary": ({"response_ids": [[5, 49]] * 4}, "columns.response_ids"),
    "a version to come": ({"versions": [[1, 2]] * 4}, "columns.versions"),
    "a negative version": ({"versions": [[-1, 2]] * 4}, "columns.versions"),
    "counts that wrap around": (
        {"versions": [[0, 2**62, 0, 2**62, 0, 2**62, 0, 2**62 + 2]] * 4},
        "columns.versions",
    ),
    "a mask of numbers": ({"truncated": [1] * 4}, "columns.truncated"),
}
RIGHT: dict[str, Any] = {
    "response_ids": [[5, 6]] * 4,
    "rollout_logprobs": [[-1, -0.5]] * 4,
    "versions": [[0, 2]] * 4,
    "truncated": [False] * 4,
}


def with_bytes_of_flags(columns: dict[str, Any], byte: int) -> bytes:
    """A body whose column `truncated` has a byte that no bool has."""
    body = bytearray(
        to_body(
            columns["control"],
            {name: value for name, value in columns.items() if name != "control"},
        )
    )
    length = int.from_bytes(body[:8], "little")
    begin, end = json.loads(body[8 : 8 + length])["truncated"]["data_offsets"]
    body[8 + length + begin : 8 + length + end] = bytes([byte]) * (end - begin)
    return bytes(body)


async def test_values_without_sense_are_refused_with_their_column(
    index_url: str, tmp_path: Path
) -> None:
    async with going(index_url, tmp_path, recipe(EXTERNAL, train__steps=2)) as run:
        got = await run.claim()
        ids = [row["id"] for row in got["rows"]]
        for what, (changes, field) in WRONG.items():
            details = await run.refused(
                422, "POST", "experience", **put_body(got["token"], ids, {**RIGHT, **changes})
            )
            assert details["field"] == field, what
            assert details["fix"], what
        control = json.dumps({"token": got["token"], "rows": ids})
        body = with_bytes_of_flags({"control": control, **responses(4, 0)}, 0xFF)
        details = await run.refused(
            422, "POST", "experience", data=body, headers={"Content-Type": BINARY}
        )
        assert details["field"] == "columns.truncated"
        assert await run.ask("POST", "experience", **put_body(got["token"], ids, RIGHT)) == {
            "left": 0,
            "version": None,
        }


async def test_a_run_survives_the_worst_values_that_are_taken(
    index_url: str, tmp_path: Path
) -> None:
    """Rewards and logprobs at the ends of what is let in, into a real trainer: each step is
    finite."""
    base = {**TINY, "external": {"stages": ["rollout", "reward"]}}
    of = recipe(base, train__steps=3, pipeline__staleness=0)
    async with going(index_url, tmp_path, of) as run:
        version = -1
        while not run.work.done():
            newest = (await run.ask("GET", f"weights?after={version}&wait=0"))["version"]
            version = newest if newest is not None else version
            asked = {**GET, "wait": 0.2, "version": max(version, 0), "count": 8}
            answer = await run.client.post(f"{run.at}/experience/get", json=asked)
            got = await run.content(answer)
            assert answer.status == 200 or got["type"] == "urn:asyncdock:weights-too-old"
            if got.get("token") is not None:
                count = len(got["rows"])
                columns = {
                    "response_ids": [[5, 6, 7, 8]] * count,
                    "rollout_logprobs": [[-104.0, 0.01, -60.0, -1e-30]] * count,
                    "versions": [[max(version, 0), 4]] * count,
                    "truncated": [False] * count,
                }
                ids = [row["id"] for row in got["rows"]]
                await run.ask("POST", "experience", **put_body(got["token"], ids, columns))
            asked = {"stage": "reward", "worker": "judge", "count": 64, "wait": 0.2}
            got = await run.ask("POST", "experience/get", json=asked)
            if got["token"] is not None:
                count = len(got["rows"])
                token = got["token"]
                ids = [row["id"] for row in got["rows"]]
                for wrong in (1.1e6, -3e38):
                    columns = {"reward": [wrong] * count, "scores": [[0.0]] * count}
                    details = await run.refused(
                        422, "POST", "experience", **put_body(token, ids, columns)
                    )
                    assert details["field"] == "columns.reward"
                columns = {"reward": [1.0] * count, "scores": [[-2e6]] * count}
                details = await run.refused(
                    422, "POST", "experience", **put_body(token, ids, columns)
                )
                assert details["field"] == "columns.scores"
                ends = [1e6 if row["place"] % 2 else -1e6 for row in got["rows"]]
                columns = {"reward": ends, "scores": [[math.nan]] * count}
                await run.ask("POST", "experience", **put_body(token, ids, columns))
        result = await run.work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, run.watched)
    for step in run.watched.of("step"):
        assert math.isfinite(step["loss"])
        assert math.isfinite(step["grad_norm"])


# ── PUT weights ──────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def whole_model() -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in train_engine(recipe(TRAINER)).weights()}


def changed(name: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The model with another tensor called ``name``; None: without it."""
    model = whole_model() | ({} if value is None else {name: value})
    return {key: tensor for key, tensor in model.items() if value is not None or key != name}


NORM = "model.norm.weight"
POISON = torch.ones(64)
POISON[7] = math.nan
WRONG_WEIGHTS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "none": ({}, "no tensor"),
    "NaN": (changed(NORM, POISON), "not finite"),
    "infinity": (changed(NORM, torch.full((64,), math.inf)), "not finite"),
    "a name that the model has not": (changed("model.norn.weight", torch.ones(64)), "norn"),
    "one that is missing": (changed(NORM, None), "lacks model.norm.weight"),
    "another shape": (changed(NORM, torch.ones(65)), r"\[65\]"),
    "an empty tensor": (changed(NORM, torch.ones(0)), r"\[0\]"),
    "another dtype": (changed(NORM, torch.ones(64, dtype=torch.float64)), "float64"),
}


def spooled(folder: Path) -> list[Path]:
    return list(folder.glob("*.safetensors"))


def file_of(entries: dict[str, Any], payload: bytes = b"") -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + payload


GIANT = {"w": {"dtype": "F32", "shape": [2**36], "data_offsets": [0, 2**38]}}
UNREADABLE: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"\x10\0\0",
    "a header of an exabyte": struct.pack("<Q", 2**60) + b"{}",
    "a header that is no JSON": struct.pack("<Q", 4) + b"{{{{",
    "a header that is a list": struct.pack("<Q", 2) + b"[]",
    "integers": file_of({"w": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8),
    "a shape of no numbers": file_of(
        {"w": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, b"\0" * 4
    ),
    "a shape that is negative": file_of(
        {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\0" * 4
    ),
    "a header nested 10,000 deep": struct.pack("<Q", 20_000) + b"[" * 10_000 + b"]" * 10_000,
    "nothing but its header": save(whole_model())[:5000],
    "more than its header declares": save(whole_model()) + b"\0",
}


async def test_weights_that_are_not_the_models_are_refused_and_the_right_ones_taken(
    index_url: str, tmp_path: Path
) -> None:
    """NaN, no tensor, and a wrong name were all published, and ended the run at the engines."""
    headers = {"Content-Type": BINARY}
    async with going(index_url, tmp_path, recipe(TRAINER)) as run:
        for what, (tensors, output) in WRONG_WEIGHTS.items():
            details = await run.refused(
                422, "PUT", "weights/0", data=save(tensors), headers=headers
            )
            assert (details["type"], details["field"]) == ("urn:asyncdock:misfit", "body"), what
            assert re.search(output, details["detail"]), details["detail"]
        for what, body in UNREADABLE.items():
            details = await run.refused(400, "PUT", "weights/0", data=body, headers=headers)
            assert details["field"] == "body", what
        assert (await run.ask("GET", "weights"))["version"] is None
        await run.ask("PUT", "weights/0", data=save(whole_model()), headers=headers)
        assert (await run.ask("GET", "weights"))["version"] == 0
        assert not spooled(tmp_path), "a spooled file was left behind"


async def test_weights_larger_than_the_model_are_refused_before_their_payload(
    index_url: str, tmp_path: Path
) -> None:
    """256 GiB could be spooled before anything was looked at.

    The header alone is refused now: the payload's first byte is never asked for, and nothing is
    written.
    """
    async with going(index_url, tmp_path, recipe(TRAINER)) as run:
        asked = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield file_of(GIANT)
            await asked.wait()  # a payload that never comes
            yield b""

        try:
            async with asyncio.timeout(10):
                details = await run.refused(
                    422, "PUT", "weights/0", data=body(), headers={"Content-Type": BINARY}
                )
        finally:
            asked.set()
        assert details["field"] == "body"
        assert not spooled(tmp_path)


async def test_an_unknown_models_weights_are_bounded_and_stay_as_they_were_first(
    index_url: str, tmp_path: Path
) -> None:
    of = recipe({**MOCK, "external": {"stages": ["update"]}})
    headers = {"Content-Type": BINARY}
    async with going(index_url, tmp_path, of) as run:
        giant = {"w": {"dtype": "F32", "shape": [2**25], "data_offsets": [0, 2**27]}}
        details = await run.refused(422, "PUT", "weights/0", data=file_of(giant), headers=headers)
        assert "at most 67108864" in details["detail"]
        await run.ask("PUT", "weights/0", data=save({"w": torch.zeros(4)}), headers=headers)


async def test_the_disks_free_space_bounds_what_is_spooled(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api.external import upload

    async with going(index_url, tmp_path, recipe(TRAINER)) as run:
        monkeypatch.setattr(upload, "SPARE_DISK", upload.shutil.disk_usage(tmp_path).total)
        put = {"data": save(whole_model()), "headers": {"Content-Type": BINARY}}
        details = await run.refused(503, "PUT", "weights/0", **put)
        assert details["type"] == "urn:asyncdock:no-room"
        monkeypatch.undo()
        await run.ask("PUT", "weights/0", **put)


async def test_a_body_of_weights_that_drips_is_given_up(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api.external import upload

    monkeypatch.setattr(upload, "SILENT_SECONDS", 0.2)
    async with going(index_url, tmp_path, recipe(TRAINER)) as run:
        whole = save(whole_model())

        async def body() -> AsyncIterator[bytes]:
            for at in range(len(whole)):
                yield whole[at : at + 1]
                await asyncio.sleep(0.02)

        request = run.client.put(
            f"{run.at}/weights/0", data=body(), headers={"Content-Type": BINARY}
        )
        async with asyncio.timeout(30):
            # the answer may be lost with the connection, which is closed
            with suppress(aiohttp.ClientConnectionError):
                assert (await problem(await request, 408))["type"] == "urn:asyncdock:slow-body"
        assert not spooled(tmp_path)


def test_the_poisons_are_what_they_are_called() -> None:
    assert np.isnan(POISON.numpy()).sum() == 1
    assert set(whole_model()) > {NORM}
