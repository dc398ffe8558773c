"""An algorithm with errors that name it, the method and the line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.problems import Fatal
from stages.algorithms.interface import Algorithm, LossOutput
from stages.algorithms.token_batch import AGES, TokenBatch
from stages.flow.declarations import Drop, RunsOn, column
from stages.user_code import place_of, shown

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch


LEAST_TOKENS = 16  # of one age that a mean is reported of


class AlgorithmError(Fatal, RuntimeError):
    """An algorithm raised, or returned what its method does not promise; the message names it, the
    method and the line."""


class NamedAlgorithm:
    """``algorithm`` under the name that the recipe gives it.

    Its methods raise :class:`AlgorithmError`; what it declares is passed through, but for the
    ``scores`` that are given here.
    """

    def __init__(
        self, name: str, algorithm: Algorithm, scores: Mapping[str, RunsOn] | None = None
    ) -> None:
        self.name = name
        self.algorithm = algorithm
        self.scores = algorithm.scores if scores is None else scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        out: Any = self._call("credit", group)
        if isinstance(out, Drop):
            if out.instead is not None:
                self._check_credit(group, out.instead)
            return out
        self._check_credit(group, out)
        return out  # type: ignore[no-any-return]

    def _check_credit(self, group: Mapping[str, Any], out: Any) -> None:
        import torch

        names = self.algorithm.credit_makes.keys()
        if not isinstance(out, Mapping) or out.keys() != names:
            raise self._wrong("credit", out, f"a dict with the columns {sorted(names)}, or a Drop")
        rows = len(next(iter(group.values())))
        for name, values in out.items():
            parts = (
                [values]
                if isinstance(values, torch.Tensor)
                else values
                if isinstance(values, list | tuple)
                else ()
            )
            tensors = bool(parts) and all(isinstance(part, torch.Tensor) for part in parts)
            if not tensors or (values is parts[0] and not values.dim()) or len(values) != rows:
                wanted = f"a tensor of {rows} values (a list of {rows} tensors where it is ragged)"
                raise self._wrong(
                    "credit", values, f"{wanted} in {name!r}, one for each row of the group"
                )
            numbers = values if values is parts[0] else torch.cat([row.flatten() for row in values])
            if not bool(numbers.isfinite().all()):
                raise self._wrong(
                    "credit", values, f"finite numbers in {name!r}, for {_short(group)}"
                )

    def check_columns(self, credit: Mapping[str, Any], tokens: Sequence[int]) -> None:
        """Raise AlgorithmError where a column of ``credit`` is not of its type, or a ragged one
        that the loss reads has not one value for each of the ``tokens`` of a row."""
        from pipeline.data.blocks import pack
        from pipeline.data.columns import ColumnError, Schema

        for name, values in credit.items():
            kind = self.algorithm.credit_makes[name]
            try:
                pack(Schema([column(name, kind)]), {name: values})
            except ColumnError as error:
                raise self._wrong("credit", values, f"{kind} in {name!r}: {error}") from error
            lengths = (
                [len(row) for row in values]
                if " ragged" in kind and name in self.algorithm.loss_reads
                else None
            )
            if lengths is not None and lengths != [*tokens]:
                wanted = (
                    f"values for {[*tokens]} tokens in {name!r}, as many as each response "
                    f"has, not {lengths}"
                )
                raise self._wrong("credit", values, wanted)

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        out: Any = self._call("prepare", batch)
        reads = self.algorithm.loss_reads.keys()
        makes = self.algorithm.prepare_makes.keys()
        if not isinstance(out, Mapping) or not makes <= out.keys() <= reads:
            wanted = f"a dict with {sorted(makes)} and some" if makes else "a dict with some"
            raise self._wrong("prepare", out, f"{wanted} of the columns {sorted(reads)}")
        for name, values in out.items():
            shape = batch.row.shape if name in makes else batch[name].shape
            if getattr(values, "shape", None) != shape:
                raise self._wrong("prepare", values, f"a tensor of shape {[*shape]} in {name!r}")
        return out

    def signal(self, batch: TrainBatch) -> float:
        out: Any = self._call("signal", batch)
        if not isinstance(out, int | float) or not 0 <= out <= 1:
            raise self._wrong("signal", out, "a number from 0 to 1")
        return float(out)

    def loss(self, tokens: TokenBatch) -> LossOutput:
        import torch

        out: Any = self._call("loss", tokens)
        if not isinstance(out, LossOutput):
            raise self._wrong("loss", out, "a stages.algorithms.LossOutput")
        if not isinstance(out.loss, torch.Tensor) or out.loss.numel() != 1:
            raise self._wrong("loss", out.loss, "a tensor of one number in LossOutput.loss")
        if tokens.logprobs.requires_grad and not out.loss.requires_grad:
            raise self._wrong(
                "loss", out.loss, "a loss with gradient: it must depend on tokens.logprobs"
            )
        return out

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        out: Any = self._call("finish", metrics)
        if not isinstance(out, dict) or not all(
            isinstance(value, int | float) for value in out.values()
        ):
            raise self._wrong("finish", out, "a dict of numbers")
        return out

    def draw(
        self, rows: Mapping[int, Mapping[int, float]], version: int
    ) -> Sequence[Mapping[int, tuple[int, ...]]]:
        out: Any = self._call("draw", rows, version)
        is_known = isinstance(out, list | tuple) and all(
            place in rows.get(group, {})
            for mini_batch in out
            for group, places in mini_batch.items()
            for place in places
        )
        if not is_known or not 0 < len(out) <= self.algorithm.mini_batches:
            wanted = f"places of the rows for 1 to {self.algorithm.mini_batches} optimizer steps"
            raise self._wrong("draw", out, wanted)
        return out

    def control(
        self, numbers: Mapping[str, float], metrics: Mapping[str, float]
    ) -> Mapping[str, float]:
        out: Any = self._call("control", numbers, metrics)
        names = self.algorithm.control_begins.keys()
        if not isinstance(out, Mapping) or out.keys() != names:
            raise self._wrong("control", out, f"a dict with the numbers {sorted(names)}")
        if not all(isinstance(number, int | float) for number in out.values()):
            raise self._wrong("control", out, "a dict of numbers")
        return out

    def _call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self.algorithm, method)
        try:
            return function(*arguments)
        except MemoryError:
            raise
        except Exception as error:
            # a failure of the device
            if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError"):
                raise
            place = place_of(error, function)
            has = f"; its columns are {columns}" if (columns := _missed(error, arguments)) else ""
            raise AlgorithmError(
                f"algorithm {self.name!r} raised {error!r} in {method} ({place}){has}"
            ) from error

    def _wrong(self, method: str, out: Any, wanted: str) -> AlgorithmError:
        place = place_of(AlgorithmError(), getattr(self.algorithm, method))
        return AlgorithmError(
            f"algorithm {self.name!r} returned {shown(out)} from {method} ({place}); wanted is "
            f"{wanted}"
        )


AlgorithmLike = Algorithm | NamedAlgorithm


def split_gap(metrics: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of :meth:`TokenBatch.behaviour_gap`, as they are reported, and the rest of
    ``metrics``. ``gap_mean_AGE`` is the mean over the tokens of that age, where there are
    :data:`LEAST_TOKENS` or more."""
    names = {"max_gap": "gap_max", "gap_mean": "gap_mean", "gap_k3": "gap_k3"}
    gap = {new: metrics[name] for name, new in names.items() if name in metrics}
    for age in AGES:
        if (tokens := metrics.get(f"tokens_gap_{age}", 0.0)) >= LEAST_TOKENS:
            gap[f"gap_mean_{age}"] = metrics[f"sum_gap_{age}"] / tokens
    names |= {f"{part}_gap_{age}": "" for age in AGES for part in ("sum", "tokens")}
    return gap, {name: value for name, value in metrics.items() if name not in names}


def _missed(error: Exception, arguments: Sequence[Any]) -> list[str]:
    """Return the columns that there are, where ``error`` says that a method has asked for another
    one."""
    if not isinstance(error, KeyError):
        return []
    return sorted(
        name
        for argument in arguments
        for name in getattr(argument, "names", None) or list(argument)
    )


def _short(group: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {getattr(value, 'tolist', lambda v=value: v)()!r:.100}"
        for name, value in group.items()
    )
