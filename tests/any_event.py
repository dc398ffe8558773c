"""An event of any kind with any data, for tests of what the product's own classes do not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.data.events import EventData, Kind


class AnyEvent(EventData, kind="state"):
    kind: Kind  # type: ignore[misc]
    data: Mapping[str, Any]

    def wire(self) -> dict[str, Any]:
        return dict(self.data)
