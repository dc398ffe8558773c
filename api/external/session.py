"""One run's external stages, as the server serves them: bodies, files of weights, and refusals as
problems.

Importing this file loads torch, which takes seconds: the server does so in a thread, at the first
request that needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import platform
import tempfile
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import torch
from aiohttp import web
from pydantic import ValidationError
from safetensors.torch import save_file

from api.external.codec import Unreadable, encode_experience, from_body
from api.external.schemas import LocalWeights, PutExperience, TensorView, WeightsView
from api.external.upload import longest_header, receive_weights
from api.server.http.problems import HTTPProblem, errors_of, invalid_request
from orchestration.external.errors import NotBegun, NotExternal, WeightsGone, WeightsTooOld
from orchestration.external.experience import Experience
from orchestration.external.session import External
from pipeline.data.arena import StaleHandle, WarehouseUnreachable
from pipeline.data.columns import ColumnError, Packed
from pipeline.index.client import BoundBroken, IndexRefused, LeaseLost
from pipeline.warehouse.dock import NoRoom
from stages.prompts.external import ExternalPromptsFull
from stages.prompts.rows.files import PromptError
from stages.rollout.external_checks import Misfit
from stages.weights.published import Published

VERSIONS = 2  # of weights, with files that are kept for further readers
LOAD_NEWEST = "load the newest version: GET …/weights"
# Kind, field, and fix.
CONFLICTS: dict[type[Exception], tuple[str, str, str]] = {
    WeightsTooOld: ("weights-too-old", "version", LOAD_NEWEST),
    BoundBroken: ("weights-too-old", "version", LOAD_NEWEST),
    WeightsGone: ("weights-gone", "path.version", "get the newest version from GET …/weights"),
    LeaseLost: ("lease-lost", "token", "discard the columns of these rows, and claim again"),
    NotBegun: ("not-begun", "path.run", "wait until it is running"),
    StaleHandle: ("released", "rows", "claim again"),
    IndexRefused: ("refused", "", "follow the detail"),
}


class Weights:
    """The weights of one version as a safetensors file, removed after its last reader; ``digest``
    is its sha256."""

    def __init__(self, version: int, file: BufferedReader) -> None:
        self.version = version
        self.file = file
        self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.nbytes = file.tell()


class ExternalSession:
    """The interface of one run, and the files of the newest requested versions.

    ``users``: requests in progress. ``used``: when the last one ended, on the monotonic clock.
    """

    def __init__(self, external: External, folder: Path) -> None:
        self.external = external
        self.users = 0
        self.used = time.monotonic()
        self._folder = folder
        self._held: dict[int, Weights] = {}
        self._copying = asyncio.Lock()
        self._publishing = asyncio.Lock()  # so that the disk holds one upload of a run at a time

    async def encode(self, experience: Experience) -> bytes:
        return await asyncio.to_thread(encode_experience, self.external.schema, experience)

    async def decode(self, body: bytes) -> tuple[PutExperience, dict[str, Packed | torch.Tensor]]:
        """Return what a body of experience controls, and its columns. Raises an HTTPProblem."""
        try:
            control, columns = await asyncio.to_thread(from_body, body)
            return PutExperience.model_validate_json(control, strict=True), columns
        except Unreadable as error:
            fix = "send a safetensors file; docs/external.md describes its content"
            raise HTTPProblem(
                400, f"The body cannot be read: {error}.", kind="body", field="body", fix=fix
            ) from None
        except ValidationError as error:
            raise invalid_request(422, errors_of(error)) from None

    async def weights(self, version: int) -> Weights:
        """Return a verified copy of a published version. Raises WeightsGone."""
        async with self._copying:  # several readers share one copy
            if version not in self._held:
                tensors = await self.external.read_weights(version)
                self._held[version] = await asyncio.to_thread(self._copy, version, tensors)
                for old in sorted(self._held)[:-VERSIONS]:
                    del self._held[old]
            return self._held[version]

    def _copy(self, version: int, tensors: dict[str, torch.Tensor]) -> Weights:
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="weights-") as folder:
            path = Path(folder) / "model.safetensors"
            # save_file refuses tensors that share memory
            whole = {name: tensor.clone() for name, tensor in tensors.items()}
            save_file(whole, path, {"version": str(version)})
            return Weights(version, path.open("rb"))

    async def publish(self, request: web.Request, version: int, covered: int) -> Published:
        """Publish the weights in the body of ``request``."""
        layout = await self.external.may_publish(version)
        check = functools.partial(self.external.may_publish, version)
        async with self._publishing:
            weights = await receive_weights(request, self._folder, longest_header(layout), check)
            return await self.external.publish(version, weights, covered=covered)

    async def view(self, published: Published | None) -> WeightsView:
        state, _, _ = await self.external.index.state()
        view = WeightsView(version=None, state=state or "created", bytes=0, tensors=[], local=None)  # type: ignore[arg-type]
        if published is not None:
            path = (await self.external.place()).shared / f"weights-{published.slot}"
            view.version = published.version
            view.bytes = published.nbytes
            view.tensors = [
                TensorView.model_validate(tensor, from_attributes=True)
                for tensor in published.tensors
            ]
            view.local = LocalWeights(
                node=platform.node(), path=str(path), buckets=list(published.buckets)
            )
        return view

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn the exceptions of the interface into problems."""
        try:
            yield
        except NotExternal as error:
            [problem] = error.problems
            raise HTTPProblem(
                409, str(error), kind="not-external", field=problem.key, fix=problem.fix
            ) from None
        except (Misfit, ColumnError, PromptError) as error:
            [problem] = error.problems
            kind = "prompt" if isinstance(error, PromptError) else "misfit"
            field = "body" if problem.key == "weights" else problem.key
            fix = problem.fix or None
            raise HTTPProblem(422, str(error), kind=kind, field=field, fix=fix) from None
        except (ExternalPromptsFull, NoRoom, WarehouseUnreachable) as error:
            raise HTTPProblem(
                503, str(error), kind="no-room", fix="try again", headers={"Retry-After": "5"}
            ) from None
        except tuple(CONFLICTS) as error:
            kind, field, fix = next(
                details for refused, details in CONFLICTS.items() if isinstance(error, refused)
            )
            raise HTTPProblem(409, str(error), kind=kind, field=field or None, fix=fix) from None
