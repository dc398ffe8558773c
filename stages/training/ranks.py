"""The rank group: the processes of one train engine, which make the same calls at the same time.

    rank 0 (has the update stage's controller)        ranks 1 …
      serve a store          ─▶ order "meet" ─────────▶ connect; all join torch.distributed's group
      claim ─▶ deal the rows ─▶ order "train" ────────▶ fetch its own rows ─▶ engine.train_batch
      commit the step        ─▶ order "publish" ──────▶ gather the weights with all, publish an own part of them
      every k steps          ─▶ order "save" ─────────▶ write its shard
      the work is done       ─▶ order "end" ──────────▶ end

An order is a numbered entry of a log in the index, so a rank waits for it on the server, for as
long as it takes, and no collective call's deadline runs meanwhile. The ranks end together; those
that are started next have a log of another name. What a rank other than 0 does:
:mod:`stages.training.rank_worker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog
import torch
from tensordict import TensorDict

from pipeline.data.columns import Packed
from pipeline.index.client import Claim, Index
from pipeline.warehouse.dock import Dock
from stages.algorithms.named import AlgorithmLike
from stages.engines.plans import GroupShape, deal
from stages.flow.catalogue import AGE, MASK, ROW_MASK, STALENESS, TOKEN_STALENESS, VERSIONS
from stages.parallel.layout import ALONE, RankCoordinates
from stages.training.token_versions import staleness_of
from stages.weights.documents import RANK_ORDERS, RANK_PARTS
from stages.weights.published import Published, joined

log = structlog.get_logger()


class RankGroup:
    """The rank group as the rank at ``coordinates`` sees it.

    ``life`` names its log; another one after each restart.
    """

    def __init__(self, index: Index, coordinates: RankCoordinates = ALONE, life: str = "") -> None:
        self.index = index
        self.coordinates = coordinates
        self._life = life
        self._number = 0
        self._orders = RANK_ORDERS.at(life=life)
        self._sent: list[int] = []  # entries of the log
        self._heard = False  # all ranks have surely read all of them
        self._parts = 0  # versions of which the ranks have published their parts

    async def broadcast(self, do: str, *, together: bool = True, **what: Any) -> None:
        """Order what all ranks do next.

        ``together``: rank 0 makes the call with all of them, so that all have read this order when
        it sends the next one.
        """
        if self.coordinates.world == 1:
            return
        await self._orders.append(self.index, self._number, {"do": do, **what})
        if self._heard:
            for number in self._sent:
                await self._orders.trim(self.index, number)
            self._sent = []
        self._sent.append(self._number)
        self._heard = together
        self._number += 1

    async def receive(self) -> dict[str, Any]:
        """Wait for the next order, and return it."""
        order = await self._orders.next(self.index, self._number)
        self._number += 1
        return order

    async def send_part(self, part: Published) -> None:
        """Give rank 0 the record of what this rank has published of a version."""
        log = RANK_PARTS.at(life=self._life, rank=self.coordinates.rank)
        await log.append(self.index, self._parts, {"buckets": part.buckets, "source": part.source})
        self._parts += 1

    async def join_parts(self, own: Published) -> Published:
        """Wait, on rank 0, until all other ranks have published their part of a version, and return
        its whole record."""
        parts = [own]
        for rank in range(1, self.coordinates.world):
            log = RANK_PARTS.at(life=self._life, rank=rank)
            record = await log.next(self.index, self._parts)
            await log.trim(self.index, self._parts)
            buckets = tuple((offset, nbytes, xxh3) for offset, nbytes, xxh3 in record["buckets"])
            parts.append(replace(own, buckets=buckets, source=record["source"]))
        self._parts += 1
        return joined(parts)

    async def deal(self, dock: Dock, claim: Claim, algorithm: AlgorithmLike) -> list[list[int]]:
        """Returns the claim's positions for each replica, so that the tokens of each of the
        algorithm's mini-batches are balanced. The result depends on the claim alone, so that a
        replay gets the same."""
        replicas = self.coordinates.layout.replicas
        if replicas == 1:
            return [list(range(len(claim)))]
        groups: dict[int, list[int]] = {}
        for position in sorted(
            range(len(claim)), key=lambda at: (claim.group[at], claim.place[at])
        ):
            groups.setdefault(int(claim.group[position]), []).append(position)
        members = list(groups.values())
        prompts = await dock.fetch_packed(
            claim.part([positions[0] for positions in members]), ["prompt_ids"]
        )
        lengths = trained = claim.tokens
        names = [name for name in (MASK, ROW_MASK) if name in dock.schema]
        masks = await dock.fetch_packed(claim, names) if names else {}
        if MASK in masks:
            lengths = masks[MASK].lengths().numpy()
            trained = masks[MASK].sums().numpy()
        if ROW_MASK in masks:
            trained = trained * masks[ROW_MASK].values.numpy()
        shapes = [
            GroupShape(int(length), tuple(lengths[positions].tolist()))
            for length, positions in zip(prompts["prompt_ids"].lengths(), members, strict=True)
        ]
        shares = deal(
            shapes,
            replicas,
            whole=algorithm.unit == "group",
            mini_batches=algorithm.mini_batches,
            trained=[trained[positions].tolist() for positions in members],
        )
        return [
            [members[piece.group][row] for piece in share for row in piece.rows] for share in shares
        ]

    async def fetch(
        self,
        dock: Dock,
        claim: Claim,
        shares: Sequence[Sequence[int]],
        columns: Sequence[str],
        trained: int,
        *,
        by_token: bool = True,
    ) -> TensorDict:
        """Returns this rank's share of the claim, as its engine takes it after ``trained`` steps;
        ``by_token``: with the staleness of each token."""
        share = claim.part(shares[self.coordinates.replica])
        read = [*columns, VERSIONS] if VERSIONS in dock.schema else columns
        return train_batch(share, await dock.fetch(share, read), trained, by_token=by_token)


def train_batch(
    claim: Claim, rows: TensorDict, trained: int | None = None, *, by_token: bool = True
) -> TensorDict:
    """Returns ``rows`` with the columns ``group`` and ``place``, and for a trainer that has made
    ``trained`` steps ``staleness``, and in the place of ``versions`` the ``age`` of each token and,
    with ``by_token``, its staleness, as :meth:`TrainEngine.train_batch` takes them."""
    batch = rows.copy()
    batch["group"] = torch.from_numpy(claim.group.astype("int64"))
    batch["place"] = torch.from_numpy(claim.place.astype("int64"))
    if trained is not None:
        batch[STALENESS] = trained - torch.from_numpy(claim.oldest_version.astype("int64"))
        if VERSIONS in batch:
            staleness, ages = staleness_of(Packed.of(batch[VERSIONS]), trained)
            batch[AGE] = ages.jagged()
            if by_token:
                batch[TOKEN_STALENESS] = staleness.jagged()
            del batch[VERSIONS]
    return batch
