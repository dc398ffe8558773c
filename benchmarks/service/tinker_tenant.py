"""Tenants of a server for Tinker's clients, without an SDK: what one asks for, and a job whose answers
another server gives too, bit for bit.

    Tenant.open ─▶ session, model, checkpoint, sampler: Things ─▶ Work: steps, samples, checkpoints ─▶ answers
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import aiohttp
from yarl import URL

from api.tinker.messages import MESSAGES
from api.tinker.models import PROTOBUF
from benchmarks.service.tinker_messages import (
    BASE,
    INT64,
    JSON,
    Things,
    sound_inputs,
    tensor,
    text_chunk,
)

ANSWER_SECONDS = 300.0  # in which each call has an answer


class Tenant:
    """A client with the key of a tenant; ``secret``: what only its own answers may have."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self.secret = secrets.token_hex(12)
        self._session = session
        self._url = url
        self._headers = {"X-API-Key": key}

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, str, bytes]:
        """Return status, media type and body of the answer, with its headers."""
        async with self._session.request(
            method,
            URL(self._url + path, encoded=True),
            data=body,
            headers={**self._headers, **headers},
            skip_auto_headers=("Content-Type",),
            allow_redirects=False,
        ) as answer:
            content = await answer.read()
            return answer.status, answer.content_type, content

    async def post(self, name: str, **fields: Any) -> dict[str, Any]:
        body = json.dumps(fields).encode()
        status, _, content = await self.send(
            "POST", f"/api/v1/{name}", {"Content-Type": JSON}, body
        )
        if status != 200:
            raise RuntimeError(f"{name}: {status} {content.decode()}")
        return dict(json.loads(content))

    async def retrieve(self, request_id: str) -> tuple[int, str, bytes]:
        """Return the answer to a call; the last 408 where there is none within ANSWER_SECONDS."""
        body = json.dumps({"request_id": request_id}).encode()
        path = "/api/v1/retrieve_future"
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = await self.send("POST", path, {"Content-Type": JSON}, body)
            if answer[0] != 408 or time.monotonic() > deadline:
                return answer

    async def result(self, call: Mapping[str, Any]) -> bytes:
        status, _, content = await self.retrieve(call["request_id"])
        if status != 200 or content.startswith(b'{"error"'):
            raise RuntimeError(f"{call}: {status} {content.decode(errors='replace')}")
        return content

    async def open(self) -> Things:
        """Open a session with a model, a sampler and a checkpoint, all with the secret in their
        names or metadata."""
        metadata = {"secret": self.secret}
        session = (
            await self.post(
                "create_session",
                tags=[self.secret],
                user_metadata=metadata,
                display_name=self.secret,
            )
        )["session_id"]
        things = await self.model(Things(session=session), 0)
        opened = await self.post(
            "create_sampling_session", session_id=session, model_path=things.path
        )
        sampler = opened["sampling_session_id"]
        sampled = await self.post("asample", sampling_session_id=sampler, seq_id=0, **PROMPT)
        await self.result(sampled)
        (sequence,) = sampled["sample_sequence_ids"]
        return Things(
            *(session, things.model, sampler, sampled["request_id"], sequence, things.path, "known")
        )

    async def model(self, things: Things, number: int) -> Things:
        """Return ``things`` with model ``number`` of the session, whose call 3 is the next one."""
        created = await self.post(
            "create_model",
            session_id=things.session,
            model_seq_id=number,
            base_model=BASE,
            lora_config={"rank": 4, "seed": 7},
            user_metadata={"secret": self.secret},
        )
        model = created["model_id"]
        await self.result(created)
        for seq_id, name in ((1, "known"), (2, f"hidden-{self.secret}")):
            saved = await self.post(
                "save_weights",
                model_id=model,
                seq_id=seq_id,
                path=name,
                user_metadata={"secret": self.secret},
            )
            await self.result(saved)
        return Things(
            *(things.session, model, things.sampler, things.request, things.sequence),
            *(f"tinker://{model}/weights/known", "known"),
        )


PROMPT: dict[str, Any] = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
    "sampling_params": {"max_tokens": 4, "seed": 3},
}


class Work:
    """What the first tenant does: steps, samples, checkpoints. ``answers``: those to its calls, with
    its ids replaced, as another server gives others."""

    _tenant: Tenant

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.things = Things()
        self._turn = 2

    async def open(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self.things = await tenant.open()

    async def go_on(self, tenant: Tenant) -> None:
        """Ask the next server for what was asked for last."""
        self._tenant = tenant
        await self._scores()

    async def step(self, number: int) -> None:
        post = partial(self._tenant.post, model_id=self.things.model)
        data = MESSAGES["Datum"](model_input=[text_chunk(b"\5\0\0\0\6\0\0\0\7\0\0\0")])
        target = tensor([6 + number % 40, 7, 8], INT64)
        for name, value in {**sound_inputs(), "target_tokens": target}.items():
            data.loss_fn_inputs.add(key=name, value=value)
        self._turn += 1
        body = MESSAGES["ForwardBackwardRequest"](
            model_id=self.things.model,
            seq_id=self._turn,
            data=[data.SerializeToString()] * 2,
            loss_fn="importance_sampling",
        ).SerializeToString()
        path = "/api/v1/forward_backward"
        _, _, content = await self._tenant.send("POST", path, {"Content-Type": PROTOBUF}, body)
        await self._take(json.loads(content))
        self._turn += 1
        await self._take(
            await post("optim_step", seq_id=self._turn, adam_params={"learning_rate": 1e-3})
        )
        if number % 5 == 0:
            self._turn += 1
            saved = await post(
                "save_weights_for_sampler", seq_id=self._turn, sampling_session_seq_id=number + 1
            )
            sampler = json.loads(await self._take(saved))["sampling_session_id"]
            await self._sample(sampler)
        if number % 20 == 0:
            self._turn += 1
            await self._take(await post("save_weights", seq_id=self._turn, path=f"at-{number}"))
            self._turn += 1
            path = f"tinker://{self.things.model}/weights/at-{number}"
            await self._take(await post("load_weights", seq_id=self._turn, path=path))

    async def _sample(self, sampler: str) -> None:
        sampled = await self._tenant.post("asample", sampling_session_id=sampler, **PROMPT)
        answer = MESSAGES["SampleResponse"].FromString(await self._tenant.result(sampled))
        answer.prompt_cache_hit_tokens = 0  # by what else the engine has had
        for sequence in answer.sequences:
            sequence.logprobs = b""  # up to rounding
        self.answers.append(bytes(answer.SerializeToString()))

    async def _take(self, call: Mapping[str, Any]) -> bytes:
        content = await self._tenant.result(call)
        self.answers.append(content.replace(self.things.session.encode(), b"SESSION"))
        return content

    async def end(self) -> None:
        """Take what there is of the model at the end."""
        ledger = f"/tinker/models/{self.things.model}/ledger"
        for path in (ledger, f"/api/v1/training_runs/{self.things.model}"):
            _, _, content = await self._tenant.send("GET", path, {}, None)
            content = content.replace(self.things.session.encode(), b"SESSION")
            content = content.replace(self._tenant.secret.encode(), b"SECRET")
            self.answers.append(re.sub(rb'"(\w+_)?time":"[^"]*"', b"", content))
        await self._scores()

    async def _scores(self) -> None:
        """Take the loss of the model as it is, without changing it."""
        self._turn += 1
        message = MESSAGES["ForwardBackwardRequest"](
            model_id=self.things.model,
            seq_id=self._turn,
            loss_fn="cross_entropy",
            forward_only=True,
        )
        datum = MESSAGES["Datum"](model_input=[text_chunk(b"\5\0\0\0\6\0\0\0")])
        datum.loss_fn_inputs.add(key="target_tokens", value=tensor([6, 7], INT64))
        message.data.append(datum.SerializeToString())
        path = "/api/v1/forward_backward"
        headers = {"Content-Type": PROTOBUF}
        _, _, content = await self._tenant.send("POST", path, headers, message.SerializeToString())
        await self._take(json.loads(content))
