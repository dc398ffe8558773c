"""Calls for values by key, without stages or leases: the interface of TransferQueue is built on
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.index.calls import Calls
from pipeline.index.claims import Stored


@dataclass(frozen=True)
class KeysPut:
    """After a put: the partition's ``fields`` as packed text, the fields that all of the put's keys
    ``held`` have now, as bits, and the ``tags`` of each key."""

    fields: str
    held: int
    tags: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class KeysFound:
    """Looked-up keys: the partition's ``fields`` as packed text, the ``entries`` of each key (None:
    there is no such key), and the ``places`` of their blocks: (block, warehouse, offset)."""

    fields: bytes
    entries: Sequence[bytes | None]
    places: Sequence[Sequence[int]]


class Keys(Calls):
    """Values of a partition, each under a key with fields and tags."""

    async def key_fields(self, partition: str) -> str:
        """Return the partition's fields as packed text."""
        return await self.call("key_fields", partition=partition)  # type: ignore[no-any-return]

    async def put_keys(
        self,
        stored: Stored,
        partition: str,
        keys: Sequence[str],
        *,
        known: int,
        fields: str,
        bits: int,
        tags: Sequence[Mapping[str, str]] | None,
    ) -> KeysPut:
        """Set the fields ``bits`` of ``keys`` to the ``stored`` columns, and join ``tags`` with the
        tags of each key.

        ``fields`` are the partition's fields as the caller wants them; its first ``known``
        characters are those that the caller has read. Raises FieldsChanged when other clients have
        changed them since."""
        reply = await self.call(
            "put_keys",
            **stored._asdict(),
            partition=partition,
            keys=list(keys),
            known=known,
            fields=fields,
            low=bits & 0xFFFFFFFF,
            high=bits >> 32,
            tags=list(tags) if tags else False,
        )
        held = (reply["low"] & 0xFFFFFFFF) | (reply["high"] & 0xFFFFFFFF) << 32
        return KeysPut(reply["fields"], held, [tag or {} for tag in reply["tags"]])

    async def look_up_keys(self, partition: str, keys: Sequence[str]) -> KeysFound:
        """Return where the values of ``keys`` lie."""
        reply = await self._call_raw("look_up_keys", partition=partition, keys=list(keys))
        return KeysFound(
            reply["fields"],
            [entry or None for entry in reply["entries"] or ()],
            reply["places"] or (),
        )

    async def list_keys(
        self, partition: str | None = None
    ) -> dict[str, dict[str, Mapping[bytes, bytes]]]:
        """Return the keys of one partition or of all, oldest first, each with its tags as
        stored."""
        reply = await self._call_raw(
            "list_keys", partition=False if partition is None else partition
        )
        partitions: dict[str, dict[str, Mapping[bytes, bytes]]] = {}
        for name, keys in reply["partitions"] or ():
            ordered = sorted(keys or (), key=lambda each: int.from_bytes(each[1], "little"))
            partitions[name.decode()] = {key.decode(): tags or {} for key, _, tags in ordered}
        return partitions

    async def clear_keys(self, partition: str, keys: Sequence[str]) -> bool:
        """Remove ``keys`` with their values and tags; returns whether the partition has keys
        left."""
        return bool(await self.call("clear_keys", partition=partition, keys=list(keys)))
