"""The lease of a device: what the update and the rollout stage ask before they compute.

    update stage:  async with device.training(): …        rollout stage:  claims rows only while device.may_generate

Stages with devices of their own hold the lease always. In a colocated run they take turns
(``stages.training.colocated``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any


class DeviceLease:
    """The lease of a device that one engine has for itself: it is always granted."""

    may_generate = True
    """Whether the rollout stage may claim rows now."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Give the device to the train engine inside the context."""
        yield

    async def give_to_training(self) -> None:
        """Give the device to the train engine for as long as the process lives."""

    async def follow(self, order: Mapping[str, Any]) -> None:
        """Do what rank 0 has ordered all ranks to do with the device.

        Raises RuntimeError for an unknown order.
        """
        raise RuntimeError(
            f"ranks: rank 0 orders {order['do']!r}, which this rank does not know; restart both"
        )
