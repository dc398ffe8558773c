"""A session: its losses, its samplers, their requests, and which versions each sampled sequence has.

sample ─▶ recorded ─▶ the engine: all at once, as far as it has slots ─▶ answer, with versions

Its journal has what the session is, its samplers, their requests, and of sequences whose answers are
forgotten the versions alone.
"""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from orchestration.calls.checkpoints import Checkpoint, Checkpoints, hold
from orchestration.calls.engines.encoding import pack
from orchestration.calls.engines.engine import EngineDied, EngineDown, EngineFailed
from orchestration.calls.engines.served import Served, Weights
from orchestration.calls.interface import CallOptions, Failed, NotThere
from orchestration.calls.journal import Journal, Record
from orchestration.calls.ledger import SampledLedger, Versions
from orchestration.calls.requests import Account, Completions, Request, Requests
from orchestration.calls.training import TrainedModel
from stages.calls.custom import check_graph
from stages.calls.interface import CallRefused, ModelOptions, SampleRequest

log = structlog.get_logger()

SEQUENCES = 50_000  # whose versions a session keeps, the newest ones
MOST_LOSSES = 256  # of a session's client
GRAPH_BYTES = 1 << 16  # of each
CLONE_REQUESTS = 10**9  # numbers of requests that each clone of a client's sampler has
SHORTEN_RECORDS = 256  # forgotten, for which a journal is written again


@dataclass(frozen=True)
class SessionFacts:
    session_id: str
    owner: str
    tags: Sequence[str]
    metadata: Mapping[str, Any]
    display_name: str
    time: float


@dataclass
class Sampler:
    """Number ``number`` of a session, on ``base``. ``weights`` None: the base model's.
    ``request_id``: of the call that has made it, with a snapshot of its own; ``follows``: the
    model whose inflight weights it has."""

    number: int
    base: str
    path: str | None = None
    weights: Weights | None = None
    request_id: str = ""
    follows: str = ""
    last_used: float = field(default_factory=time.time)
    copies: int = 0
    """Of its client, which have numbers."""


def check_number(name: str, number: int) -> int:
    """Return the number of a model or a sampler. Raises CallRefused."""
    if not 0 <= number < 10**9:
        raise CallRefused(message=f"{name} {number}: give 0, 1, 2, …")
    return number


class Losses:
    """The losses that a session's client has uploaded, by number. ``record``: writes what stays into
    the journal."""

    def __init__(self, record: Callable[..., Awaitable[None]]) -> None:
        self._record = record
        self._graphs = dict[int, str]()  # as JSON

    def take(self, head: Mapping[str, Any]) -> None:
        """Take a record of the journal."""
        self._graphs[head["loss"]] = head["graph"]

    async def keep(self, number: int, graph: Mapping[str, Any]) -> None:
        """Keep a loss: see :func:`stages.calls.custom.check_graph`. Raises OSError, CallRefused."""
        check_graph(graph)
        text = json.dumps(graph)
        if len(text) > GRAPH_BYTES:
            wrong = f"has {len(text)} bytes"
            raise CallRefused.of("graph", None, wrong, f"at most {GRAPH_BYTES} are taken")
        if self._graphs.get(number, text) != text:
            raise CallRefused(
                message=f"custom_loss_seq_id {number} is another loss's; give a new one"
            )
        if len(self._graphs) >= MOST_LOSSES:
            raise CallRefused(
                message=f"custom_loss_seq_id {number}: {MOST_LOSSES} losses are there, no more may "
                f"be; open another session"
            )
        if number not in self._graphs:
            await self._record(loss=number, graph=text)
            self._graphs[number] = text

    def get(self, number: str) -> str:
        """Return a graph, as JSON. Raises NotThere."""
        for known, graph in self._graphs.items():
            if str(known) == number:
                return graph
        raise NotThere(f"loss {number[:100]!r} is not there")


class Session:
    """The session of ``facts`` in ``folder``, with the ``records`` of its ``journal``. ``root``: the
    folder of the service, to which those of weights are relative; ``served``: engines by base."""

    def __init__(
        self,
        facts: SessionFacts,
        root: Path,
        folder: Path,
        journal: Journal,
        records: Sequence[Record],
        served: Mapping[str, Served],
        checkpoints: Checkpoints,
        account: Account,
        options: CallOptions,
    ) -> None:
        self.facts = facts
        self.folder = folder
        self.models = dict[int, TrainedModel]()
        self.samplers = dict[int, Sampler]()
        self.losses = Losses(self.record)
        self.finished = False
        self.heard = time.monotonic()
        """When its client was last heard."""
        self.asleep = False
        self.creating = asyncio.Lock()
        self.requests = Requests(journal, account, self._arrived, self._completed)
        self.completions = Completions()
        """Of samples, by the number of their sampler and that of the clone that has asked."""
        self._root = root
        self._journal = journal
        self._served = served
        self._checkpoints = checkpoints
        self._options = options
        self._inflight = dict[str, Weights]()
        self._versions = dict[str, tuple[str, Versions]]()
        self._sampled = dict[str, SampledLedger]()
        self._facts_records = list[Record]()
        self._summary: Record | None = None
        self._counted = set[str]()  # requests in the summary whose answers are there, too
        self._serving = set[asyncio.Task[None]]()
        for record in records:
            self._take(record)
        for request in self.requests:
            if request.outcome is None:
                self._arrived(request)
            else:
                self._completed(request)

    @property
    def owner(self) -> str:
        return self.facts.owner

    def _take(self, record: Record) -> None:
        head = record.head
        if "call" in head or "answer" in head:
            request = self.requests.load(record)
            if "answer" in head and request.request_id not in self._counted:
                self._count(request, head)
            return
        if "sampled" in head:
            self._summary = record
            self._counted = set(head.get("counted", ()))
            self._versions = {name: (model, versions) for name, model, versions in head["sampled"]}
            self._sampled = {
                model: SampledLedger(counts) for model, counts in head["ledger"].items()
            }
            return
        self._facts_records.append(record)
        if "sampler" in head:
            sampler = Sampler(
                **{**head["sampler"], "weights": _unpacked(head["weights"], self._root)}
            )
            self.samplers[sampler.number] = sampler
            if sampler.follows and sampler.weights is not None:
                self._inflight[sampler.follows] = sampler.weights
        elif "closed" in head:
            self.samplers.pop(head["closed"], None)
        elif "loss" in head:
            self.losses.take(head)
        elif "joined" in head and head["joined"] in self.samplers:
            self.samplers[head["joined"]].copies = head["copies"]
        self.finished = self.finished or "finish" in head

    async def record(self, **head: Any) -> None:
        """Record what stays. Raises OSError."""
        record = self._journal.append(head)
        self._facts_records.append(record)
        await record.on_disk()

    # --- samplers

    def sampler_id(self, number: int) -> str:
        return f"{self.facts.session_id}:sample:{number}"

    async def open_sampler(self, number: int, base: str, checkpoint: Checkpoint | None) -> Sampler:
        """Open sampler ``number``, or return the one that there is. Raises OSError, and CallRefused
        where the number is another one's."""
        path = None if checkpoint is None else checkpoint.info.path
        async with self.creating:
            sampler = self.samplers.get(number)
            if sampler is None:
                weights = None
                if checkpoint is not None:
                    weights = Weights(
                        self._name(checkpoint),
                        checkpoint.info.model_id,
                        checkpoint.info.options,
                        checkpoint.step,
                        self._weights_folder(number),
                    )
                    await hold(checkpoint, weights.folder)
                sampler = Sampler(number, base, path, weights)
                await self._add(sampler)
            elif (sampler.base, sampler.path) != (base, path) or sampler.request_id:
                raise CallRefused(
                    message=f"sampling_session_seq_id {number} is another sampler's; give a new one"
                )
        return sampler

    def _name(self, checkpoint: Checkpoint) -> str:
        """Return what the weights of ``checkpoint`` are called at the engine."""
        return str(checkpoint.folder.relative_to(self._root))

    def _weights_folder(self, number: int) -> Path:
        return self.folder / "samplers" / str(number)

    async def join(self, number: int) -> int:
        """Return a number for a copy of sampler ``number``: 1, 2, …, also after a restart. Raises
        OSError."""
        sampler = self.samplers[number]
        sampler.copies += 1
        copies = sampler.copies
        await self.record(joined=number, copies=copies)
        return copies

    async def _weights(self, sampler: Sampler) -> Weights | None:
        """Return what ``sampler`` samples with now. Raises CallRefused, OSError."""
        weights = self._inflight.get(sampler.follows, sampler.weights)
        if weights is None or sampler.path is None:
            return weights
        async with self.creating:
            if not weights.folder.exists():  # the session was silent
                try:
                    checkpoint = self._checkpoints.get(self.owner, sampler.path)
                except NotThere:
                    checkpoint = None
                if checkpoint is None or self._name(checkpoint) != weights.name:
                    raise CallRefused(
                        message=f"{self.sampler_id(sampler.number)}: {sampler.path} was deleted or "
                        f"replaced, and no heartbeat of its session came for a time; open a "
                        f"sampler on a checkpoint that is there"
                    )
                await hold(checkpoint, weights.folder)
        return weights

    async def _add(self, sampler: Sampler) -> None:
        facts = {**vars(sampler), "weights": None}
        await self.record(sampler=facts, weights=_packed(sampler.weights, self._root))
        self.samplers[sampler.number] = sampler

    async def snapshot(self, model: TrainedModel, request: Request) -> str:
        """Make the sampler that a call asks for, and return its id. Raises CallRefused, OSError,
        and what the engine does."""
        head = request.head
        number = check_number("sampling_session_seq_id", head["number"])
        sampler_id = self.sampler_id(number)
        existing = self.samplers.get(number)
        if existing is not None:
            if existing.request_id != request.request_id:
                raise CallRefused(
                    message=f"sampling_session_seq_id {number} is another sampler's; give a new one"
                )
            return sampler_id
        model_id = model.facts.model_id
        folder = self._weights_folder(number)
        await model.save_to(folder, optimizer=False)
        name = f"{model_id}:inflight" if head["inflight"] else sampler_id
        weights = Weights(name, model_id, model.facts.options, model.history.step, folder)
        follows = model_id if head["inflight"] else ""
        sampler = Sampler(number, model.facts.base, None, weights, request.request_id, follows)
        await self._add(sampler)
        if follows:
            self._inflight[model_id] = weights
        await self._served[sampler.base].put(weights, self.owner, live=True)
        await self._remove_snapshots()
        return sampler_id

    async def _remove_snapshots(self) -> None:
        """Remove the snapshots that are too many, and that nobody has used for a time."""
        newest = [weights.folder for weights in self._inflight.values()]
        snapshots = [
            sampler
            for sampler in self.samplers.values()
            if sampler.weights is not None
            and sampler.request_id
            and sampler.weights.folder not in newest
        ]
        snapshots.sort(key=lambda sampler: sampler.last_used)
        oldest_used = time.time() - self._options.snapshot_seconds
        for sampler in snapshots[: -self._options.kept_snapshots]:
            assert sampler.weights is not None
            if sampler.last_used < oldest_used:
                folder = sampler.weights.folder
                if sampler.follows:
                    sampler.weights = None  # it goes on with the newest ones
                else:
                    await self.record(closed=sampler.number)
                    del self.samplers[sampler.number]
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    # --- samples

    async def sample(self, number: int, seq: int, request: SampleRequest) -> str:
        """Record a request, and return its id. Raises Busy, CallRefused."""
        sampler = self.samplers[number]
        sampler.last_used = time.time()
        request_id = f"{self.sampler_id(number)}:{seq}"
        seed = request.options.seed
        head = {
            "call": request_id,
            "kind": "sample",
            "number": number,
            "seed": secrets.randbits(62) if seed is None else seed,
            "rows": request.count,
        }
        await self.requests.add(head, pack(request))
        return request_id

    def _arrived(self, request: Request) -> None:
        task = asyncio.create_task(self._serve(request))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, request: Request) -> None:
        facts: dict[str, Any] = {}
        outcome: bytes | Failed | None = None
        while outcome is None:
            try:
                outcome = await self._sample(request, facts)
            except CallRefused as error:
                outcome = Failed(str(error), by_client=True)
            except EngineDied as error:
                request.attempts += 1
                if request.attempts >= self._options.attempts:
                    outcome = Failed(str(error), by_client=False, again=True)
            except EngineDown as error:
                outcome = Failed(str(error), by_client=False, again=not error.is_lasting)
            except EngineFailed as error:
                outcome = Failed(str(error), by_client=False)
            except Exception as error:
                log.exception("a sample has failed", request=request.request_id)
                outcome = Failed(f"{type(error).__name__}: {error}", by_client=False)
        self.requests.answer(request, outcome, **facts)
        assert request.outcome is not None
        self._count(request, request.outcome.head)

    async def _sample(self, request: Request, facts: dict[str, Any]) -> bytes:
        head = request.head
        sampler = self.samplers.get(head["number"])
        if sampler is None or self.finished:
            raise CallRefused(message=f"{request.request_id}: its sampler is removed")
        weights = await self._weights(sampler)
        assert request.call is not None
        reply, result = await self._served[sampler.base].sample(
            weights,
            self.owner,
            self.sampler_id(sampler.number),
            head["seed"],
            self._journal.read(request.call),
            head.get("rows", 1),
        )
        facts["versions"] = reply["versions"]
        facts["model"] = "" if weights is None else weights.model_id
        return result

    def _completed(self, request: Request) -> None:
        seq = int(request.request_id.rpartition(":")[2])
        self.completions.add((request.head["number"], seq // CLONE_REQUESTS), request)

    def _count(self, request: Request, answer: Mapping[str, Any]) -> None:
        model_id = answer.get("model", "")
        if not model_id:
            return
        ledger = self._sampled.setdefault(model_id, SampledLedger())
        for number, packed in enumerate(answer["versions"]):
            versions = tuple((version, tokens) for version, tokens in packed)
            self._versions[f"{request.request_id}:{number}"] = (model_id, versions)
            ledger.count(versions)
        while len(self._versions) > SEQUENCES:
            del self._versions[next(iter(self._versions))]

    def versions(self, sequence_id: str) -> tuple[str, Versions] | None:
        """Return the model whose weights have made a sequence, and its versions."""
        return self._versions.get(sequence_id)

    def sampled(self, model_id: str) -> Mapping[str, Any]:
        return self._sampled.get(model_id, SampledLedger()).counts

    def totals(self, model_id: str, version: int) -> tuple[int, int, int, int]:
        """Return the sequences and the tokens that were sampled with the model's weights, the tokens
        by those of ``version`` alone, and the samples of the session that wait."""
        counts = self.sampled(model_id)
        newest = counts["versions"].get(str(version), 0)
        return counts["sequences"], counts["tokens"], newest, len(self._serving)

    # --- its end

    async def sweep(self) -> None:
        """Forget answers that were read, and unload what is silent."""
        silent = time.monotonic() - self.heard > self._options.silent_seconds
        if silent and not self.asleep:
            await self.unload()
        for model in list(self.models.values()):  # others may come meanwhile
            await model.sweep(finished=self.finished)
        forgettable = self.requests.forgettable(self._options)
        if len(forgettable) >= SHORTEN_RECORDS:
            self.completions.forget(forgettable)
            for request in forgettable:
                self.requests.forget(request)
            for request in self.requests:
                if request.answered.is_set():
                    request.call = None
            packed = [[name, model, versions] for name, (model, versions) in self._versions.items()]
            # a copy: answers are counted while the record waits to be written
            ledger = {model: copy.deepcopy(each.counts) for model, each in self._sampled.items()}
            counted = [each.request_id for each in self.requests if each.outcome is not None]
            self._summary = self._journal.append(
                {"sampled": packed, "ledger": ledger, "counted": counted}
            )
            await self._journal.rewrite(self._live)

    def _live(self) -> list[Record | None]:
        return [*self._facts_records, self._summary, *self.requests.records()]

    async def unload(self) -> None:
        """Have the engines forget its models and samplers, until their next calls, and let the
        weights of checkpoints go."""
        self.asleep = True
        for model in list(self.models.values()):
            await model.leave()
        for sampler in list(self.samplers.values()):
            if sampler.weights is not None and sampler.request_id:
                await self._served[sampler.base].remove(sampler.weights.name)
            elif sampler.path is not None:
                folder = self._weights_folder(sampler.number)
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def finish(self, reason: str) -> None:
        """Take no more calls, and remove what only its samplers need. Raises OSError."""
        if not self.finished:
            await self.record(finish=reason)
            self.finished = True
            await self.unload()
            await asyncio.to_thread(shutil.rmtree, self.folder / "samplers", ignore_errors=True)

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for model in list(self.models.values()):
            await model.close()
        await self._journal.close()


def _packed(weights: Weights | None, root: Path) -> dict[str, Any] | None:
    if weights is None:
        return None
    return {**asdict(weights), "folder": str(weights.folder.relative_to(root))}


def _unpacked(packed: Mapping[str, Any] | None, root: Path) -> Weights | None:
    if packed is None:
        return None
    options = ModelOptions(**packed["options"])
    return Weights(**{**packed, "options": options, "folder": root / packed["folder"]})
