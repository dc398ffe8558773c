"""Embeddings that are larger than their tokenizer: the tokens that pad them have no probability, in
sampling and in training alike. The right values are transformers' logits in float64, their softmax
taken over the tokenizer's tokens."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import LlamaForCausalLM

from orchestration.recipe.checks.examples import padding_can_be_masked
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.sizes.planner import notices_of
from orchestration.workers.engines import (
    reference_engine,
    rollout_engine,
    train_engine,
    unpadded_vocabulary,
)
from orchestration.workers.terms import terms_of
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.responses import Responses
from stages.engines.torch.model import token_logprobs
from stages.engines.torch.model.token_logprobs import TokenLogprobs
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.vllm.rows import VllmRow, sampling_params
from stages.model.load import load_model
from tests.batches import make_batch
from tests.orchestration.runs import TINY
from tests.ranks import on_ranks
from tests.stages.algorithms.test_interface import Observing
from tests.stages.engines.torch.test_train import engine_of, gradients_of_step, tiny_llama

KNOWN = 61  # of 97 tokens


def batch_of_known() -> TensorDict:
    batch = make_batch()
    for name in ("prompt_ids", "response_ids"):
        rows = [row % KNOWN for row in batch[name].unbind()]
        batch[name] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return batch


def expected(model: LlamaForCausalLM, batch: TensorDict, temperature: float) -> list[torch.Tensor]:
    """Of each row the log-softmax [T, KNOWN] that its response's tokens are of, float64, with a
    gradient."""
    pairs = zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True)
    rows = []
    for prompt, response in pairs:
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        rows.append((logits[:, :KNOWN] / temperature).log_softmax(-1))
    return rows


def chosen(rows: list[torch.Tensor], batch: TensorDict) -> list[torch.Tensor]:
    return [
        row.gather(1, ids[:, None])[:, 0]
        for row, ids in zip(rows, batch["response_ids"].unbind(), strict=True)
    ]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [3, 10**6])
def test_logprobs_entropy_and_gradients_are_those_of_the_known_tokens(
    tied: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", chunk * 4 * KNOWN)
    batch = batch_of_known()
    algorithm = Observing()
    model = tiny_llama(tied=tied)
    right = copy.deepcopy(model).double()
    engine = engine_of(model, temperature=0.7, vocabulary=KNOWN)
    rows = expected(right, batch, 0.7)
    found = torch.cat(list(engine.logprobs(batch).unbind()))
    torch.testing.assert_close(
        found.double(), torch.cat(chosen(rows, batch)).detach(), atol=2e-5, rtol=0
    )
    gradients, metrics = gradients_of_step(engine, batch, algorithm)
    flat = torch.cat([row.detach() for row in rows])
    entropy = -(flat.exp() * flat).sum(-1)
    assert metrics["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)
    weighted = [
        -row.sum() * advantage
        for row, advantage in zip(chosen(rows, batch), batch["advantage"], strict=True)
    ]
    (sum(weighted) / len(flat)).backward()  # type: ignore[union-attr]
    for name, parameter in right.named_parameters():
        torch.testing.assert_close(
            gradients[name].double(), parameter.grad, atol=1e-5, rtol=1e-4, msg=name
        )
    if not tied:
        assert not gradients["lm_head.weight"][KNOWN:].any()


def test_no_copy_of_the_head_and_no_change_without_padding() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 16)
    weight = torch.randn(11, 16)
    bias = torch.randn(11)
    source = torch.tensor([0, 1, 2, 3, 4])
    targets = torch.tensor([5, 1, 0, 2, 7])
    results = []
    for vocabulary in (None, 11, 8):
        leaves = [one.clone().requires_grad_() for one in (hidden, weight, bias)]
        logprobs, _ = TokenLogprobs.apply(*leaves, source, targets, 0.7, False, None, vocabulary)
        logprobs.square().sum().backward()
        results.append([logprobs.detach(), *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(one, other) for one, other in zip(results[0], results[1], strict=True))
    wide = [one.double().requires_grad_() for one in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(wide[0], wide[1], wide[2])[:, :8] / 0.7
    right = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    right.square().sum().backward()
    for found, value in zip(
        results[2], [right.detach(), *(leaf.grad for leaf in wide)], strict=True
    ):
        torch.testing.assert_close(found.double(), value, atol=1e-5, rtol=1e-5)


def logprobs_of(ranks: Any) -> torch.Tensor:
    from stages.engines.torch.parallel.sharded import Sharded
    from stages.engines.torch.train import TorchTrainEngine
    from tests.stages.sharded import OPTIONS

    engine = TorchTrainEngine(
        tiny_llama(), parallel=Sharded(ranks), **{**OPTIONS, "vocabulary": KNOWN}
    )
    return torch.cat(list(engine.logprobs(batch_of_known()).unbind()))


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_several_ranks_compute_the_same(dp: int, tp: int) -> None:
    batch = batch_of_known()
    right = torch.cat(chosen(expected(tiny_llama().double(), batch, 1.0), batch)).detach()
    for found in on_ranks(dp, tp, logprobs_of):
        torch.testing.assert_close(found.double(), right, atol=2e-5, rtol=0)


@pytest.mark.parametrize("params", [{}, {"top_k": 80}, {"top_p": 0.99}, {"temperature": 0.0}])
async def test_no_token_that_pads_the_head_is_sampled(params: dict[str, Any]) -> None:
    model = tiny_llama(seed=3)
    with torch.no_grad():
        model.get_input_embeddings().weight[KNOWN:] *= 3  # so that each of them is likely
    right = copy.deepcopy(model).double()
    engine = TorchRolloutEngine(model, max_rows=16, device="cpu", sampled=KNOWN)
    asked = SamplingParams(12, **{"temperature": 0.7, **params})
    prompt = torch.arange(3, 9)
    completions = [
        done
        async for done in engine.generate([GroupRequest(1, tuple(range(16)), prompt, asked, 5)])
    ]
    scored = await engine.score(prompt, completions[0].token_ids, temperature=0.7)
    await engine.close()
    assert len(completions) == 16
    for done in completions:
        assert int(done.token_ids.max()) < KNOWN
        with torch.no_grad():
            logits = right(torch.cat([prompt, done.token_ids])[None]).logits[
                0, len(prompt) - 1 : -1
            ]
        of_known = (logits[:, :KNOWN] / (asked.temperature or 1.0)).log_softmax(-1)
        wanted = of_known.gather(1, done.token_ids[:, None])[:, 0]
        torch.testing.assert_close(done.logprobs.double(), wanted.detach(), atol=5e-5, rtol=0)
    assert scored is not None
    assert scored.isfinite().all()


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """The tiny model with 64 rows for the 49 tokens of its tokenizer, as checkpoints that are
    padded have them."""
    model, tokenizer = load_model("tiny", dtype=torch.float32, seed=0)
    torch.manual_seed(1)
    model.resize_token_embeddings(64, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[len(tokenizer) :] = torch.randn(
            64 - len(tokenizer), model.config.hidden_size
        )
    model.save_pretrained(tmp_path / "padded")
    tokenizer.save_pretrained(tmp_path / "padded")
    return tmp_path / "padded"


def recipe_of(folder: Path, **model: Any) -> Any:
    return parse_recipe({**TINY, "model": {"source": str(folder), **model}})


@pytest.mark.parametrize("vocabulary", ["auto", "model"])
async def test_the_engines_of_a_recipe_agree(vocabulary: str, padded: Path) -> None:
    recipe = recipe_of(padded, vocabulary=vocabulary)
    tokenizer = tokenizer_of(recipe)
    assert unpadded_vocabulary(recipe) == len(tokenizer) == 49
    rollout = rollout_engine(recipe, version=0)
    trainer = train_engine(recipe)
    reference = reference_engine(recipe)
    params = SamplingParams(6, temperature=recipe.rollout.temperature)
    request = GroupRequest(0, tuple(range(32)), torch.tensor([4, 5, 6]), params, 7)
    completions = [done async for done in rollout.generate([request])]
    await rollout.close()
    responses = [done.token_ids for done in completions]
    made = {
        "group": torch.zeros(32, dtype=torch.int64),
        "place": torch.tensor([done.place for done in completions]),
        "prompt_ids": torch.nested.nested_tensor([request.prompt_ids] * 32, layout=torch.jagged),
        "response_ids": torch.nested.nested_tensor(responses, layout=torch.jagged),
    }
    batch = TensorDict(made, [32])
    sampled = torch.cat([done.logprobs for done in completions])
    for engine in (trainer, reference):
        found = torch.cat(list(engine.logprobs(batch).unbind()))
        torch.testing.assert_close(found, sampled, atol=1e-4, rtol=0)
    largest = int(torch.cat(responses).max())
    assert (largest < 49) == (vocabulary == "auto")
    assert terms_of(recipe, tokenizer).vocabulary == (49 if vocabulary == "auto" else 64)


def test_what_an_engine_cannot_leave_out_is_said(padded: Path) -> None:
    def by_vllm(**model: Any) -> Any:  # as a recipe where vLLM is installed
        recipe = recipe_of(padded, **model)
        return recipe.model_copy(
            update={"rollout": recipe.rollout.model_copy(update={"engine": "vllm"})}
        )

    recipe = by_vllm()
    assert not recipe.masks_padding
    notices = [str(notice) for notice in notices_of(recipe)]
    assert any(
        "samples of all 64 tokens of the model, 15 of which its tokenizer does not have" in n
        for n in notices
    )
    masked = by_vllm(vocabulary="tokenizer")
    assert not list(padding_can_be_masked(masked, None))  # type: ignore[arg-type]
    filtered = masked.model_copy(update={"rollout": masked.rollout.model_copy(update={"top_k": 5})})
    (found,) = padding_can_be_masked(filtered, None)  # type: ignore[arg-type]
    assert "leaves out 15 tokens, which rollout.engine = 'vllm' samples" in str(found)
    own = recipe_of(padded)
    assert own.masks_padding
    given = own.model_copy(
        update={"prompts": own.prompts.model_copy(update={"responses": ["answer"]})}
    )
    assert not given.masks_padding, "nothing is sampled: a loss as others have it"


def test_vllm_is_told_which_tokens_it_never_samples() -> None:
    """What it then computes is not tested here: no vLLM is installed."""
    asked: dict[str, Any] = {}

    class Vllm:
        RequestOutputKind = SimpleNamespace(DELTA="delta")

        @staticmethod
        def SamplingParams(**options: Any) -> None:
            asked.update(options)

    request = GroupRequest(0, (0,), torch.tensor([1]), SamplingParams(4), 0)
    responses = Responses(1, lambda _: None)
    row = VllmRow(request, 0, responses, 3, dict.fromkeys(range(6, 9), -math.inf))
    sampling_params(Vllm, row)
    assert asked["logit_bias"] == {6: -math.inf, 7: -math.inf, 8: -math.inf}
    sampling_params(Vllm, VllmRow(request, 0, responses, 3))
    assert asked["logit_bias"] is None
    logprobs = {
        token: SimpleNamespace(rank=rank, logprob=-float(rank))
        for rank, token in enumerate([7, 2, 5], start=1)
    }
    row.add(SimpleNamespace(token_ids=[2], logprobs=[logprobs], weight_versions=[]), 0, 0, True)
    assert row.responses.queue.get_nowait().alternatives == ((2, -2.0), (5, -3.0))  # type: ignore[union-attr]
