"""A comparison as one HTML file that needs nothing else: the dashboard's charts and styles, and the
data, are in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2

import api
from orchestration.comparison.compare import POINTS, Comparison
from orchestration.comparison.curves import By
from orchestration.comparison.view import as_curves, as_tables

DASHBOARD = Path(api.__path__[0]) / "dashboard"
STYLES = ("vendor/uPlot.css", "dashboard.css", "charts/comparison.css")
# In the order in which they need each other; each is a function that returns what it exports.
MODULES = (
    "vendor/uPlot.js",
    "element.js",
    "format.js",
    "charts/table.js",
    "charts/charts.js",
    "charts/comparison.js",
)
IMPORT = re.compile(r'^import (\w+|\{[^}]*\}) from "[./]*([^"]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) (\w+))", re.MULTILINE)
FONT = re.compile(r"@font-face \{.*?\}\n", re.DOTALL)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>Comparison of runs</title>
<style>{{ styles }}</style>
</head>
<body class="alone">
<main id="main"><noscript>This page is drawn by JavaScript, which is switched off.</noscript></main>
<div class="hidden" id="spoken" role="status" aria-live="polite"></div>
<script type="application/json" id="comparison">{{ data }}</script>
<script type="module">
{{ script }}
const data = JSON.parse(document.getElementById("comparison").textContent);
modules["charts/comparison.js"].showAlone(data);
</script>
</body>
</html>
"""


def comparison_html(comparison: Comparison, by: By) -> str:
    """Return the page, which begins with the curves over ``by``."""
    curves: dict[str, Any] = {}
    axes: tuple[By, ...] = ("step", "tokens", "hours")
    for metric in comparison.metrics:
        for axis in axes:
            for fold in (False, True):
                lines = as_curves(comparison, metric, axis, POINTS, fold=fold)
                curves[f"{metric} {axis} {'settings' if fold else 'runs'}"] = lines
    data = json.dumps(as_tables(comparison) | {"by": by, "curves": curves})
    styles = "\n".join((DASHBOARD / name).read_text(encoding="utf-8") for name in STYLES)
    page = jinja2.Template(PAGE)
    return page.render(
        styles=FONT.sub("", styles),
        script="const modules = {};\n" + "\n".join(map(_module, MODULES)),
        data=data.replace("<", "\\u003c"),
    )


def _module(name: str) -> str:
    """Return the module ``name`` as a call that adds what it exports to ``modules``."""
    text = (DASHBOARD / name).read_text(encoding="utf-8")
    exported = ", ".join(EXPORT.findall(text))
    text = EXPORT.sub("", text).replace("export { uPlot as default };", "")
    if name == "vendor/uPlot.js":
        exported = "default: uPlot"

    def imported(match: re.Match[str]) -> str:
        names, module = match.groups()
        names = names if names.startswith("{") else f"{{ default: {names} }}"
        return f'const {names} = modules["{module}"];'

    body = IMPORT.sub(imported, text)
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();'
