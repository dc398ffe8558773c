"""A flow as text, as Mermaid and as SVG.

source ─▶ rollout ─▶ reward ─▶ advantage ─▶ update      layer 0, 1, 2, …: one more than the deepest stage that it reads
              └────▶ reference ────────────────┘        edges that another way implies are left out of pictures
"""

from __future__ import annotations

from html import escape

from stages.flow.document import layers
from stages.flow.resolver import Edge, Flow

# of a box, and between boxes, in px
WIDTH = 168
HEIGHT = 58
ACROSS = 92
DOWN = 34
MARGIN = 24
SHOWN = 3  # names of columns beside an edge, at most


def to_text(flow: Flow) -> str:
    """Return one line for each stage: what it takes and runs on, the columns that it needs, and
    those that it makes."""
    wide = max(len(stage.name) for stage in flow.stages)
    lines = []
    for stage in flow.stages:
        kind = "source" if not stage.needs else f"{stage.takes}, {stage.runs_on}"
        needs = " ".join(stage.needs)
        makes = " ".join(stage.makes)
        parts = [part for part in (needs and f"needs {needs}", makes and f"makes {makes}") if part]
        lines.append(f"{stage.name:{wide}}  ({kind}) {'; '.join(parts)}")
    return "\n".join(lines)


def to_mermaid(flow: Flow) -> str:
    """Return a Mermaid flowchart; the weights that training publishes are a dotted edge."""
    lines = ["flowchart LR"]
    lines += [
        f'    {stage.name}["{stage.name}<br/>{stage.takes}, {stage.runs_on}"]'
        for stage in flow.stages
    ]
    lines += [
        f"    {edge.maker} -->|{_names(edge)}| {edge.reader}" for edge in flow.edges if edge.direct
    ]
    if "rollout" in flow:
        lines.append("    update -.->|weights| rollout")
    return "\n".join(lines) + "\n"


def to_svg(flow: Flow) -> str:
    """Return a picture: a column of boxes for each layer, and curves between them."""
    depth = layers(flow)
    rows: dict[int, list[str]] = {}
    for stage in flow.stages:
        rows.setdefault(depth[stage.name], []).append(stage.name)
    tallest = max(map(len, rows.values()))
    places = {
        name: (
            MARGIN + layer * (WIDTH + ACROSS),
            MARGIN + (row + (tallest - len(names)) / 2) * (HEIGHT + DOWN),
        )
        for layer, names in rows.items()
        for row, name in enumerate(names)
    }
    width = 2 * MARGIN + len(rows) * (WIDTH + ACROSS) - ACROSS
    height = 3 * MARGIN + tallest * (HEIGHT + DOWN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" viewBox="0 0 '
        f'{width} {height:g}" '
        'font-family="sans-serif" font-size="13">',
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height:g}" fill="#fff"/>',
    ]
    for edge in flow.edges:
        if edge.direct:
            (a, b), (c, d) = places[edge.maker], places[edge.reader]
            parts += _curve(a + WIDTH, b + HEIGHT / 2, c, d + HEIGHT / 2, _names(edge))
    if "rollout" in flow:
        (a, b), (c, d) = places["update"], places["rollout"]
        floor = height - MARGIN
        path = f"M{a + WIDTH / 2:g} {b + HEIGHT:g}V{floor:g}H{c + WIDTH / 2:g}V{d + HEIGHT:g}"
        parts.append(
            f'<path d="{path}" fill="none" stroke="#999" stroke-dasharray="5 4" '
            f'marker-end="url(#head)"/>'
        )
        middle = (a + c + WIDTH) / 2
        parts.append(
            f'<text x="{middle:g}" y="{floor - 6:g}" text-anchor="middle" '
            f'fill="#777">weights</text>'
        )
    for stage in flow.stages:
        x, y = places[stage.name]
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#f4f6fa" '
            f'stroke="#445"/>'
        )
        parts.append(
            f'<text x="{x + 12:g}" y="{y + 24:g}" font-weight="bold">{escape(stage.name)}</text>'
        )
        parts.append(
            f'<text x="{x + 12:g}" y="{y + 43:g}" '
            f'fill="#555">{escape(f"{stage.takes}, {stage.runs_on}")}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _curve(a: float, b: float, c: float, d: float, names: str) -> list[str]:
    turn = (a + c) / 2
    path = f"M{a:g} {b:g}C{turn:g} {b:g} {turn:g} {d:g} {c - 1:g} {d:g}"
    style = 'text-anchor="middle" font-size="10" fill="#555"'
    label = [
        f'<text x="{turn:g}" y="{(b + d) / 2 - 6 + 12 * row:g}" {style}>{escape(name)}</text>'
        for row, name in enumerate(names.split(", "))
    ]
    return [f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#head)"/>', *label]


def _names(edge: Edge) -> str:
    shown = list(edge.columns[:SHOWN])
    more = len(edge.columns) - len(shown)
    return ", ".join([*shown, f"+ {more}"] if more else shown)
