"""Layouts: the parallel sizes of several ranks, where each rank sits, and who its neighbours are.

    dense    rank = (((stage · dp_replicate + copy) · dp_shard + shard) · cp + context) · tp + column
    experts  rank = ((stage · rest + data) · ep + expert) · etp + column
             with ``ep_order = "outer"``: ((stage · ep + expert) · rest + data) · etp + column

Pipeline stages are outermost and tensor-parallel ranks neighbours. The experts of a stage use the
same ranks in an order of their own. Context parallelism splits sequences, not weights: for those,
its ranks are further data-parallel shards, as in torchtitan.

Arithmetic alone: this module imports neither torch nor an engine. What needs process groups makes
them from a layout (stages/engines/torch/parallel/mesh.py), and takes the layout as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pipeline.problems import Problem, ProblemError
from stages.parallel.schedules import Action, filled, holder, orders

Side = Literal["train", "rollout"]
ExpertOrder = Literal["inner", "outer"]
ContextParallel = Literal["ulysses", "ring"]
Axis = Literal["dp", "cp", "tp", "ep", "pp"]

_WORDS: dict[str, Any] = {
    "ep_order": ExpertOrder,
    "context_parallel": ContextParallel,
}
"""Fields of a layout that are no number of ranks."""


class LayoutError(ProblemError, ValueError):
    """A layout that is not valid or does not fit its model. ``wrong`` has the value of ``key``."""

    def __init__(self, key: str, wrong: str, fix: str) -> None:
        super().__init__(Problem(key, None, wrong, fix))


@dataclass(frozen=True)
class Layout:
    """A product of parallelisms over ``world`` ranks.

    >>> layout = Layout(dp_shard=2, tp=2, pp=2)
    >>> layout.world, layout.coordinates(5).stage, layout.coordinates(5).replica
    (8, 1, 0)
    """

    pp: int = 1
    """Pipeline stages, each of which has some of the layers."""

    vpp: int = 1
    """Parts of the layers that each stage has."""

    dp_replicate: int = 1
    """Copies of the weights (HSDP)."""

    dp_shard: int = 1
    """Ranks that split dimension 0 of what tensor parallelism left (FSDP2, ZeRO-3)."""

    cp: int = 1
    """Ranks that divide the tokens of each micro-batch."""

    tp: int = 1
    """Ranks that split the columns or rows of matrices."""

    ep: int = 1
    """Ranks to which experts are dealt out, among the data- and tensor-parallel ranks of a
    stage."""

    etp: int | None = None
    """Ranks that split each expert. None: ``tp`` while ``ep`` is 1, else 1."""

    ep_order: ExpertOrder = "inner"
    """``inner``: neighbours hold different experts (Megatron-Core, torchtitan, vLLM). ``outer``:
    the same."""

    context_parallel: ContextParallel = "ulysses"
    """How context-parallel ranks compute attention."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in _WORDS:
                if value not in (known := get_args(_WORDS[name])):
                    fix = f"use {' or '.join(map(repr, known))}"
                    raise LayoutError(name, f"{value!r} is unknown", fix)
            elif not isinstance(value, int | None) or (value is not None and value < 1):
                problem = f"{value!r} is no number of ranks"
                raise LayoutError(name, problem, "use a whole number >= 1")
        among, ranks = (
            ("dp_shard", self.fsdp) if self.fsdp > 1 else ("dp_replicate", self.dp_replicate)
        )
        shared = ranks * self.tp
        if shared % (self.ep * self.expert_tp):
            raise LayoutError(
                "ep",
                f"{self.ep} with etp = {self.expert_tp} does not divide the {shared} ranks of "
                f"{among} · tp that experts are dealt out to",
                f"use a divisor of {shared} for ep · etp",
            )

    @classmethod
    def for_training(cls, *, dp: int = 1, dp_replicate: int = 1, **sizes: Any) -> Layout:
        """Return the layout of a train engine, by the keys of a recipe's section; experts are not
        split (``etp`` 1). ``dp``: copies times shards. Raises :class:`LayoutError`."""
        if dp % dp_replicate:
            problem = f"{dp_replicate} does not divide dp = {dp}"
            raise LayoutError("dp_replicate", problem, "use a divisor of it")
        return cls(dp_replicate=dp_replicate, dp_shard=dp // dp_replicate, etp=1, **sizes)

    @property
    def recipe_keys(self) -> dict[str, Any]:
        """The keys of a recipe's section from which :meth:`for_training` makes this layout."""
        not_keys = ("dp_shard", "etp", "ep_order")
        keys = {name: size for name, size in vars(self).items() if name not in not_keys}
        return {**keys, "dp": self.replicas}

    @property
    def beyond_train_engine(self) -> list[str]:
        """The parts of this layout that the train engine does not have, as ``key=value``."""
        beyond = []
        if self.etp not in (None, 1):
            beyond.append(f"etp={self.etp}")
        if self.ep_order == "outer" and self.ep > 1:
            beyond.append("ep_order=outer")
        return beyond

    @property
    def replicas(self) -> int:
        """Shares of a batch: data-parallel ranks, in copies and shards."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Data-parallel shards of the weights, with context-parallel ranks among them."""
        return self.dp_shard * self.cp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.replicas * self.cp * self.tp

    @property
    def world(self) -> int:
        return self.pp * self.stage_ranks

    @property
    def expert_tp(self) -> int:
        return self.etp or (self.tp if self.ep == 1 else 1)

    @property
    def expert_shard(self) -> int:
        """Data-parallel shards of an expert."""
        return self.fsdp * self.tp // (self.ep * self.expert_tp) if self.fsdp > 1 else 1

    @property
    def expert_parts(self) -> int:
        """Parts into which the experts of a layer are split, by every means."""
        return self.ep * self.expert_tp * self.expert_shard

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage that hold the same part of an expert."""
        return self.stage_ranks // self.expert_parts

    @property
    def virtual_stages(self) -> int:
        return self.pp * self.vpp

    def stage_of(self, virtual_stage: int) -> int:
        """Return the pipeline stage that has ``virtual_stage``."""
        return holder(virtual_stage, self.pp)

    @property
    def last_stage(self) -> int:
        """The pipeline stage with the last layers and the output head."""
        return self.stage_of(self.virtual_stages - 1)

    def filled(self, micro_batches: int) -> int:
        """Return the number of micro-batches of a step with the idle ones that its order of passes
        needs."""
        return filled(self.pp, self.vpp, micro_batches)

    def orders(self, micro_batches: int, *, backward: bool = True) -> list[list[Action]]:
        """Return the passes of each pipeline stage, in order: see
        :func:`stages.parallel.schedules.orders`."""
        return orders(self.pp, self.vpp, micro_batches, backward=backward)

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of ``rank``. Raises :class:`LayoutError` for one outside the
        layout."""
        if not 0 <= rank < self.world:
            raise LayoutError("rank", f"{rank} of {self.world}", "ranks are counted from 0")
        stage, within = divmod(rank, self.stage_ranks)
        data, tp = divmod(within, self.tp)
        expert_rest, etp = divmod(within, self.expert_tp)
        if self.ep_order == "inner":
            expert_data, ep = divmod(expert_rest, self.ep)
        else:
            ep, expert_data = divmod(expert_rest, self.expert_copies * self.expert_shard)
        return RankCoordinates(
            layout=self,
            rank=rank,
            stage=stage,
            replica=data // self.cp,
            shard=data % self.fsdp,
            tp=tp,
            ep=ep,
            etp=etp,
            expert_shard=expert_data % self.expert_shard,
        )

    @property
    def meshes(self) -> dict[str, dict[str, int]]:
        """Meshes over all ranks of a train engine, by use: sizes by dimension, the outermost first.

        ``replicas``: the shares of a batch. ``context``: the parts of a micro-batch. ``layers``:
        the ranks that divide a layer's weights. ``outside``: those that divide a stage's other
        weights, tensor-parallel ones among them. ``experts``: those that divide an expert, and
        share out all. ``stages``: the pipeline stages."""
        meshes = {
            "replicas": {"dp": self.replicas, "inner": self.cp * self.tp},
            "context": {"dp": self.replicas, "cp": self.cp, "tp": self.tp},
            "layers": {"dp_replicate": self.dp_replicate, "dp": self.fsdp, "tp": self.tp},
            "outside": {"dp_replicate": self.dp_replicate, "dp": self.fsdp * self.tp},
            "experts": {"dp_replicate": self.expert_copies, "dp": self.expert_shard, "ep": self.ep},
            "stages": {"dp": self.stage_ranks},
        }
        return {use: {"pp": self.pp, **of_stage} for use, of_stage in meshes.items()}

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks of a train engine that ``rank`` shares ``axis`` with, itself among them.

        >>> Layout(dp_shard=2, tp=2, pp=2).group("dp", 5)
        (5, 7)
        """
        stride = 1
        mesh = next(mesh for mesh in self.meshes.values() if axis in mesh)
        for name, size in reversed(mesh.items()):
            if name == axis:
                break
            stride *= size
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + size * stride, stride))

    def __str__(self) -> str:
        sizes = [
            f"{name}={size}"
            for name, size in vars(self).items()
            if size not in (1, getattr(Layout, name))
        ]
        return ",".join(sizes) or "one rank"


@dataclass(frozen=True)
class RankCoordinates:
    """The coordinates of ``rank`` in ``layout``: its place along each axis that decides what it
    holds or computes."""

    layout: Layout
    rank: int

    stage: int
    """Pipeline stage."""

    replica: int
    """The share of a batch that it takes, of ``layout.replicas``."""

    shard: int
    """The shard of dense weights that it holds, of ``layout.fsdp``."""

    tp: int
    ep: int
    etp: int

    expert_shard: int
    """The shard of its experts that it holds."""

    @property
    def world(self) -> int:
        """Ranks of the layout."""
        return self.layout.world

    @property
    def virtual_stages(self) -> list[int]:
        """The virtual stages that this rank has, in order."""
        layout = self.layout
        return [
            each for each in range(layout.virtual_stages) if layout.stage_of(each) == self.stage
        ]


def parse_layout(text: str, side: Side) -> Layout:
    """Parse a layout such as ``dp=2,tp=2``. As in a recipe, ``dp`` is ``dp_shard`` for training and
    ``dp_replicate`` for generation. Raises :class:`LayoutError`."""
    known = Layout.__dataclass_fields__
    values: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        name = {"dp": "dp_shard" if side == "train" else "dp_replicate"}.get(key, key)
        if name not in known:
            fix = f"use dp, {', '.join(known)}, as in 'dp=2,tp=2'"
            raise LayoutError(key, "is no part of a layout", fix)
        if name in values:
            raise LayoutError(key, f"{item!r} gives {name} a second time", "give it once")
        if name in _WORDS:
            values[name] = value
            continue
        if not equals or not value.isdecimal():
            raise LayoutError(key, f"{value!r} is no number of ranks", f"write for example {key}=2")
        values[name] = int(value)
    return Layout(**values)


ALONE = Layout().coordinates(0)
"""The rank of an engine in one process."""
