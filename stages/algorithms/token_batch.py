"""The tokens of a micro-batch as an algorithm's loss sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Log-ratios are cut off here, as verl does: exp(20) is far past every clip. At 88 the ratio
# overflows float32, and the derivative of what clipping leaves out is 0 · inf.
MOST_LOG_RATIO = 20.0
# How old a trained token is, by the names of its metrics. A number: steps trained since, the last
# one or more. `resumed`: made by the weights that are trained now, after tokens of the same
# response that older ones made.
AGES = ("0", "1", "2", "3", "4", "resumed")


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of one micro-batch, packed: T tokens of R rows, and the sizes of the
    whole mini-batch.

    Tokens that the columns ``loss_mask`` and ``row_mask`` leave out are not in it. Sums over micro-batches divided
    by the ``total_*`` equal the loss of the mini-batch computed at once, so gradient accumulation
    is exact however rows are packed."""

    logprobs: torch.Tensor  # float32 [T], under the weights being trained, with gradient
    # what the loss reads, [T, …]; a row's single value at each of its tokens
    columns: Mapping[str, torch.Tensor]
    row: torch.Tensor  # int64 [T], which of the R rows a token belongs to
    row_tokens: torch.Tensor  # int64 [R], tokens of each row
    total_tokens: int  # of the whole mini-batch
    total_rows: int  # of the whole mini-batch
    total_groups: int = 1  # of the whole mini-batch
    # columns with a single value in each row, [R, …]
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # int64 [R], which of the micro-batch's groups a row belongs to
    group: torch.Tensor | None = None
    # float32 [T], the column row_weight at each token, where a stage makes one
    weight: torch.Tensor | None = None
    # float32 [T], nats, of the policy at each token, with gradient; torch engines
    entropy: torch.Tensor | None = None
    # float32 [T], with gradient, of the value head, where the algorithm has one
    values: torch.Tensor | None = None
    # float32 [T, k], logprobs of the tokens of the column Algorithm.candidates, with gradient
    candidates: torch.Tensor | None = None
    # int64 [T], index into AGES of each token, where the update stage gives it
    age: torch.Tensor | None = None
    # int64 [T], which sequence of the micro-batch a token belongs to, where a row has several: its
    # branches
    sequence: torch.Tensor | None = None
    # of Algorithm.control, as the train batches before have left it; torch engines
    control: Mapping[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The columns that there are."""
        return [*self.columns]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the column ``name`` at each token, [T, …]."""
        return self.columns[name]

    def mean(self, per_token: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's share of the mean over the mini-batch's tokens, each times its
        row's weight."""
        return (
            per_token if self.weight is None else per_token * self.weight
        ).sum() / self.total_tokens

    def mean_of_rows(self, per_token: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's share of the mean over rows of each row's mean, each row times
        its weight."""
        weighted = per_token if self.weight is None else per_token * self.weight
        return (weighted / self.row_tokens[self.row]).sum() / self.total_rows

    def row_sums(self, per_token: torch.Tensor) -> torch.Tensor:
        """Return the sum over each row's tokens, [R]."""
        return per_token.new_zeros(len(self.row_tokens)).index_add(0, self.row, per_token)

    def over_sequences(self, per_token: torch.Tensor, *, mean: bool) -> torch.Tensor:
        """Return at each token [T] the sum, or the mean, over the tokens of its sequence: of its
        row, or of its branch alone."""
        if self.sequence is None:
            of_sequence, at = self.row_tokens, self.row
        else:
            at = self.sequence
            count = int(at.max()) + 1 if len(at) else 0
            of_sequence = at.new_zeros(count).index_add(0, at, at.new_ones(len(at)))
        sums = per_token.new_zeros(len(of_sequence)).index_add(0, at, per_token)
        return (sums / of_sequence if mean else sums)[at]

    def behaviour_gap(self) -> dict[str, torch.Tensor]:
        """Return the differences of the trainer's logprobs from those that the rollout engine
        recorded, as metrics of the mini-batch: mean, maximum, and the k3 estimate of the KL
        divergence (http://joschu.net/blog/kl-approx.html). Of tokens made by the weights that are
        trained now it shows how two engines compute one policy; of older ones also how far the
        policy has moved: where :attr:`age` is known, sums and counts for each age keep the two
        apart. Empty where the loss does not read ``rollout_logprobs``."""
        if "rollout_logprobs" not in self.columns:
            return {}
        import torch

        difference = (self.logprobs - self.columns["rollout_logprobs"]).detach()
        size = difference.abs()
        cut = difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        ages = {}
        if self.age is not None:
            sums = size.new_zeros(len(AGES)).index_add(0, self.age, size)
            counts = size.new_zeros(len(AGES)).index_add(0, self.age, torch.ones_like(size))
            ages = {f"sum_gap_{age}": sums[at] for at, age in enumerate(AGES)}
            ages |= {f"tokens_gap_{age}": counts[at] for at, age in enumerate(AGES)}
        return ages | {
            "gap_mean": size.sum() / self.total_tokens,
            "gap_k3": (cut.exp() - 1 - cut).sum() / self.total_tokens,
            "max_gap": size.max(),
        }
