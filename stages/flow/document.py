"""A flow as plain values, for the index and the dashboard."""

from __future__ import annotations

from typing import Any

from stages.flow.resolver import Flow


def layers(flow: Flow) -> dict[str, int]:
    """Return the layer of each stage: 0 for the source, else one more than the deepest stage that
    it reads from."""
    depth: dict[str, int] = {}
    for stage in flow.stages:
        depth[stage.name] = max(
            (depth[edge.maker] + 1 for edge in flow.edges if edge.reader == stage.name), default=0
        )
    return depth


def document(flow: Flow) -> dict[str, Any]:
    """Return the flow as plain values, in the order of its stages."""
    depth = layers(flow)
    return {
        "stages": [
            {
                "name": stage.name,
                "takes": stage.takes,
                "runs_on": stage.runs_on,
                "layer": depth[stage.name],
                "needs": list(stage.needs),
                "makes": dict(stage.makes),
            }
            for stage in flow.stages
        ],
        "edges": [
            {
                "from": edge.maker,
                "to": edge.reader,
                "columns": list(edge.columns),
                "direct": edge.direct,
            }
            for edge in flow.edges
        ],
    }
