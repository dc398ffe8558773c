"""All sessions of a service, by their owners: what is not an owner's does not exist for it."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from orchestration.calls.checkpoints import Checkpoints
from orchestration.calls.engines.served import Served
from orchestration.calls.history import Facts, History, first_record
from orchestration.calls.interface import Busy, CallOptions, NotThere
from orchestration.calls.journal import Journal, Record
from orchestration.calls.ledger import Versions
from orchestration.calls.requests import Account
from orchestration.calls.sampling import Sampler, Session, SessionFacts
from orchestration.calls.training import Surroundings, TrainedModel

log = structlog.get_logger()

JOURNAL = "journal"
ID = re.compile(r"([0-9a-f-]{36}):(train|sample):(0|[1-9]\d{0,8})")
DISK_SECONDS = 5.0  # after which a call that the disk has refused is to be tried again


class Sessions:
    """The sessions in ``folder``/sessions."""

    def __init__(
        self,
        folder: Path,
        served: Mapping[str, Served],
        checkpoints: Checkpoints,
        options: CallOptions,
    ) -> None:
        self._folder = folder
        self._served = served
        self._checkpoints = checkpoints
        self._options = options
        self._by_id = dict[str, Session]()
        self._accounts = dict[str, Account]()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def of(self, owner: str) -> list[Session]:
        return [session for session in self if session.owner == owner]

    def session(self, owner: str, session_id: str, *, for_calls: bool = False) -> Session:
        """Return a session, which is not finished if it is ``for_calls``. Raises NotThere."""
        session = self._by_id.get(session_id)
        if session is None or session.owner != owner:
            raise NotThere(f"session {session_id[:100]!r} is not there")
        if for_calls:
            if session.finished:
                raise NotThere(f"session {session_id} is finished; open another one")
            session.asleep = False
            session.heard = time.monotonic()
        return session

    def model(self, owner: str, model_id: str, *, for_calls: bool = False) -> TrainedModel:
        """Raises NotThere."""
        match = ID.fullmatch(model_id)
        if match is not None and match[2] == "train":
            session = self.session(owner, match[1], for_calls=for_calls)
            model = session.models.get(int(match[3]))
            if model is not None:
                return model
        raise NotThere(f"model {model_id[:100]!r} is not there")

    def sampler(
        self, owner: str, sampler_id: str, *, for_calls: bool = False
    ) -> tuple[Session, Sampler]:
        """Raises NotThere."""
        match = ID.fullmatch(sampler_id)
        if match is not None and match[2] == "sample":
            session = self.session(owner, match[1], for_calls=for_calls)
            sampler = session.samplers.get(int(match[3]))
            if sampler is not None:
                return session, sampler
        raise NotThere(f"sampler {sampler_id[:100]!r} is not there")

    async def load(self) -> None:
        """Take what the folder has. Raises JournalDamaged, OSError."""
        for folder in sorted((self._folder / "sessions").iterdir()):
            journal, records = await asyncio.to_thread(Journal.open, folder / JOURNAL)
            if not records:  # it was never acknowledged
                await journal.close()
                shutil.rmtree(folder)
                continue
            facts = SessionFacts(**records[0].head["session"])
            session = self._new_session(facts, folder, journal, records)
            for model_folder in sorted(folder.glob("train.*")):
                journal, records = await asyncio.to_thread(Journal.open, model_folder / JOURNAL)
                packed = (record.head.get("model") for record in records)
                model_facts = next((Facts.of(each) for each in packed if each), None)
                if model_facts is None or model_facts.base not in self._served:
                    log.warning("a model is not served", folder=str(model_folder))
                    await journal.close()
                else:
                    self._new_model(session, model_facts, model_folder, journal, records)

    async def open(
        self,
        owner: str,
        tags: Sequence[str],
        metadata: Mapping[str, Any],
        display_name: str,
        session_id: str = "",
    ) -> Session:
        """Open a session, or return the one with this id. Raises Busy, OSError."""
        if session_id in self._by_id:
            return self._by_id[session_id]
        oldest = time.monotonic() - self._options.silent_seconds
        live = sum(not each.finished and each.heard > oldest for each in self.of(owner))
        if live >= self._options.owner_sessions:
            raise Busy(f"{live} sessions are open, at most {self._options.owner_sessions} may be")
        session_id = session_id or str(uuid.uuid4())
        facts = SessionFacts(session_id, owner, tags, metadata, display_name, time.time())
        folder = self._folder / "sessions" / session_id
        folder.mkdir(exist_ok=True)
        journal, _ = await asyncio.to_thread(Journal.open, folder / JOURNAL)
        session = self._new_session(facts, folder, journal, [])
        try:
            await session.record(session=asdict(facts))
        except OSError:
            del self._by_id[session_id]
            raise
        return session

    def _new_session(
        self, facts: SessionFacts, folder: Path, journal: Journal, records: Sequence[Record]
    ) -> Session:
        account = self._account(facts.owner)
        session = Session(
            facts,
            self._folder,
            folder,
            journal,
            records,
            self._served,
            self._checkpoints,
            account,
            self._options,
        )
        self._by_id[facts.session_id] = session
        return session

    def _account(self, owner: str) -> Account:
        return self._accounts.setdefault(owner, Account(self._options))

    async def open_model(self, session: Session, number: int, facts: Facts) -> TrainedModel:
        """Return the session's model ``number``, a new one with ``facts`` where there is none.
        Raises Busy, OSError."""
        async with session.creating:
            if number in session.models:
                return session.models[number]
            limit = self._options.owner_models
            models = sum(len(each.models) for each in self.of(facts.owner) if not each.finished)
            if models >= limit:
                raise Busy(f"{models} models are there, at most {limit} may be", 60.0)
            folder = session.folder / f"train.{number}"
            folder.mkdir(exist_ok=True)
            journal, _ = await asyncio.to_thread(Journal.open, folder / JOURNAL)
            first = journal.append(first_record(facts))
            await first.on_disk()
            return self._new_model(session, facts, folder, journal, [first])

    def _new_model(
        self,
        session: Session,
        facts: Facts,
        folder: Path,
        journal: Journal,
        records: Sequence[Record],
    ) -> TrainedModel:
        account = self._account(facts.owner)
        history = History(facts, folder, journal, records, account, self._options)
        surroundings = Surroundings(
            self._options,
            self._served[facts.base],
            self._checkpoints,
            self._versions,
            session.snapshot,
            session.totals,
        )
        model = TrainedModel(folder, history, surroundings)
        session.models[int(folder.name.rpartition(".")[2])] = model
        return model

    async def sweep(self) -> None:
        """Remove the finished sessions that are too many."""
        finished = defaultdict[str, list[Session]](list)
        for session in sorted(self, key=lambda each: each.facts.time):
            if session.finished:
                finished[session.owner].append(session)
        for of_owner in finished.values():
            for session in of_owner[: -self._options.finished_sessions]:
                models = (model.history.requests for model in session.models.values())
                histories = (session.requests, *models)
                if all(requests.may_go(self._options) for requests in histories):
                    for requests in histories:
                        requests.forget_all()
                    del self._by_id[session.facts.session_id]
                    await session.close()
                    await asyncio.to_thread(shutil.rmtree, session.folder)

    def _versions(self, owner: str, sequence_id: str) -> tuple[str, Versions] | None:
        session = self._by_id.get(sequence_id.partition(":")[0])
        if session is None or session.owner != owner:
            return None
        return session.versions(sequence_id)

    async def close(self) -> None:
        for session in self:
            await session.close()


@contextmanager
def busy_disk() -> Iterator[None]:
    """Raise Busy for what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise Busy(str(error), DISK_SECONDS) from error
