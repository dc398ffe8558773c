"""Documents, topics and logs by which trainer, engines and critic of a run agree.

``stages`` owns them.
"""

from __future__ import annotations

import json
from typing import Any

from pipeline.data.events import ForecastEvent
from pipeline.documents.kinds import Document, Log, Topic

TAKEN = Topic("weights")
"""An engine has taken the last version or reported one as damaged, or the engines are others."""

ENGINES: Document[list[str]] = Document.of_json("engines", TAKEN)
"""The rollout workers, as KIND-NUMBER, that must have the last version before the run ends."""

WEIGHT_TENSORS: Document[dict[str, list[Any]]] = Document.of_json("weight-tensors")
"""The tables of tensors of the two newest versions, by checksum: mostly one, as it stays the same.
A row has a tensor's name, dtype, shape, offset and bytes."""

LAST_TAKEN = Document("has-last-weights:{worker}", int, topic=TAKEN)
"""The last version of the run, once the rollout worker has taken it."""

DAMAGED = Document("damaged:{version}", str, topic=TAKEN)
"""The worker that has found the published weights of the version damaged.

removed: when the trainer has published the version again
"""

EVALUATED = Document("evaluated", int)
"""The newest version that was evaluated. A rewind sets it back to the checkpoint's version."""

FORECAST = Document(
    "forecast",
    lambda text: ForecastEvent.of(json.loads(text)),
    lambda event: json.dumps(event.wire()),
)
"""What the next steps will take: the newest `forecast` event, as JSON."""

ALARM = Document("alarm:{metric}:{worker}", int)
"""The version for which the worker has raised its newest alarm: it raises no second one for it."""

TIMED_OUT: Document[list[int]] = Document.of_json("timed-out:{stage}")
"""Numbers of the rows that a user's stage was last given in calls that took too long."""

RANK_ORDERS: Log[dict[str, Any]] = Log("ranks:{life}")
"""What rank 0 of a rank group orders the others to do. ``life``: the name of rank 0's process."""

RANK_PARTS: Log[dict[str, Any]] = Log("ranks:{life}:{rank}")
"""Buckets and source of the part of each version that a rank other than 0 has published, for
rank 0."""

CRITIC_ORDERS: Log[dict[str, Any]] = Log("critic:{life}")
"""What the trainer orders the critic's worker to do. ``life`` as above."""

CRITIC_ANSWERS: Log[dict[str, Any]] = Log("critic:{life}:answers")
"""What the critic's worker answers to the order of the same number."""

CRITIC_SAVED: Log[None] = Log("critic:{life}:saved")
"""The critic's checkpoint of this number is written."""
