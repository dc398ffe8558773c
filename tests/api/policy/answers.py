"""A served checkpoint whose tokens are bytes, and its answers to requests, without a server
between."""

from __future__ import annotations

import atexit
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from api.policy.answers import ALL, answer
from api.policy.pieces import BYTES
from api.server.http.problems import HTTPProblem
from orchestration.policy.served import Policies
from orchestration.processes.forkserver import ForkServer
from tests.forked import fork_server, listen

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# of several bytes: é, the beginning of an emoji, €
WORDS = ["Ġthe", "Ġa", "ing", "END", "Ã©", "ðŁĺ", "âĤ¬"]
EOS = "<eos>"
PADDED = 320
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}{% if "
    "add_generation_prompt %}={% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, WORDS, and a special one."""
    vocabulary = {piece: i for i, piece in enumerate([EOS, *BYTES, *WORDS])}
    raw = RawTokenizer(models.BPE(vocabulary, [], fuse_unk=False))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def byte_model(
    seed: int, vocabulary: int = PADDED, flat: float = 1.0, context: int = 256
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 30 * flat
    return model.eval()


@dataclass
class Client:
    """Sends requests to ``model``."""

    policies: Policies
    model: str = "bytes"

    async def body(self, path: str, request: dict[str, Any]) -> bytes:
        asked = ALL[path].model_validate_json(json.dumps({"model": self.model, **request}))
        return b"".join([part async for part in answer(self.policies, asked)])

    async def whole(self, path: str, **request: Any) -> dict[str, Any]:
        body = await self.body(path, request)
        return json.loads(
            body, parse_constant=lambda name: (_ for _ in ()).throw(AssertionError(name))
        )

    async def stream(self, path: str, **request: Any) -> list[dict[str, Any]]:
        body = await self.body(path, {**request, "stream": True})
        *events, done = body.decode().removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def events(self, path: str, **request: Any) -> list[dict[str, Any]]:
        """The events of a stream that has names of them."""
        body = await self.body(path, {**request, "stream": True})
        events = []
        for event in body.decode().removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events

    async def problem(self, path: str, **request: Any) -> HTTPProblem:
        try:
            body = await self.body(path, request)
        except HTTPProblem as problem:
            return problem
        raise AssertionError(body)


@functools.cache
def forks() -> ForkServer:
    """One for all tests of this process."""
    listen()
    made = fork_server()
    atexit.register(made.close)
    return made


@contextmanager
def checkpoint(folder: Path, model: Any, tokenizer: Any) -> Iterator[Client]:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    yield Client(Policies("redis://127.0.0.1:1", checkpoints={"bytes": str(folder)}, forks=forks()))
