"""A small server that speaks as much of the API of Hugging Face's Hub as an upload needs, in a
thread of its own: repositories, LFS files, commits.

What goes wrong is decided by the name of the repository: see ``Hub.faults``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN = "hf_of_ann"


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """``faults``: the status, or "gone", of what fails: (kind of request, name of a repository)."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: dict[tuple[str, str], int | str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    xet: Path | None = None  # storage that stands for Xet's server; None: there is none

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if request.headers.get("Authorization") != f"Bearer {TOKEN}" and request.method != "PUT":
            return web.json_response(
                {"error": "Invalid credentials in Authorization header"}, status=401
            )
        return await handler(request)  # type: ignore[no-any-return]

    def fault(self, kind: str, name: str, request: web.Request) -> web.Response | None:
        fault = self.faults.get((kind, name))
        if fault == "gone":
            assert request.transport is not None
            request.transport.abort()
        return (
            web.json_response({"error": "as asked"}, status=fault)
            if isinstance(fault, int)
            else None
        )

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = f"{body.get('organization') or 'ann'}/{body['name']}"
        if fault := self.fault("create", name, request):
            return fault
        url = {"url": f"{self.url}/{name}", "name": name}
        if name in self.repositories:
            return web.json_response(
                {**url, "error": "You already created this model repo"}, status=409
            )
        self.repositories[name] = Repository(private=body.get("visibility") == "private")
        return web.json_response(url)

    async def info(self, request: web.Request) -> web.Response:
        name = self.name(request)
        repository = self.repositories[name]
        return web.json_response(
            {
                "id": name,
                "private": repository.private,
                "sha": "0" * 40,
                "siblings": [{"rfilename": path} for path in repository.files],
                "tags": [],
            }
        )

    async def tree(self, request: web.Request) -> web.Response:
        files = self.repositories[self.name(request)].files.items()
        return web.json_response(
            [
                {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
                for path, data in files
            ]
        )

    async def validate(self, request: web.Request) -> web.Response:
        return web.json_response({"errors": [], "warnings": []})

    async def preupload(self, request: web.Request) -> web.Response:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs"
                if file["path"].endswith((".safetensors", ".png"))
                else "regular",
                "shouldIgnore": False,
            }
            for file in (await request.json())["files"]
        ]
        return web.json_response({"files": files})

    async def batch(self, request: web.Request) -> web.Response:
        name = self.name(request)
        objects = [
            {
                **each,
                "actions": {
                    "upload": {"href": f"{self.url}/lfs/{name}/{each['oid']}", "header": {}}
                },
            }
            for each in (await request.json())["objects"]
        ]
        return web.json_response({"transfer": "basic", "objects": objects})

    async def xet_token(self, request: web.Request) -> web.Response:
        """Send hf_xet to a folder, which it takes in place of a server."""
        if fault := self.fault("token", self.name(request), request):
            return fault
        if self.xet is None:
            raise web.HTTPNotFound
        until = int(time.time()) + 3600
        return web.json_response(
            {"casUrl": f"local://{self.xet}", "accessToken": "of-xet", "exp": until}
        )

    async def upload(self, request: web.Request) -> web.Response:
        if fault := self.fault("upload", self.name(request), request):
            return fault
        self.objects[request.match_info["oid"]] = await request.read()
        return web.Response()

    async def commit(self, request: web.Request) -> web.Response:
        name = self.name(request)
        if fault := self.fault("commit", name, request):
            return fault
        repository = self.repositories[name]
        for line in (await request.text()).splitlines():
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    repository.commits.append(value["summary"])
                case "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    oid = value["oid"]  # content that Xet has is not here
                    repository.files[value["path"]] = self.objects.get(oid, oid.encode())
                case "deletedFile":
                    del repository.files[value["path"]]
        url = f"{self.url}/{name}/commit/{'1' * 40}"
        return web.json_response({"commitUrl": url, "commitOid": "1" * 40, "success": True})

    @staticmethod
    def name(request: web.Request) -> str:
        return f"{request.match_info['owner']}/{request.match_info['name']}"


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub without repositories on a free port of loopback."""
    hub = Hub()
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application(middlewares=[hub.guard], client_max_size=2**30)
        api = "/api/models/{owner}/{name}"
        app.router.add_post("/api/repos/create", hub.create)
        app.router.add_post("/api/validate-yaml", hub.validate)
        app.router.add_get(api, hub.info)
        app.router.add_get(f"{api}/revision/main", hub.info)
        app.router.add_get(f"{api}/tree/main", hub.tree)
        app.router.add_post(f"{api}/preupload/main", hub.preupload)
        app.router.add_post(f"{api}/commit/main", hub.commit)
        app.router.add_get(f"{api}/xet-write-token/main", hub.xet_token)
        app.router.add_post("/{owner}/{name}.git/info/lfs/objects/batch", hub.batch)
        app.router.add_put("/lfs/{owner}/{name}/{oid}", hub.upload)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
