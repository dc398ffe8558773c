"""The entropy beside logprobs: right, with its gradient where it is trained, and elsewhere without an
effect on the bits of what is trained."""

from __future__ import annotations

import pytest
import torch

from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.torch.model import token_logprobs
from stages.engines.torch.model.token_logprobs import TokenLogprobs
from tests.batches import make_batch
from tests.stages.algorithms.test_interface import Observing
from tests.stages.engines.torch.test_train import engine_of, tiny_llama

SOURCE = torch.tensor([0, 0, 1, 3, 3, 2, 4])  # places that several rows share, and not in order
TARGETS = torch.tensor([5, 1, 0, 2, 2, 7, 9])


def logprobs(dtype: torch.dtype, with_entropy: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(5, 16, dtype=dtype, requires_grad=True)
    weight = (3 * torch.randn(11, 16)).to(dtype).requires_grad_()
    chosen, entropy = TokenLogprobs.apply(hidden, weight, None, SOURCE, TARGETS, 0.7, with_entropy)
    chosen.square().sum().backward()
    expected = ((hidden.float() @ weight.float().T) / 0.7).log_softmax(-1)
    wanted = -(expected.exp() * expected).sum(-1)[SOURCE]
    if with_entropy:
        torch.testing.assert_close(entropy, wanted)
    return [chosen.detach(), hidden.grad, weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [2, 256])
def test_the_entropy_is_that_of_each_distribution_and_changes_no_bit(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", chunk * 4 * 11)
    monkeypatch.setitem(token_logprobs.PIECE_BYTES, "cpu", 3 * 4 * 11)
    for one, other in zip(logprobs(dtype, False), logprobs(dtype, True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("entropy_weight", [0.0, 1.5])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("chunk", [2, 256])
def test_logprobs_and_entropy_are_trained_in_any_chunks(
    chunk: int, softcap: float | None, entropy_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the gradients of a float64 computation, with rows that pad the head."""
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", chunk * 4 * 11)
    monkeypatch.setitem(token_logprobs.PIECE_BYTES, "cpu", 3 * 4 * 11)
    torch.manual_seed(0)
    shapes = ((5, 16), (3, 16), (13, 3))  # hidden states, A, B
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    weight = torch.randn(13, 16)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]

    hidden, down, up = doubles
    logits = (hidden @ weight.double().T + 2 * hidden @ down.T @ up.T)[:, :11]
    capped = logits if softcap is None else softcap * (logits / softcap).tanh()
    everything = (capped / 0.7).log_softmax(-1)
    expected = everything[SOURCE, TARGETS]
    entropies = -(everything.exp() * everything).sum(-1)[SOURCE]
    weights = torch.arange(1.0, 8.0) * entropy_weight  # of each token
    (expected.square().sum() + (weights * entropies).sum()).backward()

    hidden, down, up = leaves
    options = SOURCE, TARGETS, 0.7, True, softcap, 11, None
    inner = 2 * hidden @ down.T
    chosen, entropy = TokenLogprobs.apply(hidden, weight, None, *options, inner, up)
    torch.testing.assert_close(chosen.double(), expected, rtol=1e-5, atol=1e-5)
    loss = chosen.square().sum()
    (loss + (weights * entropy).sum() if entropy_weight else loss).backward()
    for leaf, double in zip(leaves, doubles, strict=True):
        assert leaf.grad is not None
        assert double.grad is not None
        gap = (leaf.grad.double() - double.grad).norm()
        assert gap < 1e-6 * double.grad.norm()
    assert not up.grad[11:].any()  # type: ignore[index]


def test_a_probability_of_zero_adds_nothing() -> None:
    weight = torch.tensor([[200.0], [-200.0], [-200.0]])
    _, entropy = TokenLogprobs.apply(
        torch.ones(1, 1), weight, None, torch.tensor([0]), torch.tensor([0]), 1.0, True
    )
    assert entropy.tolist() == [pytest.approx(0.0, abs=1e-30)]


def test_a_step_reports_the_mean_over_trained_tokens() -> None:
    batch = make_batch()
    algorithm = Observing()
    rows = [torch.arange(len(row)) % 2 == 0 for row in batch["response_ids"].unbind()]
    batch["loss_mask"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    metrics = engine_of(tiny_llama(), token_budget=20).train_batch(batch, algorithm)
    entropies = torch.cat([tokens.entropy for tokens in algorithm.batches])
    assert len(entropies) == sum(int(row.sum()) for row in rows)
    assert metrics["entropy"] == pytest.approx(float(entropies.mean()))
    model = tiny_llama()
    wanted = []
    columns = (batch[name].unbind() for name in ("prompt_ids", "response_ids"))
    for prompt, response, kept in zip(*columns, rows, strict=True):
        with torch.no_grad():
            own = (
                model(torch.cat([prompt, response])[None])
                .logits[0, len(prompt) - 1 : -1]
                .log_softmax(-1)
            )
        wanted.append(-(own.exp() * own).sum(-1)[kept])
    assert metrics["entropy"] == pytest.approx(float(torch.cat(wanted).mean()), rel=1e-5)


def test_gaps_beyond_any_ratio_do_not_overflow() -> None:
    batch = make_batch()
    batch["rollout_logprobs"] = torch.nested.nested_tensor(
        [torch.full_like(row, -1e4) for row in batch["rollout_logprobs"].unbind()],
        layout=torch.jagged,
    )
    metrics = engine_of(tiny_llama()).train_batch(batch, GRPO())
    assert all(torch.tensor(value).isfinite() for value in metrics.values()), metrics
