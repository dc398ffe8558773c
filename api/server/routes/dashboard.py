"""Files of the dashboard and of the reference page: pages, scripts and styles, and the vendored
uPlot (MIT), Inter (OFL).

The files need no token: the dashboard gets what it shows from the API, with the token of its user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import Field

from api.server.http.problems import HTTPProblem
from api.server.service.operations import Strict, operation
from api.server.service.service import Service
from orchestration.words import TABLE

API = Path(__file__).parents[2]
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".LICENSE": "text/plain; charset=utf-8",
}
# Stricter than for other answers: scripts and styles only from its own files, no frames, and no
# text parsed as HTML.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


class FilePath(Strict):
    file: str = Field(pattern=r"^((pages|charts|vendor)/)?[A-Za-z]+\.[A-Za-z0-9]+$", max_length=48)


@operation(
    "GET",
    "/",
    scope=None,
    summary="The dashboard",
    tag="service",
    produces="text/html",
    hidden=True,
)
async def dashboard(service: Service) -> web.FileResponse:
    answer = _file("dashboard/index.html")
    answer.headers["Content-Security-Policy"] = POLICY
    return answer


@operation(
    "GET",
    "/docs",
    scope=None,
    summary="The reference",
    tag="service",
    produces="text/html",
    hidden=True,
)
async def docs(service: Service) -> web.FileResponse:
    return _file("reference/index.html")


FILES: dict[str, Any] = {
    "scope": None,
    "summary": "Their files",
    "tag": "service",
    "produces": "text/css",
    "hidden": True,
}


@operation("GET", "/dashboard/{file:.+}", **FILES)
async def dashboard_file(service: Service, path: FilePath) -> web.FileResponse:
    return _file(TABLE if path.file == TABLE.name else f"dashboard/{path.file}")


@operation("GET", "/docs/{file:.+}", **FILES)
async def docs_file(service: Service, path: FilePath) -> web.FileResponse:
    return _file(f"reference/{path.file}")


def _file(name: str | Path) -> web.FileResponse:
    """Return the answer with a file.

    Browsers revalidate it each time, so that all files are of one version after an update.
    """
    path = API / name
    if path.suffix not in TYPES or not path.is_file():
        raise HTTPProblem(
            404, "There is nothing at this path.", kind="no-such-path", fix="see /docs"
        )
    return web.FileResponse(
        path, headers={"Content-Type": TYPES[path.suffix], "Cache-Control": "no-cache"}
    )
