"""Distillation of the teacher's next-token distributions (GKD, arXiv 2306.13649) on the student's
own responses, or on given ones.

    teacher   k most probable tokens of each place ─▶ teacher_ids, teacher_logprobs ─┐
    student   logprobs of these tokens, with gradient ─▶ tokens.candidates ──────────┴▶ divergence

Both distributions are compared over k + 1 events: each of the teacher's k tokens, and any other
token (the tail of SDPO, arXiv 2601.20802, and of TRL's DistillationTrainer). By the data-processing
inequality this is at most the divergence over the vocabulary, and it is that one where k is the
size of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stages.algorithms.interface import Algorithm, LossOutput
from stages.algorithms.token_batch import TokenBatch
from stages.flow.catalogue import TEACHER_IDS, TEACHER_LOGPROBS
from stages.flow.declarations import Columns, RunsOn

if TYPE_CHECKING:
    import torch

Divergence = Literal["forward", "reverse", "js"]
LEAST_LOGPROB = math.log(1e-38)  # of a token that cannot be: float32 has no smaller normal number
LEAST_TAIL = 1e-7  # probability of all other tokens: float32 cannot tell a smaller one from 0


class GKD(Algorithm):
    """Minimizes the divergence of the policy's next-token distributions from those of a frozen
    teacher, ``model.reference``, at each token of a response.

    Its gradient is exact, not sampled: each token teaches k + 1 numbers, where the policy gradient
    of ``distillation`` has one. No reward is needed; ``reward.functions`` score evaluations.
    ``prompts.responses`` gives responses that the policy has not generated (GKD's λ = 0).
    """

    name: ClassVar[str] = "gkd"
    use_for: ClassVar[str] = "As `distillation`, where the teacher's other tokens count too."
    citation: ClassVar[str] = """
    @misc{agarwal2023gkd,
      title = {On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes},
      author = {Agarwal, Rishabh and Vieillard, Nino and Zhou, Yongchao and others},
      year = {2023},
      eprint = {2306.13649},
      archivePrefix = {arXiv},
    }
    """
    credit_makes: ClassVar[Columns] = {}
    candidates: ClassVar[str] = TEACHER_IDS

    divergence: Divergence = Field(
        default="forward",
        description="With p of the teacher and q of the policy: `forward` is KL(p || q), `reverse` "
        "is KL(q || p), and `js` the generalized Jensen-Shannon divergence between them.",
    )
    js_beta: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="β of `js`, β KL(p || m) + (1 - β) KL(q || m) with m = β p + (1 - β) q: near 0 "
        "it is β times `forward`, near 1 it is 1 - β times `reverse`.",
    )
    top_k: int = Field(
        default=32,
        ge=1,
        description="Most probable tokens under the teacher, k, that are compared one by one; all "
        "others together are one event. The vocabulary's size compares all of them. A response "
        "token takes 8 k bytes of `pipeline.arena`.",
    )

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        return dict.fromkeys((TEACHER_IDS, TEACHER_LOGPROBS), "frozen model")

    @property
    def loss_reads(self) -> Columns:
        return {
            TEACHER_IDS: f"int32 ragged [{self.top_k}]",
            TEACHER_LOGPROBS: f"float32 ragged [{self.top_k}]",
        }

    def loss(self, tokens: TokenBatch) -> LossOutput:
        """Return the mean over tokens of the divergence (nats). Metrics: ``divergence``, and
        ``teacher_mass`` and ``policy_mass``, the probability of the teacher's k tokens."""
        if tokens.candidates is None:
            raise ValueError("top_k: this train engine computes logprobs of sampled tokens alone")
        teacher = tokens[TEACHER_LOGPROBS]
        beta = {"forward": 0.0, "reverse": 1.0, "js": self.js_beta}[self.divergence]
        per_token = divergence(with_tail(teacher), with_tail(tokens.candidates), beta)
        means = {
            "divergence": per_token,
            "teacher_mass": teacher.exp().sum(-1),
            "policy_mass": tokens.candidates.exp().sum(-1),
        }
        metrics = {
            name: value.detach().sum() / tokens.total_tokens for name, value in means.items()
        }
        return LossOutput(tokens.mean(per_token), metrics)


def with_tail(logprobs: torch.Tensor) -> torch.Tensor:
    """Return ``logprobs`` [T, k] of different tokens with that of any other token, [T, k + 1]."""
    import torch

    # Tokens that a structure forbids have a logprob of -inf.
    logprobs = logprobs.clamp(min=LEAST_LOGPROB)
    mass = logprobs.logsumexp(-1, keepdim=True).clamp(max=math.log1p(-LEAST_TAIL))
    return torch.cat([logprobs, (-mass.expm1()).log()], -1)


def divergence(teacher: torch.Tensor, student: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence [T] (arXiv 2306.13649, Eq. 1) of the
    distributions with logprobs [T, n]; at ``beta`` 0 and 1 the forward and the reverse KL
    divergence, to which it tends there, divided by β (1 - β)."""
    import torch

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p.exp() * (p - q)).sum(-1)

    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
