"""Stages that other programs do: what they are told, and what of theirs is let in.

    somebody's columns ──▶ the stage's own? ──▶ dtype and shape (pack) ──▶ what they say of each other ──▶ commit
                                └──────────────┴── Misfit: column, row, fix ──┘

A wrong value is told to who sent it and reaches no trainer: what another program does can fail itself, never the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pipeline.blocks import pack
from pipeline.columns import Packed, Schema
from stages.rollout.stage import PROGRESS

TERMS = "external"  # the document of a run that holds them
LEAST_LOGPROB = -104.0  # of a token that was drawn: float32 holds no smaller probability than exp(-103.3)
LEAST_REFERENCE = -1e4  # of a token that another policy drew: float32 logits differ by no more
ROUNDING = 0.01  # by which a logprob may exceed 0: what bfloat16 loses
MOST_REWARD = 1e6  # of either sign: squares and sums of a batch stay well inside float32

MOST_UNKNOWN_BYTES = 64 * 2**20  # of weights of a model that is not known: a mock's

Columns = Mapping[str, Any]  # ragged ones as Packed, others as tensors [B, *shape]
Layout = Mapping[str, tuple[str, Sequence[int]]]  # a model's weights: dtype ("float32") and shape by parameter name


@dataclass(frozen=True)
class Terms:
    """What another program must know of a run: how many tokens the model has, how responses are drawn
    (:class:`stages.engines.protocols.SamplingParams`), the seed, how many reward functions there are, and what weights an
    external trainer publishes (None: the model is not known, or the run trains it itself)."""

    vocabulary: int
    sampling: dict[str, Any]
    seed: int
    rewards: int
    weights: Layout | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Terms:
        return cls(**json.loads(text))


class Misfit(ValueError):
    """A value of somebody else's that does not fit: ``column``, what is ``wrong`` with it, and what to do."""

    def __init__(self, column: str, wrong: str, fix: str) -> None:
        self.column, self.wrong, self.fix = column, wrong, fix
        super().__init__(f"column {column!r}: {wrong}; {fix}")


def check_columns(schema: Schema, columns: Columns, wanted: Sequence[str], rows: int) -> None:
    """``columns`` are the ``wanted`` ones, each with ``rows`` rows of its dtype and shape. Raises Misfit, ColumnError."""
    for name in wanted:
        if name not in columns:
            raise Misfit(name, "is missing", f"give all of {list(wanted)}")
    for name in columns:
        if name not in wanted:
            raise Misfit(name, "is not one that this stage makes", f"give {list(wanted)} and no other")
    for name, value in columns.items():
        if isinstance(value, Packed) == (schema[name].shape is None):
            continue
        wrong, give = (
            ("has offsets", "values alone") if isinstance(value, Packed) else ("has no offsets", "offsets too")
        )
        raise Misfit(name, wrong, f"it is {schema[name].describe()}: give {give}")
    packed = pack(schema, columns)
    if packed.rows != rows:
        raise Misfit(wanted[0], f"has {packed.rows} rows where {rows} are put", "give one for each row of 'rows'")


def check_responses(columns: Columns, terms: Terms, published: int, *, parked: bool = False) -> list[tuple[int, int]]:
    """Responses, ended ones or ``parked`` ones, whose dtypes and shapes are right: returns (oldest version, tokens) of
    each. Raises Misfit."""
    ids, logprobs, versions = (columns[name] for name in PROGRESS)
    lengths, most = ids.lengths(), int(terms.sampling["max_tokens"])
    _all(
        lengths >= 1,
        "response_ids",
        lambda row: f"row {row} has no token",
        "give at least one, the end of text if nothing else",
    )
    if parked:
        _all(
            lengths < most,
            "response_ids",
            lambda row: f"row {row} has all of max_tokens = {most}",
            "it has ended: commit it",
        )
    _all(
        lengths <= most,
        "response_ids",
        lambda row: f"row {row} has {int(lengths[row])} tokens",
        f"at most max_tokens = {most}",
    )
    known = (ids.values >= 0) & (ids.values < terms.vocabulary)
    _each(
        known,
        ids,
        "response_ids",
        "a token that the model does not have",
        f"its tokens are 0 .. {terms.vocabulary - 1}",
    )
    check_logprobs("rollout_logprobs", logprobs, lengths, LEAST_LOGPROB)
    if not parked:
        check_flags("truncated", columns["truncated"])
    return _made(versions, lengths, published)


def check_flags(name: str, flags: torch.Tensor) -> None:
    """``flags`` bool [B] are 0 or 1: a safetensors body may hold other bytes, which torch does not define. Raises Misfit."""
    given = flags.view(torch.uint8)
    _all(given <= 1, name, lambda row: f"row {row} has the byte {int(given[row])}", "give false or true, as 0 or 1")


def check_rewards(columns: Columns) -> None:
    """Rewards float32 [B] are finite, scores float32 [B, K] are finite or NaN (does not apply), both within
    :data:`MOST_REWARD`. Raises Misfit."""
    reward, scores = columns["reward"], columns["scores"]
    fix = f"give numbers from {-MOST_REWARD:g} to {MOST_REWARD:g}"
    _all(reward.abs() <= MOST_REWARD, "reward", lambda row: f"row {row} has {float(reward[row])}", fix)
    fine = ((scores.abs() <= MOST_REWARD) | scores.isnan()).all(dim=1)
    _all(fine, "scores", lambda row: f"row {row} has {scores[row].tolist()}", f"{fix}, or NaN where one does not apply")


def check_logprobs(name: str, logprobs: Packed, tokens: torch.Tensor, least: float = LEAST_REFERENCE) -> None:
    """One logprob for each of ``tokens`` (int64 [B]): finite, from ``least`` to 0. Raises Misfit."""
    found = logprobs.lengths()
    _all(
        found == tokens,
        name,
        lambda row: f"row {row} has {int(found[row])} for {int(tokens[row])} tokens",
        "give one for each token",
    )
    _each(
        logprobs.values.isfinite(),
        logprobs,
        name,
        "a value that is not finite",
        "give the logprob of the token that was drawn",
    )
    _each(
        (logprobs.values <= ROUNDING) & (logprobs.values >= least),
        logprobs,
        name,
        f"a value that is no logprob between {least:g} and 0",
        "give the natural logarithm of the token's probability",
    )


def nbytes_of(layout: Layout) -> int:
    return sum(getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in layout.values())


def check_layout(found: Layout, wanted: Layout | None) -> None:
    """Weights to be published have the names, dtypes and shapes that are ``wanted``; None: any floating dtypes, and at most
    :data:`MOST_UNKNOWN_BYTES`. Raises Misfit, of the column `weights`."""
    if not found:
        raise Misfit("weights", "has no tensor", "give all of the model's parameters")
    for name, (dtype, shape) in found.items():
        _check_tensor(name, dtype, shape, wanted)
    if wanted is None and nbytes_of(found) > MOST_UNKNOWN_BYTES:
        wrong = f"has {nbytes_of(found)} bytes, at most {MOST_UNKNOWN_BYTES} are taken for a model that is not known"
        raise Misfit("weights", wrong, "set model.source to the model that is trained")
    if wanted is not None and (missing := [name for name in wanted if name not in found]):
        raise Misfit("weights", f"lacks {_some(missing)}", "give all of the model's parameters")


def _check_tensor(name: str, dtype: str, shape: Sequence[int], wanted: Layout | None) -> None:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise Misfit("weights", f"{name[:200]!r} is {dtype}", "give floating-point tensors")
    if wanted is None:
        return
    if name not in wanted:
        raise Misfit("weights", f"has {name[:200]!r}, which the model has not", f"its parameters are {_some(wanted)}")
    fits, has = f"{wanted[name][0]} {[*wanted[name][1]]}", f"{dtype} {[*shape]}"
    if has != fits:
        raise Misfit("weights", f"{name!r} is {has}", f"the model's is {fits}")


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]], wanted: Layout | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """``weights`` one by one, each finite, and together as :func:`check_layout` asks. Raises Misfit."""
    found: dict[str, tuple[str, Sequence[int]]] = {}
    for name, value in weights:
        if name in found:
            raise Misfit("weights", f"has {name!r} twice", "give each parameter once")
        found[name] = (str(value.dtype).removeprefix("torch."), list(value.shape))
        _check_tensor(name, *found[name], wanted)
        if not bool(value.isfinite().all()):
            raise Misfit("weights", f"{name!r} has a value that is not finite", "look why the training diverged")
        yield name, value
    check_layout(found, wanted)


def _some(names: Iterable[str], most: int = 8) -> str:
    known = sorted(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


def _made(versions: Packed, lengths: torch.Tensor, published: int) -> list[tuple[int, int]]:
    """(oldest version, tokens) of rows with ``versions``, run-length encoded."""
    name, fix = "versions", "give version, tokens, version, tokens, … of each response"
    pairs = versions.lengths()
    _all((pairs > 0) & (pairs % 2 == 0), name, lambda row: f"row {row} has {int(pairs[row])} numbers", fix)
    each, row_of = versions.values.view(-1, 2), torch.repeat_interleave(torch.arange(len(pairs)), pairs // 2)
    _all(
        torch.zeros_like(lengths).scatter_reduce(0, row_of, each[:, 1], "amin", include_self=False) > 0,
        name,
        lambda row: f"row {row} has a version without tokens",
        fix,
    )
    told = torch.zeros_like(lengths).index_add_(0, row_of, each[:, 1])
    counts = torch.zeros_like(lengths).scatter_reduce(0, row_of, each[:, 1], "amax", include_self=False)
    told[counts > lengths] = -1  # a sum of larger ones might wrap around
    _all(
        told == lengths,
        name,
        lambda row: f"row {row} tells of {int(told[row])} tokens where it has {int(lengths[row])}",
        fix,
    )
    newest = torch.zeros_like(lengths).scatter_reduce(0, row_of, each[:, 0], "amax", include_self=False)
    oldest = torch.zeros_like(lengths).scatter_reduce(0, row_of, each[:, 0], "amin", include_self=False)
    known = (oldest >= 0) & (newest <= published)
    _all(
        known,
        name,
        lambda row: f"row {row} names versions {int(oldest[row])} to {int(newest[row])}",
        f"the published ones are 0 .. {published}: name the one that each token was made with",
    )
    return list(zip(oldest.tolist(), lengths.tolist(), strict=True))


def _all(good: torch.Tensor, column: str, wrong: Callable[[int], str], fix: str) -> None:
    """``good`` bool [B], one for each row."""
    if not bool(good.all()):
        raise Misfit(column, wrong(int((~good).nonzero()[0, 0])), fix)


def _each(good: torch.Tensor, packed: Packed, column: str, what: str, fix: str) -> None:
    """``good`` bool [values], one for each value."""
    if not bool(good.all()):
        at = int((~good).nonzero()[0, 0])
        assert packed.offsets is not None
        row = int(torch.searchsorted(packed.offsets, at, right=True)) - 1
        raise Misfit(column, f"row {row} has {what}, {packed.values[at].item()}", fix)
