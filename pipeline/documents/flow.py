"""Documents, topics and logs of the sample flow itself. ``pipeline`` owns them.

Most topics here are woken by the functions of the index (``pipeline/index/lua``), and by processes
where they change what others wait for. A stage has topics of its own beside them: its name, alone
or with ``:HOME``, which a claim that found nothing returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.documents.kinds import Document, Log, Topic

if TYPE_CHECKING:
    from pipeline.data.columns import Schema

STATE = Topic("state")
"""The run has another state, or is to be joined again because it was rewound."""

VERSION = Topic("version")
"""A version was published, a step trained, groups were dropped or lost: the gate looks again."""

SWAP = Topic("swap")
"""A worker has given back its turn to swap weights."""

ROOM = Topic("room")
"""A warehouse has room again, or is lost or leaving."""

WAREHOUSES = Topic("warehouses")
"""A warehouse has joined."""

FED = Topic("fed")
"""Another program has put prompts."""

FEED = Topic("feed")
"""The run has stored prompts of another program: there is room for more."""


class HeadAddress(NamedTuple):
    """The place of a run's head: the space of its processes, and its machine's address for
    others."""

    space: str
    address: str


SCHEMA: Document[Schema] = Document.of_class("schema", "pipeline.data.columns:Schema")
"""The columns of the run's samples: of all workers the same, or the longer of two that begin
alike."""

SECRET: Document[bytes] = Document("secret", str.encode, bytes.decode)
"""What processes of the run prove to each other that they know. Hex digits; never shown."""

HEAD_ADDRESS = Document("own-address", lambda text: HeadAddress(*text.split(" ", 1)), " ".join)
"""The head's process space, a space, and the address by which other machines reach it."""

BATCHES: Log[dict[str, Any]] = Log("loader:{stage}:{session}:{iteration}:{share}:{reader}")
"""The batches that the first reader of a loader's session has claimed for all of them: how many
``workers`` it has, the ``claim``, and the positions of each reader as ``parts``. All sign each
entry; the last one removes it."""
