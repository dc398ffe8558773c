"""What parts of the check share: what they report, sizes of models, requests, responses, train
batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.engines.rollout import Case
from stages.engines.protocols import Completion, GroupRequest, SamplingParams
from stages.engines.torch.rollout import TorchRolloutEngine

TINY: dict[str, Any] = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
)
LARGE: dict[str, Any] = dict(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)
CASES = [Case(64, 8, 128, prompt=256), Case(256, 8, 256, prompt=256)]
SMOKE = [Case(4, 2, 6, prompt=9)]


@dataclass(frozen=True)
class Figure:
    """One line of the report: ``value`` in ``unit``, beside its ``floor`` or its ``limit`` where it
    has one. ``timed`` figures mean nothing on a CPU."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    limit: float | None = None
    timed: bool = True

    @property
    def failed(self) -> bool:
        return self.limit is not None and not self.value <= self.limit


def line(figure: Figure, device: torch.device) -> str:
    text = f"{figure.name:<38}{figure.value:>12.4g} {figure.unit}"
    if figure.floor is not None:
        text += f", {figure.value / figure.floor:.0%} of {figure.floor:.4g}"
    if figure.limit is not None:
        text += f", limit {figure.limit:g}: {'FAILED' if figure.failed else 'ok'}"
    return text + (" (no meaning on a CPU)" if figure.timed and device.type == "cpu" else "")


@dataclass(frozen=True)
class Setting:
    """Where and how a part is measured. ``small``: a rehearsal with tiny models and cases."""

    device: torch.device
    small: bool
    repeat: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.small else torch.bfloat16

    @property
    def cases(self) -> list[Case]:
        return SMOKE if self.small else CASES

    @property
    def shape(self) -> dict[str, Any]:
        return TINY if self.small else LARGE

    def model(self) -> PreTrainedModel:
        """The model of the parts that measure speed."""
        config = Qwen2Config(**self.shape)
        return made(lambda: Qwen2ForCausalLM(config), 0).to(self.dtype)  # type: ignore[arg-type]


def made(build: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return build().eval()


def requests(case: Case, vocabulary: int, temperature: float = 1.0) -> list[GroupRequest]:
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=case.tokens, temperature=temperature)
    prompts = [
        torch.randint(0, vocabulary, (case.prompt,), generator=generator)
        for _ in range(case.rows // case.group)
    ]
    return [
        GroupRequest(i, tuple(range(case.group)), ids, params, i) for i, ids in enumerate(prompts)
    ]


async def responses(engine: TorchRolloutEngine, asked: Sequence[GroupRequest]) -> list[Completion]:
    return [done async for done in engine.generate(asked)]


def batch_of(asked: Sequence[GroupRequest], done: Sequence[Completion]) -> TensorDict:
    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    return TensorDict(
        {
            "group": torch.tensor([one.group for one in done]),
            "place": torch.tensor([one.place for one in done]),
            "prompt_ids": jagged([asked[one.group].prompt_ids for one in done]),
            "response_ids": jagged([one.token_ids for one in done]),
            "rollout_logprobs": jagged([one.logprobs for one in done]),
            "advantage": torch.linspace(-1, 1, len(done)),
        },
        batch_size=[len(done)],
    )


def made_up(asked: Sequence[GroupRequest], case: Case, vocabulary: int) -> TensorDict:
    """A train batch of random responses."""
    generator = torch.Generator().manual_seed(1)
    done = [
        Completion(
            request.group,
            number,
            torch.randint(0, vocabulary, (case.tokens,), generator=generator),
            torch.full((case.tokens,), -11.0),
            ((0, case.tokens),),
            "length",
        )
        for request in asked
        for number in request.places
    ]
    return batch_of(asked, done)
