"""Files of the dashboard: a page, its scripts and styles, and the vendored uPlot (MIT) and Inter (OFL).

The files need no token, as those of ``/docs``: the page gets what it shows from the API, with the token of its user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from aiohttp import web
from pydantic import Field

from api.server.operations import Strict, operation
from api.server.problems import HTTPProblem
from api.server.service import Service

FOLDER = Path(__file__).parents[2] / "dashboard"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".LICENSE": "text/plain; charset=utf-8",
}
# Stricter than for other answers: scripts and styles only from its own files, no frames, and no text parsed as HTML.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


class FilePath(Strict):
    file: str = Field(pattern=r"^[A-Za-z]+\.[A-Za-z0-9]+$", max_length=40)


class SubfolderPath(FilePath):
    folder: Literal["pages", "charts", "vendor"]


@operation("GET", "/", scope=None, summary="The dashboard", tag="service", produces="text/html", hidden=True)
async def dashboard(service: Service) -> web.FileResponse:
    answer = _file(FOLDER, "index.html")
    answer.headers["Content-Security-Policy"] = POLICY
    return answer


@operation("GET", "/dashboard/{file}", scope=None, summary="Its files", tag="service", produces="text/css", hidden=True)
async def dashboard_file(service: Service, path: FilePath) -> web.FileResponse:
    return _file(FOLDER, path.file)


@operation(
    "GET",
    "/dashboard/{folder}/{file}",
    scope=None,
    summary="Files in its folders",
    tag="service",
    produces="text/css",
    hidden=True,
)
async def dashboard_subfolder_file(service: Service, path: SubfolderPath) -> web.FileResponse:
    return _file(FOLDER / path.folder, path.file)


def _file(folder: Path, name: str) -> web.FileResponse:
    """The answer with a file. Browsers revalidate it each time, so that all files are of one version after an update."""
    path = folder / name
    if path.suffix not in TYPES or not path.is_file():
        raise HTTPProblem(404, "There is nothing at this path.", kind="no-such-path", fix="see /docs")
    return web.FileResponse(path, headers={"Content-Type": TYPES[path.suffix], "Cache-Control": "no-cache"})
