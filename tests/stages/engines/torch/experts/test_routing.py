"""The experts that a rollout engine records are those that its routers chose, and training can
follow them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from stages.algorithms import LossOutput, TokenBatch
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.protocols import Begun, Completion, GroupRequest
from stages.engines.torch.train import TorchTrainEngine
from stages.flow.catalogue import ROUTED
from stages.model.load import load_model
from tests.batches import stack, unstack
from tests.stages.engines.torch.test_rollout import ask, collect, parameters, running

WIDTH = 2 * 2  # layers x top-k of tiny-moe


def moe(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    model, _ = load_model("tiny-moe", dtype=dtype, seed=seed)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped matmul has no float64
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data *= 8  # routers that are sure of themselves
    return model


def requests(**params: Any) -> list[GroupRequest]:
    asked = [
        ask(group, places=3, length=5 + 3 * group, max_tokens=8, **params) for group in range(3)
    ]
    return [dataclasses.replace(one, prompt_ids=one.prompt_ids % 40) for one in asked]


def plain_choices(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What transformers' own forward chooses for ``ids`` [T]: [T, layers * top-k], the experts of a
    layer sorted."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *of: found.append(of[2][2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=ids[None])
    for hook in hooks:
        hook.remove()
    return torch.cat([layer.sort(-1).values for layer in found], 1)


def by_layer(choices: torch.Tensor) -> torch.Tensor:
    return choices.long().view(len(choices), 2, 2).sort(-1).values.flatten(1)


@pytest.mark.parametrize("accelerated", [False, True])
async def test_a_completion_has_the_choices_of_each_fed_token(accelerated: bool) -> None:
    model = moe()
    async with running(moe(), accelerated=accelerated, routed_experts=True) as engine:
        done = await collect(engine.generate(requests(stop_token_ids=tuple(range(0, 40, 5)))))
    assert len({len(one.token_ids) for one in done.values()}) > 1, (
        "no response ends before the others"
    )
    for asked in requests():
        for place in asked.places:
            one = done[asked.group, place]
            assert one.routed_experts is not None
            assert (one.routed_experts.dtype, one.routed_experts.device.type) == (
                torch.uint8,
                "cpu",
            )
            ids = torch.cat([asked.prompt_ids, one.token_ids[:-1]])
            assert torch.equal(by_layer(one.routed_experts), plain_choices(model, ids))


async def test_an_engine_that_is_not_asked_records_nothing_and_a_dense_model_is_refused() -> None:
    async with running(moe()) as engine:
        assert all(
            one.routed_experts is None
            for one in (await collect(engine.generate(requests()))).values()
        )
    with pytest.raises(ValueError, match="has no routers"):
        async with running(load_model("tiny", dtype=torch.float32, seed=0)[0], routed_experts=True):
            pass


async def test_a_parked_response_keeps_the_choices_of_its_first_part() -> None:
    """The second part is made with other weights: the prompt and the first tokens are computed
    again, and may go to other experts, but their tokens were drawn after those of the first part.
    """
    async with running(moe(), routed_experts=True) as engine:
        first = await collect(engine.generate(requests(budget=3)))
        assert {done.finish_reason for done in first.values()} == {"cut"}
        again = [
            dataclasses.replace(
                asked, begun={place: _begun(first[asked.group, place]) for place in asked.places}
            )
            for asked in requests()
        ]
        whole = await collect(engine.generate(again))
        await engine.load_weights(1, parameters(moe(seed=1)))
        changed = await collect(engine.generate(again))
        uncut = await collect(engine.generate(requests()))
    assert (await _uncut(whole))[0] == len(whole)
    differ = 0
    for asked in requests():
        for place in asked.places:
            key = (asked.group, place)
            before = first[asked.group, place].routed_experts
            after = changed[key].routed_experts
            assert before is not None and after is not None  # noqa: PT018
            assert len(after) == len(asked.prompt_ids) + len(changed[key].token_ids) - 1
            assert torch.equal(after[: len(before)], before)
            ids = torch.cat([asked.prompt_ids, changed[key].token_ids[:-1]])
            assert torch.equal(
                by_layer(after[len(before) :]), plain_choices(moe(seed=1), ids)[len(before) :]
            )
            fresh = uncut[key].routed_experts
            assert fresh is not None
            differ += not torch.equal(
                fresh[: len(asked.prompt_ids)], before[: len(asked.prompt_ids)]
            )
    assert differ, "both models choose alike"


async def _uncut(whole: dict[tuple[int, int], Completion]) -> tuple[int, int]:
    """Responses of ``whole``, made in two parts, that have the tokens and choices of one part; and
    of how many."""
    async with running(moe(), routed_experts=True) as engine:
        once = await collect(engine.generate(requests()))
    same = [
        torch.equal(once[key].token_ids, one.token_ids)
        and torch.equal(once[key].routed_experts, one.routed_experts)  # type: ignore[arg-type]
        for key, one in whole.items()
    ]
    return sum(same), len(same)


def _begun(done: Completion) -> Begun:
    return Begun(done.token_ids, done.logprobs, done.versions, done.routed_experts)


def test_choices_of_another_number_of_tokens_are_refused() -> None:
    begun = Begun(
        torch.tensor([1, 2]), torch.zeros(2), ((0, 2),), torch.zeros(3, WIDTH, dtype=torch.uint8)
    )
    asked = requests()[0]
    with pytest.raises(ValueError, match="experts of 3 tokens, 6 were fed"):
        dataclasses.replace(asked, begun={0: begun})
    batch = made_up()
    rows = unstack(batch)
    rows[1][ROUTED] = rows[1][ROUTED][:-1]
    with pytest.raises(ValueError, match="routed_experts: row 1"):
        trainer(moe(1)).logprobs(stack(rows))


# -- training
# --------------------------------------------------------------------------------------------------


def made_up(seed: int = 0) -> TensorDict:
    """Two groups with random choices; the rows of a group agree on the prompt's."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for group, (prompt, lengths) in enumerate([(6, (5, 3, 1)), (4, (7, 2))]):
        ids = torch.randint(40, (prompt,), generator=rng)
        of_prompt = _choices(prompt, rng)
        for place, length in enumerate(lengths):
            chosen = torch.cat([of_prompt, _choices(length - 1, rng)])
            rows.append(
                {
                    "group": torch.tensor(group),
                    "place": torch.tensor(place),
                    "prompt_ids": ids,
                    "response_ids": torch.randint(40, (length,), generator=rng),
                    "rollout_logprobs": torch.randn(length, generator=rng) - 4,
                    "advantage": torch.randn((), generator=rng),
                    ROUTED: chosen.flatten().to(torch.uint8),
                }
            )
    return stack(rows)


def _choices(tokens: int, rng: torch.Generator) -> torch.Tensor:
    """[tokens, layers * top-k]: two different ones of eight experts a layer."""
    order = torch.rand(tokens, 2, 8, generator=rng).argsort(-1)
    return order[..., :2].flatten(1)


def trainer(model: Any, **options: Any) -> TorchTrainEngine:
    return TorchTrainEngine(
        model, **{"learning_rate": 1e-3, "total_steps": 4, "device": "cpu", "threads": 1} | options
    )


@contextmanager
def forced(model: Any, choices: torch.Tensor) -> Iterator[None]:
    """Replace what the routers return, from their logits and ``choices`` [T, layers * top-k]."""

    def replaced(number: int, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = choices.long()[:, 2 * number : 2 * number + 2]
        weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen

    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *of, number=number: replaced(number, of[2][0]))
        for number, layer in enumerate(model.model.layers)
    ]
    yield
    for hook in hooks:
        hook.remove()


def forced_logprobs(model: Any, batch: TensorDict) -> list[torch.Tensor]:
    found = []
    for row in unstack(batch):
        ids = torch.cat([row["prompt_ids"], row["response_ids"]])
        with forced(model, row[ROUTED].view(-1, WIDTH)):
            logits = model(input_ids=ids[None, :-1]).logits[0, len(row["prompt_ids"]) - 1 :]
        found.append(logits.log_softmax(-1).gather(-1, row["response_ids"][:, None])[:, 0])
    return found


def without(batch: TensorDict) -> TensorDict:
    return batch.exclude(ROUTED)


def test_logprobs_follow_the_choices_of_the_batch() -> None:
    batch = made_up()
    model = moe(1)
    with torch.no_grad():
        expected = forced_logprobs(copy.deepcopy(model), batch)
    engine = trainer(model)
    for found, wanted in zip(engine.logprobs(batch).unbind(), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    own = engine.logprobs(without(batch)).unbind()
    assert max(float((a - b).abs().max()) for a, b in zip(own, expected, strict=True)) > 1e-2, (
        "nothing was replayed"
    )


@pytest.mark.parametrize(
    "options", [{}, {"token_budget": 12}, {"activation_checkpointing": True}], ids=str
)
def test_gradients_reach_the_routers_through_the_weights_of_the_followed_experts(
    options: dict[str, Any],
) -> None:
    batch = made_up()
    model = moe(1, torch.float64)
    plain = copy.deepcopy(model)
    logprobs = torch.cat(forced_logprobs(plain, batch))
    advantage = torch.cat(
        [row["advantage"].expand(len(row["response_ids"])) for row in unstack(batch)]
    )
    engine = trainer(model, grad_clip=None, **options)
    seen: dict[str, torch.Tensor] = {}

    def record(*_: Any) -> None:
        seen.update(
            {name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()}
        )

    engine._optimizer.register_step_pre_hook(record)
    metrics = engine.train_batch(batch, Linear())
    (-(logprobs * advantage).sum() / len(advantage)).backward()
    for name, parameter in plain.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert float((seen[name] - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()), name
    assert float(seen["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-6
    assert 0 < metrics["routing_agreement"] < 0.6, (
        "random choices of two of eight agree by a quarter"
    )


class Linear(GRPO):
    """The policy gradient without ratios, so that the loss is linear in the logprobs."""

    name = ""

    def loss(self, tokens: TokenBatch) -> LossOutput:
        return LossOutput(tokens.mean(-tokens.logprobs * tokens["advantage"]))

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics


async def test_the_gap_of_other_weights_is_that_of_the_engines_alone_when_the_choices_are_followed() -> (
    None
):
    """A rollout's logprobs and the trainer's, of the same weights: equal with the choices of the
    rollout; and the trainer agrees with all of them."""
    async with running(moe(), routed_experts=True) as engine:
        done = await collect(engine.generate(requests()))
    batch = of_completions(requests(), done)
    engine_ = trainer(moe())
    metrics = engine_.train_batch(batch, GRPO())
    assert metrics["gap_max"] < 1e-4
    assert metrics["routing_agreement"] == 1.0
    assert "routing_agreement" not in engine_.train_batch(without(batch), GRPO())


def of_completions(
    asked: Sequence[GroupRequest], done: dict[tuple[int, int], Completion]
) -> TensorDict:
    rows = []
    for request in asked:
        for place in request.places:
            one = done[request.group, place]
            assert one.routed_experts is not None
            rows.append(
                {
                    "group": torch.tensor(request.group),
                    "place": torch.tensor(place),
                    "prompt_ids": request.prompt_ids,
                    "response_ids": one.token_ids,
                    "rollout_logprobs": one.logprobs,
                    "advantage": torch.tensor(float(place) - 1),
                    ROUTED: one.routed_experts.flatten(),
                }
            )
    return stack(rows)
