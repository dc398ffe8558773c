"""A teacher behind an OpenAI-compatible server: logprobs of responses, or its most probable tokens,
in the place of a reference model of the run's own.

    a group ─▶ POST URL/completions, `prompt`: prompts with their responses as token ids ─▶ logprobs of the prompt's tokens
                   └ retried while the server is away or busy                                └▶ ref_logprobs
    at the start: does the server split a text into the tokens of the run's model, and give logprobs of a prompt?

Servers give them in one of two ways: vLLM's ``prompt_logprobs``, or ``echo`` with ``logprobs``;
the most probable tokens, by their ids, in the first one alone. They are those at temperature 1.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import aiohttp
import stamina
import torch
from tensordict import TensorDict

from pipeline.data.columns import plain_values
from pipeline.index.client import Claim
from pipeline.problems import Fatal, Problem, ProblemError
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Written
from stages.branches import branches_of
from stages.flow.catalogue import (
    BRANCHES,
    REFERENCE,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_PROMPT,
)
from stages.flow.declarations import StageDeclaration
from stages.model.load import Tokenizer

SAMPLE = "What is 3 + 4? be=bbbb"  # that both tokenizers must split in the same way
WAYS: tuple[dict[str, Any], ...] = (  # of asking for the logprobs of a prompt
    {"prompt_logprobs": 0, "max_tokens": 1},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
)
# answers after which the same request may succeed, beside those from 500 on
PASSING = (408, 409, 425, 429)
SHOWN = 200  # characters of an answer that an error quotes


class TeacherRefused(Fatal, ProblemError, ValueError):
    """The server answers, but not with what is needed: another request would not help.

    ``key``: of the recipe.
    """

    def __init__(
        self, wrong: str, fix: str = "", key: str = "teacher.url", value: str | None = None
    ) -> None:
        super().__init__(Problem(key, value, wrong, fix))


class TeacherDenied(TeacherRefused):
    """The server wants another key."""


class TeacherUnreachable(ProblemError, ConnectionError):
    """The server is away, too slow or too busy."""

    def __init__(self, wrong: str, fix: str = "") -> None:
        super().__init__(Problem("teacher.url", None, wrong, fix))


@dataclass(frozen=True)
class TeacherOptions:
    """The address of a teacher server, and its limits. ``url``: as ``http://127.0.0.1:8000/v1``.
    ``model``: its name there; "": the first that the server lists. ``timeout``: seconds of one
    request, of which ``retries`` follow one that fails, ``wait`` seconds later at first. ``key`` is
    sent as a bearer token, and stands in no message."""

    url: str
    model: str = ""
    timeout: float = 60.0
    retries: int = 5
    wait: float = 0.5
    key: str = field(default="", repr=False)


class TeacherServer:
    """Client of the server. :meth:`open` before the first call, in the event loop of the others;
    :meth:`close` after the last. ``top_k``: most probable tokens that are asked for, or 0."""

    def __init__(self, options: TeacherOptions, tokenizer: Tokenizer, top_k: int = 0) -> None:
        self.options = options
        self.top_k = top_k
        self._tokenizer = tokenizer
        self._url = options.url.rstrip("/")
        self._model = options.model
        self._way = WAYS[0]
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Check the server: model, tokenizer, and logprobs of a prompt.

        Raises TeacherRefused, TeacherUnreachable.
        """
        headers = {"Authorization": f"Bearer {self.options.key}"} if self.options.key else {}
        timeout = aiohttp.ClientTimeout(total=self.options.timeout)
        # A proxy of the environment is not used: it would get the key.
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        if not self._model:
            listed = (await self._ask("GET", f"{self._url}/models")).get("data") or [{}]
            self._model = str(listed[0].get("id", ""))
        ids = self._tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
        await self._check_tokenizer(ids)
        ways = [{**WAYS[0], "prompt_logprobs": self.top_k}] if self.top_k else WAYS
        for self._way in ways:
            try:
                [[choice]] = [await self._choices([ids])]
                logprobs_in(choice, ids)
            except TeacherDenied:
                raise
            except TeacherRefused as refused:
                reason = refused.problems[0].wrong
                continue
            self._top_in(choice, 1)
            return self._check_decoded(choice, ids)
        fix = "use one that has `prompt_logprobs` (vLLM), or `echo` with `logprobs`"
        raise TeacherRefused(f"{self._url} gives no logprobs of a prompt ({reason})", fix)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def logprobs(
        self, rows: Sequence[tuple[list[int], list[int]]], branches: Sequence[Sequence[int]] = ()
    ) -> list[torch.Tensor]:
        """Return the logprobs float32 [T] of the response of each (prompt, response). ``branches``:
        the column of each, where there is one: the server is asked for each branch's path.

        Raises TeacherRefused, TeacherUnreachable.
        """
        return [
            torch.cat(
                [
                    torch.tensor(logprobs_in(choice, before + own)[len(before) :])
                    for choice, before, own in parts
                ]
            )
            for parts in await self._parts(rows, branches)
        ]

    async def top_logprobs(
        self, rows: Sequence[tuple[list[int], list[int]]], branches: Sequence[Sequence[int]] = ()
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return of each row, as :meth:`logprobs` takes them, the logprobs float32 [T · k] of the
        most probable tokens at each place of the response, and these tokens, int32 [T · k].

        Raises TeacherRefused, TeacherUnreachable.
        """
        logprobs = []
        tokens = []
        for parts in await self._parts(rows, branches):
            tops = [
                top
                for choice, before, _ in parts
                for of_place in self._top_in(choice, len(before))
                for top in of_place
            ]
            logprobs.append(torch.tensor([logprob for logprob, _ in tops]))
            tokens.append(torch.tensor([token for _, token in tops], dtype=torch.int32))
        return logprobs, tokens

    async def _parts(
        self, rows: Sequence[tuple[list[int], list[int]]], branches: Sequence[Sequence[int]]
    ) -> list[list[tuple[dict[str, Any], list[int], list[int]]]]:
        """Return for each branch of each row the server's choice, the tokens before those of the
        branch, and these."""
        asked = []
        counts = []  # branches of each row
        columns = branches or [()] * len(rows)
        for (prompt, response), column in zip(rows, columns, strict=True):
            tree = branches_of(column, len(response))
            counts.append(len(tree))
            for branch in tree:
                before = [response[place] for place in branch.path(branch.begin)]
                asked.append((prompt + before, response[branch.begin : branch.end]))
        choices = await self._choices([before + own for before, own in asked])
        parts = (
            (choice, before, own) for choice, (before, own) in zip(choices, asked, strict=True)
        )
        return [[*islice(parts, count)] for count in counts]

    def _top_in(self, choice: Mapping[str, Any], begin: int) -> list[list[tuple[float, int]]]:
        """Return the most probable tokens that the tokenizer knows, and their logprobs before them,
        at each place of a server's ``choice`` from ``begin`` on. Raises TeacherRefused."""
        if not self.top_k:
            return []
        known = len(self._tokenizer)
        tops = [
            sorted(
                (
                    (float(each["logprob"]), int(token))
                    for token, each in entry.items()
                    if int(token) < known
                ),
                reverse=True,
            )[: self.top_k]
            for entry in choice["prompt_logprobs"][begin:]
        ]
        if (fewest := min(map(len, tops))) < self.top_k:
            fix = "start it with a larger limit (vLLM: --max-logprobs), or set a smaller top_k"
            raise TeacherRefused(
                f"{self._url} gives {fewest} tokens of a place, and top_k is {self.top_k}", fix
            )
        return tops

    async def _choices(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        body = {"model": self._model, "prompt": prompts, "temperature": 1.0, **self._way}
        answer = await self._ask("POST", f"{self._url}/completions", body)
        choices = sorted(answer.get("choices") or [], key=lambda choice: int(choice["index"]))
        if len(choices) != len(prompts):
            count = f"{len(choices)} choices for {len(prompts)} prompts"
            raise TeacherRefused(f"{self._url} returned {count}")
        return choices

    async def _check_tokenizer(self, ids: list[int]) -> None:
        """Compare with vLLM's ``/tokenize``, where the server has it. Raises TeacherRefused."""
        body = {"model": self._model, "prompt": SAMPLE, "add_special_tokens": False}
        try:
            server_ids = (
                await self._ask("POST", f"{self._url.removesuffix('/v1')}/tokenize", body)
            ).get("tokens")
        except TeacherRefused:  # there is none
            return
        if server_ids is not None and list(server_ids) != list(ids):
            raise self._differs(
                f"splits {SAMPLE!r} into the tokens {server_ids}, model.source into {ids}"
            )

    def _check_decoded(self, choice: Mapping[str, Any], ids: Sequence[int]) -> None:
        """Compare the texts that the server gives for token ids, where it does.

        Raises TeacherRefused.
        """
        entries = choice.get("prompt_logprobs") or []
        texts = [
            None if not entry else entry[str(token)].get("decoded_token")
            for entry, token in zip(entries, ids, strict=False)
        ]
        texts = texts or list((choice.get("logprobs") or {}).get("tokens") or [])[: len(ids)]
        for token, text in zip(ids, texts, strict=False):
            expected = str(self._tokenizer.decode([token]))
            if text is not None and text.strip() != expected.strip():
                raise self._differs(
                    f"reads the token {token} as {text!r}, model.source as {expected!r}"
                )

    def _differs(self, how: str) -> TeacherRefused:
        fix = "use a teacher with the tokenizer of model.source"
        return TeacherRefused(f"the model {self._model!r} of {self._url} {how}", fix)

    async def _ask(
        self, method: str, url: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        attempts = self.options.retries + 1
        wait = self.options.wait
        answer: dict[str, Any] = {}
        retrying = stamina.retry_context(
            TeacherUnreachable,
            attempts=attempts,
            timeout=None,
            wait_initial=wait,
            wait_max=20 * wait,
        )
        async for attempt in retrying:
            with attempt:
                answer = await self._ask_once(method, url, body)
        return answer

    async def _ask_once(
        self, method: str, url: str, body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        assert self._session is not None, "open() comes first"
        try:
            async with self._session.request(
                method, url, json=body, allow_redirects=False
            ) as answer:
                text = await answer.text(errors="replace")
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = (
                (f"no answer within {self.options.timeout:g} s")
                if isinstance(error, TimeoutError)
                else f"{error}"
            )
            fix = "start the server, or correct it"
            raise TeacherUnreachable(f"{url} cannot be reached ({why})", fix) from None
        if status in PASSING or status >= 500:
            raise TeacherUnreachable(f"{url} answers {status} {text[:SHOWN]!r}")
        if status in (401, 403):
            fix = "teacher.api_key_variable names the environment variable with the key"
            raise TeacherDenied(f"{url} answers {status}: it wants another key", fix)
        try:
            if status != 200:
                raise ValueError
            document: dict[str, Any] = await _parsed(text)
        except ValueError:
            raise TeacherRefused(f"{url} answers {status} {text[:SHOWN]!r}") from None
        return document


async def _parsed(text: str) -> dict[str, Any]:
    """Return a JSON object; a long one is parsed in a thread. Raises ValueError."""
    document = json.loads(text) if len(text) < 2**16 else await asyncio.to_thread(json.loads, text)
    if not isinstance(document, dict):
        raise ValueError("no object")
    return document


def logprobs_in(choice: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
    """Return the logprob of each token of the prompt ``ids`` in a server's ``choice``; 0 for the
    first, which follows nothing. Raises TeacherRefused."""
    entries = choice.get("prompt_logprobs")
    try:
        if entries:
            logprobs = [
                entry[str(token)]["logprob"]
                for entry, token in zip(entries[1:], ids[1:], strict=True)
            ]
        else:
            logprobs = choice["logprobs"]["token_logprobs"][1 : len(ids)]
        values = [0.0, *map(float, logprobs)]
    except (KeyError, TypeError, ValueError, IndexError):
        problem = f"its answer has {sorted(choice)}, without a logprob for each token of the prompt"
        raise TeacherRefused(problem) from None
    if len(values) != len(ids) or not all(
        math.isfinite(value) and value <= 1e-3 for value in values
    ):
        count = f"{len(values)} logprobs for {len(ids)} tokens"
        raise TeacherRefused(f"its answer has {count}, or some that are none")
    return values


def api_key(variable: str) -> str:
    """Return the value of the environment's ``variable``; "" without one.

    Raises TeacherRefused where it is not set.
    """
    if variable and variable not in os.environ:
        problem = "is not set in the environment"
        raise TeacherRefused(problem, "export it", "teacher.api_key_variable", variable)
    return os.environ.get(variable, "") if variable else ""


class TeacherReference(Stage):
    """The reference stage of a run with a teacher behind a server, as the flow has ``declared`` it:
    one request for each group, ``in_flight`` at a time."""

    name = "reference"

    def __init__(
        self,
        server: TeacherServer,
        *,
        in_flight: int,
        group_size: int,
        declared: StageDeclaration,
    ) -> None:
        self.server = server
        self.makes = declared.makes
        self.fetches = tuple(declared.needs)
        self._most_rows = in_flight * group_size

    def room(self, held: int) -> int:
        return int(held < self._most_rows)  # a claim of one group each, which run at the same time

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        values = {name: plain_values(rows[name]) for name in self.fetches}
        prompts = values.get(TEACHER_PROMPT, values["prompt_ids"])
        pairs = list(zip(prompts, values["response_ids"], strict=True))
        branches = values.get(BRANCHES, [])
        columns: dict[str, Any] = {}
        if TEACHER_IDS in self.makes:
            top = await self.server.top_logprobs(pairs, branches)
            columns[TEACHER_LOGPROBS], columns[TEACHER_IDS] = top
        if REFERENCE.keys() <= self.makes.keys():
            columns["ref_logprobs"] = await self.server.logprobs(pairs, branches)
        yield Written(range(len(claim)), rows=columns, tokens=int(claim.tokens.sum()))
