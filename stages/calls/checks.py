"""What a client sends of a pass, checked before anything is computed.

    name, options, data ─▶ checked ─▶ ChosenLoss, and by datum: tokens, targets, the loss's columns
                                  └─▶ CallRefused: the datum's number, the field, its value, the fix

Importing this needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stages.calls.custom import CustomLoss
from stages.calls.interface import AdamOptions, CallRefused, Datum, LossOptions
from stages.calls.losses import BUILT_IN, DatumColumns, Loss

TARGETS = "target_tokens"
LEAST_EPS = 1e-30  # of AdamW: with less, a gradient of 0 is divided by 0 in float32


LOSSES: Mapping[str, Loss] = {loss.name: loss for loss in (*BUILT_IN, CustomLoss())}


def checked_loss(name: str, options: LossOptions) -> tuple[Loss, dict[str, float]]:
    """Return the loss of this name, and all of its options. Raises CallRefused."""
    loss = LOSSES.get(name)
    if loss is None:
        raise CallRefused.of(
            "loss_fn", name, "is no loss of this server", f"use one of {[*LOSSES]}"
        )
    return loss.configured(options)


def checked_data(
    data: Sequence[Datum],
    loss: Loss,
    options: Mapping[str, float],
    *,
    vocabulary: int,
    context: int,
) -> list[DatumColumns]:
    """Return the columns of each datum. Inputs that the loss does not read are ignored. Raises
    CallRefused."""
    if not data:
        raise CallRefused.of("data", None, "is empty", "send at least one datum")
    columns = [
        _columns(f"data.{number}", datum, loss, options, vocabulary, context)
        for number, datum in enumerate(data)
    ]
    loss.check(columns)
    return columns


def checked_adam(options: AdamOptions) -> None:
    """Raise CallRefused for options with which a step is not defined, or not finite."""
    limits = {
        "learning_rate": (0.0, 1.0),
        "beta1": (0.0, math.nextafter(1, 0)),
        "beta2": (0.0, math.nextafter(1, 0)),
        "eps": (LEAST_EPS, 1.0),
        "weight_decay": (0.0, 1.0),
        "grad_clip_norm": (0.0, math.inf),
    }
    for name, (least, most) in limits.items():
        value = getattr(options, name)
        if not least <= value <= most:
            wrong = "is out of range"
            raise CallRefused.of(f"adam_params.{name}", value, wrong, f"use {least:g} to {most:g}")


def _columns(
    field: str,
    datum: Datum,
    loss: Loss,
    options: Mapping[str, float],
    vocabulary: int,
    context: int,
) -> DatumColumns:
    tokens = _integers(f"{field}.model_input", datum.tokens, vocabulary)
    if tokens.ndim != 1 or not 1 <= len(tokens) <= context:
        wrong = f"has the shape {[*tokens.shape]}"
        raise CallRefused.of(f"{field}.model_input", None, wrong, f"send 1 to {context} tokens")
    for name in (TARGETS, *loss.inputs):
        if name not in datum.inputs:
            wrong = f"is missing, which {loss.name} reads"
            fix = f"add it to {sorted(datum.inputs)}"
            raise CallRefused.of(f"{field}.loss_fn_inputs.{name}", None, wrong, fix)
    target_field = f"{field}.loss_fn_inputs.{TARGETS}"
    targets = _integers(target_field, datum.inputs[TARGETS], vocabulary)
    most = 2 if loss.several_targets else 1
    if not 1 <= targets.ndim <= most or len(targets) != len(tokens) or not targets.size:
        wrong = f"has the shape {[*targets.shape]}, for {len(tokens)} tokens of model_input"
        fix = f"send [{len(tokens)}]" + (f" or [{len(tokens)}, K]" if most == 2 else "")
        raise CallRefused.of(target_field, None, wrong, fix)
    inputs = dict(_inputs(field, datum, loss, options, targets.shape))
    return DatumColumns(tokens, targets, inputs)


def _inputs(
    field: str,
    datum: Datum,
    loss: Loss,
    options: Mapping[str, float],
    shape: tuple[int, ...],
) -> Iterator[tuple[str, np.ndarray]]:
    for name in (*loss.inputs, *loss.optional):
        values = datum.inputs.get(name)
        if values is None:
            yield name, np.full(shape, options.get(name, 1.0), np.float32)
            continue
        at = f"{field}.loss_fn_inputs.{name}"
        if values.dtype.kind not in "fiu":
            raise CallRefused.of(at, str(values.dtype), "is no dtype of numbers", "send float32")
        rank = loss.ranks.get(name)
        if rank is not None:
            values = values.reshape(()) if rank == 0 and values.size == 1 else values
            if values.ndim != rank:
                wrong = f"has the shape {[*values.shape]}, and {loss.name} reads rank {rank}"
                raise CallRefused.of(at, None, wrong, "declare the rank that it has")
            if values.dtype.kind in "iu":
                yield name, values.astype(np.int64)
                continue
        elif values.shape != shape:
            wrong = f"has the shape {[*values.shape]}, and {TARGETS} {[*shape]}"
            raise CallRefused.of(at, None, wrong, "make them equal")
        with np.errstate(over="ignore"):
            numbers = values.astype(np.float32)
        if not np.isfinite(numbers).all():
            place = int(np.flatnonzero(~np.isfinite(numbers))[0])
            wrong = f"at place {place} is no finite float32"
            raise CallRefused.of(at, str(values.flat[place]), wrong, "send finite numbers")
        yield name, numbers


def _integers(field: str, values: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return ``values`` as int64. Raises CallRefused where they are no tokens."""
    if values.dtype.kind not in "iu":
        raise CallRefused.of(field, str(values.dtype), "is no dtype of tokens", "send int64")
    wrong = np.flatnonzero((values < 0) | (values >= vocabulary))
    if len(wrong):
        value = int(values.flat[wrong[0]])
        problem = f"at place {int(wrong[0])} is no token of the model"
        raise CallRefused.of(field, value, problem, f"use 0 to {vocabulary - 1}")
    return values.astype(np.int64)
