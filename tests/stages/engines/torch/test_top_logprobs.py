"""The teacher's most probable tokens, and the student's logprobs of them: those of the model's plain
forward, in chunks of any size, with the gradient of the whole distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from pipeline.data.columns import Packed
from stages.algorithms import build_algorithm
from stages.algorithms.batch import seen_by_teacher
from stages.algorithms.supervised.gkd import GKD
from stages.engines.torch.model import token_logprobs
from stages.engines.torch.train import TorchTrainEngine
from stages.flow.catalogue import TEACHER_IDS, TEACHER_LOGPROBS, TEACHER_PROMPT
from stages.parallel.layout import RankCoordinates
from tests.batches import VOCABULARY, make_batch, stack, unstack
from tests.ranks import of_product
from tests.stages.engines.torch.test_train import engine_of, gradients_of_step, tiny_llama
from tests.stages.products import name_of
from tests.stages.sharded import OPTIONS, model_of, parallel_of, positions

K = 5


def distributions(model: Any, batch: TensorDict, prompt: str = "prompt_ids") -> list[torch.Tensor]:
    """The log-distribution [T, V] at each response token of each row, by a plain forward."""
    rows = []
    for row in unstack(batch):
        ids = torch.cat([row[prompt], row["response_ids"]])[None]
        rows.append(model(ids).logits[0, len(row[prompt]) - 1 : -1].double().log_softmax(-1))
    return rows


def with_teacher(batch: TensorDict, teacher: Any, k: int = K) -> TensorDict:
    logprobs, ids = teacher.top_logprobs(batch, k)
    return batch.update({TEACHER_LOGPROBS: logprobs, TEACHER_IDS: ids})


@pytest.mark.parametrize("chunk", [2, 7, 256])
def test_the_most_probable_tokens_are_those_of_the_plain_forward(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", chunk * 4 * VOCABULARY)
    batch = make_batch()
    logprobs, ids = engine_of(tiny_llama(), token_budget=20).top_logprobs(batch, K)
    assert ids.dtype == torch.int32
    with torch.no_grad():
        plain = distributions(tiny_llama(), batch)
    pairs = zip(Packed.of(logprobs).rows(), Packed.of(ids).rows(), strict=True)
    for (of_row, ids_of_row), expected in zip(pairs, plain, strict=True):
        values, tokens = expected.topk(K)
        assert ids_of_row.view(-1, K).tolist() == tokens.tolist()
        torch.testing.assert_close(of_row.view(-1, K).double(), values, rtol=1e-5, atol=1e-5)


def test_a_teacher_reads_a_prompt_of_its_own() -> None:
    """Which may differ within a group."""
    batch = make_batch()
    prompts = [
        torch.cat([row["prompt_ids"], torch.tensor([3, int(row["place"]) % 2])])
        for row in unstack(batch)
    ]
    batch[TEACHER_PROMPT] = torch.nested.nested_tensor(prompts, layout=torch.jagged)
    logprobs, _ = engine_of(tiny_llama(), token_budget=30).top_logprobs(seen_by_teacher(batch), K)
    with torch.no_grad():
        plain = distributions(tiny_llama(), batch, TEACHER_PROMPT)
    expected = torch.cat([of_row.topk(K)[0].flatten() for of_row in plain])
    torch.testing.assert_close(Packed.of(logprobs).values.double(), expected, rtol=1e-5, atol=1e-5)


def test_more_tokens_than_the_model_has_are_refused() -> None:
    engine = engine_of(tiny_llama(), vocabulary=90)
    logprobs, _ = engine.top_logprobs(make_batch(), 90)
    mass = Packed.of(logprobs).values.view(-1, 90).exp().sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass))
    with pytest.raises(ValueError, match="top_k: 91 is more than the 90 tokens"):
        engine.top_logprobs(make_batch(), 91)


@pytest.mark.parametrize("budget", [None, 20])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "js"])
def test_a_steps_gradient_is_that_of_the_plain_computation(
    divergence: Any, budget: int | None
) -> None:
    algorithm = GKD(top_k=K, divergence=divergence)
    batch = with_teacher(make_batch(), engine_of(tiny_llama(seed=1)))
    masks = [torch.arange(len(row)) % 3 != 1 for row in batch["response_ids"].unbind()]
    batch["loss_mask"] = torch.nested.nested_tensor(masks, layout=torch.jagged)
    engine = engine_of(tiny_llama(), token_budget=budget)
    gradients, metrics = gradients_of_step(engine, batch, algorithm)

    model = tiny_llama()
    with torch.no_grad():
        taught = torch.cat(distributions(tiny_llama(seed=1), batch))
    now = torch.cat(distributions(model, batch))
    chosen = taught.topk(K)[1]

    def events(logprobs: torch.Tensor) -> torch.Tensor:
        of_chosen = logprobs.exp().gather(-1, chosen)
        return torch.cat([of_chosen, 1 - of_chosen.sum(-1, keepdim=True)], -1)

    p, q = events(taught), events(now)
    middle = (p + q) / 2
    per_token = {
        "forward": p * (p / q).log(),
        "reverse": q * (q / p).log(),
        "js": (p * (p / middle).log() + q * (q / middle).log()) / 2,
    }[divergence].sum(-1)
    expected = per_token[torch.cat(masks)].mean()
    expected.backward()
    assert metrics["divergence"] == pytest.approx(expected.item(), rel=1e-4)
    mass = p[:, :-1].sum(-1)[torch.cat(masks)].mean().item()
    assert metrics["teacher_mass"] == pytest.approx(mass, rel=1e-4)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gap = (gradients[name] - parameter.grad).norm()
        assert gap < 1e-4 * parameter.grad.norm(), name


def test_a_column_of_another_length_is_named() -> None:
    rows = unstack(with_teacher(make_batch(), engine_of(tiny_llama())))
    rows[2][TEACHER_IDS] = rows[2][TEACHER_IDS][:-1]
    with pytest.raises(
        ValueError,
        match="teacher_ids: row 2 has 44 values for a response of 9 tokens, which take 5",
    ):
        engine_of(tiny_llama()).train_batch(stack(rows), GKD(top_k=K))


def own_teacher_steps(ranks: RankCoordinates | None) -> dict[str, Any]:
    """Two steps of a policy that is its own teacher with another prompt, by one process (None) or a
    rank."""
    engine = TorchTrainEngine(model_of("llama"), parallel=parallel_of(ranks), **OPTIONS)
    algorithm = build_algorithm("opsd", {"teacher": "current", "top_k": K, "divergence": "js"})
    metrics = []
    for seed in range(2):
        rows = unstack(make_batch(seed=seed))
        for row in rows:
            more = torch.tensor([3, int(row["place"]) % 2])
            row[TEACHER_PROMPT] = torch.cat([row["prompt_ids"], more])
        replicas = [range(len(rows))] if ranks is None else positions(ranks.layout.replicas)
        batch = stack([rows[at] for at in replicas[ranks.replica if ranks else 0]])
        metrics.append(dict(engine.train_batch(batch, algorithm)))
    return {"metrics": metrics}


@pytest.mark.parametrize("chosen", [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=name_of)
def test_ranks_are_the_teacher_that_one_process_is(chosen: dict[str, int]) -> None:
    expected = own_teacher_steps(None)["metrics"]
    assert all(step["divergence"] > 1e-3 for step in expected)
    for result in of_product({**chosen, "context_parallel": "ring"}, own_teacher_steps):
        for got, wanted in zip(result["metrics"], expected, strict=True):
            names = wanted.keys() - {"fed_tokens"}
            assert {name: got[name] for name in names} == pytest.approx(
                {name: wanted[name] for name in names}, rel=3e-4, abs=1e-6
            )
