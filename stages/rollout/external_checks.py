"""Checks of the values that external stages send.

    columns ──▶ the stage's own? ──▶ dtype and shape (pack) ──▶ do they agree with each other? ──▶ commit
                     └─────────────┴── Misfit: column, row, fix ──┘

A wrong value is reported to the program that sent it and reaches no trainer: it fails that program,
not the run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pipeline.data.blocks import pack
from pipeline.data.columns import Packed, Schema
from pipeline.problems import Problem, ProblemError
from stages.flow.catalogue import TOKEN_REWARDS
from stages.rollout.stage import PROGRESS

# Of a request, beside its columns; "weights" are its body.
FIELDS = ("version", "rows", "park", "step", "columns", "tokenizer", "weights")
LEAST_LOGPROB = -104.0  # of a drawn token: float32 holds no smaller probability than exp(-103.3)
LEAST_REFERENCE = -1e4  # of a token that another policy drew: float32 logits differ by no more
ROUNDING = 0.01  # by which a logprob may exceed 0: the error of bfloat16
MOST_REWARD = 1e6  # of either sign: squares and sums of a batch stay well inside float32
MOST_UNKNOWN_BYTES = 64 * 2**20  # of the weights of an unknown model, such as a mock's

Columns = Mapping[str, Any]  # ragged ones as Packed, others as tensors [B, *shape]
# a model's weights: dtype ("float32") and shape by parameter name
Layout = Mapping[str, tuple[str, Sequence[int]]]


@dataclass(frozen=True)
class Terms:
    """The facts of a run that an external program must know: the model's number of tokens, how
    responses are drawn (:class:`stages.engines.protocols.SamplingParams`), the seed, the number of
    reward functions, the weights that an external trainer publishes (None: the model is not known,
    or the run trains it itself), and the fingerprint of the tokenizer's vocabulary
    (:func:`fingerprint`).
    """

    vocabulary: int
    sampling: dict[str, Any]
    seed: int
    rewards: int
    weights: Layout | None = None
    tokenizer: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Terms:
        return cls(**json.loads(text))


class Misfit(ProblemError, ValueError):
    """A value of an external stage that is refused: of a ``column``, or of one of
    :data:`FIELDS`."""

    def __init__(self, column: str, wrong: str, fix: str) -> None:
        problem = Problem(column if column in FIELDS else f"columns.{column}", None, wrong, fix)
        super().__init__(problem, message=f"column {column!r}: {wrong}; {fix}")


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Return the sha256, in hex, of a tokenizer's ``get_vocab()``: of the JSON list of its [id,
    token] pairs by id, then by token, in ASCII and without spaces.

    >>> fingerprint({"b": 1, "a": 0})[:16]
    'ed2ad7c772b1dcb6'
    """
    pairs = sorted((number, token) for token, number in vocabulary.items())
    return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()


def check_tokenizer(given: str, terms: Terms) -> None:
    """Check that a program's tokenizer, by its fingerprint, is the run's. Raises Misfit."""
    if terms.tokenizer and given != terms.tokenizer:
        problem = (
            f"{given[:12]}… is not the fingerprint of the run's vocabulary, {terms.tokenizer[:12]}…"
        )
        fix = (
            "load the tokenizer of the run's model.source; the fingerprint is that of "
            "stages.rollout.external_checks"
        )
        raise Misfit("tokenizer", problem, fix)


def check_columns(schema: Schema, columns: Columns, wanted: Sequence[str], rows: int) -> None:
    """Check that ``columns`` are the ``wanted`` ones, each with ``rows`` rows of its dtype and
    shape. Raises Misfit, ColumnError."""
    for name in wanted:
        if name not in columns:
            raise Misfit(name, "is missing", f"give all of {list(wanted)}")
    for name, value in columns.items():
        if name not in wanted:
            raise Misfit(
                name, "is not one that this stage makes", f"give {list(wanted)} and no other"
            )
        is_packed = isinstance(value, Packed)
        if is_packed != (schema[name].shape is None):
            problem, give = (
                ("has offsets", "values alone") if is_packed else ("has no offsets", "offsets too")
            )
            raise Misfit(name, problem, f"it is {schema[name].describe()}: give {give}")
    packed = pack(schema, columns)
    if packed.rows != rows:
        raise Misfit(
            wanted[0],
            f"has {packed.rows} rows where {rows} are put",
            "give one for each row of 'rows'",
        )


def check_responses(
    columns: Columns, terms: Terms, published: int, *, parked: bool = False
) -> list[tuple[int, int]]:
    """Check responses, completed or ``parked``, of the right dtypes and shapes, and return
    (oldest version, tokens) of each. Raises Misfit."""
    ids, logprobs, versions = (columns[name] for name in PROGRESS)
    lengths = ids.lengths()
    most = int(terms.sampling["max_tokens"])
    last = terms.vocabulary - 1
    name = "response_ids"
    _rows(
        lengths >= 1,
        name,
        lambda row: "has no token",
        "give at least one, the end of text if nothing else",
    )
    if parked:
        _rows(
            lengths < most,
            name,
            lambda row: f"has all of max_tokens = {most}",
            "it has ended: commit it",
        )
    _rows(
        lengths <= most,
        name,
        lambda row: f"has {int(lengths[row])} tokens",
        f"at most max_tokens = {most}",
    )
    known = (ids.values >= 0) & (ids.values <= last)
    _values(known, ids, name, "a token that the model does not have", f"its tokens are 0 .. {last}")
    check_logprobs("rollout_logprobs", logprobs, lengths, LEAST_LOGPROB)
    if not parked:
        # a safetensors body may hold other bytes than 0 and 1
        flags = columns["truncated"].view(torch.uint8)
        _rows(
            flags <= 1,
            "truncated",
            lambda row: f"has the byte {int(flags[row])}",
            "give false or true, as 0 or 1",
        )
    return _oldest_versions(versions, lengths, published)


def check_rewards(columns: Columns) -> None:
    """Check that rewards float32 [B] are finite and scores float32 [B, K] finite or NaN (does not
    apply), both within :data:`MOST_REWARD`. Raises Misfit."""
    reward = columns["reward"]
    scores = columns["scores"]
    fix = f"give numbers from {-MOST_REWARD:g} to {MOST_REWARD:g}"
    _rows(reward.abs() <= MOST_REWARD, "reward", lambda row: f"has {float(reward[row])}", fix)
    is_fine = ((scores.abs() <= MOST_REWARD) | scores.isnan()).all(dim=1)
    fix = f"{fix}, or NaN where one does not apply"
    _rows(is_fine, "scores", lambda row: f"has {scores[row].tolist()}", fix)


def check_token_rewards(rewards: Packed, tokens: torch.Tensor) -> None:
    """Check that there is one reward for each of ``tokens`` (int64 [B]), within
    :data:`MOST_REWARD`, or NaN. Raises Misfit."""
    counts = rewards.lengths()
    describe = lambda row: f"has {int(counts[row])} for {int(tokens[row])} tokens"  # noqa: E731
    _rows(counts == tokens, TOKEN_REWARDS, describe, "give one for each token, NaN where none is")
    values = rewards.values
    is_fine = (values.abs() <= MOST_REWARD) | values.isnan()
    fix = f"give numbers from {-MOST_REWARD:g} to {MOST_REWARD:g}, or NaN"
    _values(is_fine, rewards, TOKEN_REWARDS, "a reward out of range", fix)


def check_logprobs(
    name: str, logprobs: Packed, tokens: torch.Tensor, least: float = LEAST_REFERENCE
) -> None:
    """Check that there is one logprob for each of ``tokens`` (int64 [B]), finite, from ``least``
    to 0. Raises Misfit."""
    counts = logprobs.lengths()
    values = logprobs.values
    describe = lambda row: f"has {int(counts[row])} for {int(tokens[row])} tokens"  # noqa: E731
    _rows(counts == tokens, name, describe, "give one for each token")
    fix = "give the logprob of the token that was drawn"
    _values(values.isfinite(), logprobs, name, "a value that is not finite", fix)
    is_logprob = (values <= ROUNDING) & (values >= least)
    fix = "give the natural logarithm of the token's probability"
    _values(is_logprob, logprobs, name, f"a value that is no logprob between {least:g} and 0", fix)


def nbytes_of(layout: Layout) -> int:
    """Return the number of bytes of all tensors of ``layout``."""
    return sum(
        getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in layout.values()
    )


def check_layout(found: Layout, wanted: Layout | None) -> None:
    """Check that weights have the names, dtypes and shapes of ``wanted``; None: any floating
    dtypes, and at most :data:`MOST_UNKNOWN_BYTES`. Raises Misfit with the column `weights`."""
    if not found:
        raise Misfit("weights", "has no tensor", "give all of the model's parameters")
    for name, (dtype, shape) in found.items():
        _check_tensor(name, dtype, shape, wanted)
    if wanted is None and nbytes_of(found) > MOST_UNKNOWN_BYTES:
        problem = (
            f"has {nbytes_of(found)} bytes, at most {MOST_UNKNOWN_BYTES} are allowed for an "
            f"unknown model"
        )
        raise Misfit("weights", problem, "set model.source to the model that is trained")
    if wanted is not None and (missing := [name for name in wanted if name not in found]):
        raise Misfit("weights", f"lacks {_some(missing)}", "give all of the model's parameters")


def _check_tensor(name: str, dtype: str, shape: Sequence[int], wanted: Layout | None) -> None:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise Misfit("weights", f"{name[:200]!r} is {dtype}", "give floating-point tensors")
    if wanted is None:
        return
    if name not in wanted:
        raise Misfit(
            "weights",
            f"has {name[:200]!r}, which the model does not have",
            f"its parameters are {_some(wanted)}",
        )
    fits = f"{wanted[name][0]} {[*wanted[name][1]]}"
    has = f"{dtype} {[*shape]}"
    if has != fits:
        raise Misfit("weights", f"{name!r} is {has}", f"the model's is {fits}")


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]], wanted: Layout | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``weights`` after checking that each is finite, and all of them with
    :func:`check_layout`. Raises Misfit."""
    layout: dict[str, tuple[str, Sequence[int]]] = {}
    for name, value in weights:
        if name in layout:
            raise Misfit("weights", f"has {name!r} twice", "give each parameter once")
        layout[name] = (str(value.dtype).removeprefix("torch."), list(value.shape))
        _check_tensor(name, *layout[name], wanted)
        if not bool(value.isfinite().all()):
            raise Misfit(
                "weights",
                f"{name!r} has a value that is not finite",
                "find out why the training diverged",
            )
        yield name, value
    check_layout(layout, wanted)


def _some(names: Iterable[str], most: int = 8) -> str:
    known = sorted(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


def _oldest_versions(
    versions: Packed, lengths: torch.Tensor, published: int
) -> list[tuple[int, int]]:
    """Return (oldest version, tokens) of responses of ``lengths`` tokens, from their run-length
    encoded ``versions``."""
    name = "versions"
    fix = "give version, tokens, version, tokens, … of each response"
    numbers = versions.lengths()
    _rows(
        (numbers > 0) & (numbers % 2 == 0),
        name,
        lambda row: f"has {int(numbers[row])} numbers",
        fix,
    )
    version, count = versions.values.view(-1, 2).unbind(1)
    row_of = torch.repeat_interleave(torch.arange(len(numbers)), numbers // 2)

    def of_rows(values: torch.Tensor, how: str) -> torch.Tensor:
        return torch.zeros_like(lengths).scatter_reduce(0, row_of, values, how, include_self=False)

    _rows(of_rows(count, "amin") > 0, name, lambda row: "has a version without tokens", fix)
    total = of_rows(count, "sum")
    total[of_rows(count, "amax") > lengths] = -1  # a sum of larger ones might wrap around
    describe = lambda row: f"counts {int(total[row])} tokens where it has {int(lengths[row])}"  # noqa: E731
    _rows(total == lengths, name, describe, fix)
    oldest = of_rows(version, "amin")
    newest = of_rows(version, "amax")
    describe = lambda row: f"names versions {int(oldest[row])} to {int(newest[row])}"  # noqa: E731
    fix = f"the published ones are 0 .. {published}: name the one that made each token"
    _rows((oldest >= 0) & (newest <= published), name, describe, fix)
    return list(zip(oldest.tolist(), lengths.tolist(), strict=True))


def _rows(good: torch.Tensor, column: str, wrong: Callable[[int], str], fix: str) -> None:
    """Raise Misfit with the first row for which ``good`` (bool [B]) is false."""
    if not bool(good.all()):
        row = int((~good).nonzero()[0, 0])
        raise Misfit(column, f"row {row} {wrong(row)}", fix)


def _values(good: torch.Tensor, packed: Packed, column: str, wrong: str, fix: str) -> None:
    """Raise Misfit with the first value of ``packed`` for which ``good`` (bool [values]) is
    false."""
    if not bool(good.all()):
        at = int((~good).nonzero()[0, 0])
        assert packed.offsets is not None
        row = int(torch.searchsorted(packed.offsets, at, right=True)) - 1
        raise Misfit(column, f"row {row} has {wrong}, {packed.values[at].item()}", fix)
