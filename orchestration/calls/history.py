"""What is recorded of a model: its calls, their answers, and the state that it is rebuilt from.

FOLDER/journal     facts, counts and state │ call │ call │ answer │ …
      /state-SEQ   the model after call SEQ; calls up to it are not needed any more
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestration.calls.interface import CallOptions, Failed
from orchestration.calls.journal import Journal, Record
from orchestration.calls.ledger import Ledger
from orchestration.calls.requests import Account, Request, Requests
from orchestration.calls.steps import Steps
from stages.calls.interface import ModelOptions

LATE = "it came after later calls had been served; send it again under a new number"


@dataclass(frozen=True)
class Facts:
    """What a model is, for good. ``is_copy``: it has a copy of a checkpoint, and is not trained."""

    model_id: str
    owner: str
    base: str
    options: ModelOptions
    metadata: Mapping[str, Any]
    is_copy: bool = False

    @classmethod
    def of(cls, packed: Mapping[str, Any]) -> Facts:
        return cls(**{**packed, "options": ModelOptions(**packed["options"])})


@dataclass(frozen=True)
class State:
    """A saved state, in which calls up to ``seq`` are. ``name``: of its folder; "": the model as it
    is created."""

    seq: int = -1
    step: int = 0
    name: str = ""


class History:
    """``records``: of ``journal``, which is in ``folder``."""

    def __init__(
        self,
        facts: Facts,
        folder: Path,
        journal: Journal,
        records: Sequence[Record],
        account: Account,
        options: CallOptions,
    ) -> None:
        self.facts = facts
        self.step = 0
        """Optimizer steps of the weights after all calls that have an outcome."""
        self.failure: Failed | None = None
        """Why the model could not be created."""
        self.served = -1
        """The number up to which calls have an outcome, or are given up."""
        self.unserved = set[int]()
        self.state = State()
        self.changed = asyncio.Event()
        """Set by each new call."""
        self.requests = Requests(journal, account, self._arrived)
        self.ledger = Ledger()
        self.steps = Steps()
        self._by_seq = dict[int, Request]()
        self._folder = folder
        self._journal = journal
        self._options = options
        self._state_record: Record | None = None
        self._steps_since_state = 0
        self._bytes_since_state = 0
        for record in records:
            self._take(record)
        self._remove_states()

    def _take(self, record: Record) -> None:
        head = record.head
        if "model" in head:
            self._state_record = record
            self.ledger = Ledger(head["ledger"])
            self.steps = Steps(head.get("steps"))
            self._set_state(State(**head["state"]))
            self.served = max(self.served, self.state.seq)
            self.step = self.state.step
            return
        request = self.requests.load(record)
        self._by_seq[request.head["seq"]] = request
        if "answer" in head:
            self._count(request)
        else:
            self.unserved.add(request.head["seq"])

    def _set_state(self, state: State) -> None:
        self.state = state
        self._steps_since_state = 0
        self._bytes_since_state = 0

    def _remove_states(self) -> None:
        for folder in self._folder.glob("*state-*"):
            if folder.name != self.state.name:
                shutil.rmtree(folder, ignore_errors=True)

    def _arrived(self, request: Request) -> None:
        seq = request.head["seq"]
        self._by_seq[seq] = request
        if seq <= self.served:
            self.requests.answer(request, Failed(LATE, by_client=True))
        else:
            self.unserved.add(seq)
            self.changed.set()

    def _count(self, request: Request) -> None:
        """Take the outcome of ``request`` into account."""
        assert request.outcome is not None
        answer = request.outcome.head
        seq = request.head["seq"]
        self.unserved.discard(seq)
        self.served = max(self.served, seq)
        self.step = answer.get("step", self.step)
        self.ledger.count(request.head, answer)
        self.steps.count(request.head, answer)
        self._bytes_since_state += request.size
        self._steps_since_state += request.kind == "optim_step"
        if "state" in answer:
            self._set_state(State(**answer["state"]))
        if seq == 0 and not request.succeeded:
            self.failure = Failed(*answer["failed"])

    async def call(self, kind: str, seq: int, blob: bytes, **head: Any) -> str:
        """Record a call, and return its request's id. Raises Busy, CallRefused."""
        request_id = f"{self.facts.model_id}:{seq}"
        if seq > self.served or seq in self._by_seq:
            must = seq == self.served + 1  # others wait for it
            packed = {"call": request_id, "kind": kind, "seq": seq, **head}
            await self.requests.add(packed, blob, must=must)
        return request_id

    def answer(self, request: Request, outcome: bytes | Failed, facts: Mapping[str, Any]) -> None:
        """Record the outcome of a call. ``facts``: what is recorded beside it."""
        self.requests.answer(request, outcome, **facts)
        self._count(request)

    def waiting_since(self) -> float:
        """Return when the first of the calls without an outcome came."""
        return min(self._by_seq[seq].arrived for seq in self.unserved)

    def after(self, seq: int) -> Request:
        """Return the call that follows ``seq``: the next one, or the next that there is."""
        request = self._by_seq.get(seq + 1)
        return request or self._by_seq[min(later for later in self._by_seq if later > seq)]

    def blob(self, request: Request) -> bytes:
        assert request.call is not None
        return self._journal.read(request.call)

    @property
    def has_steps(self) -> bool:
        """Whether a state would spare a step at the next start."""
        return self._steps_since_state > 0

    @property
    def is_long(self) -> bool:
        """Whether it is time for another state."""
        return (
            self._steps_since_state >= self._options.state_steps
            or self._bytes_since_state >= self._options.state_bytes
        )

    def state_folder(self, state: State) -> Path | None:
        return self._folder / state.name if state.name else None

    async def shorten(self, state: State) -> None:
        """Make ``state``, which is saved, the model's, and remove the records that nobody needs.
        Raises OSError."""
        first = first_record(self.facts, self.ledger, self.steps, state)
        record = self._journal.append(first)
        await record.on_disk()
        self._state_record = record
        self._set_state(state)
        for request in self._forgettable():
            self.requests.forget(request)
            del self._by_seq[request.head["seq"]]
        for request in self.requests:
            if request.answered.is_set() and request.head["seq"] <= state.seq:
                request.call = None
        await self._journal.rewrite(self._live)
        await asyncio.to_thread(self._remove_states)

    async def sweep(self, *, finished: bool) -> None:
        """Forget answers that were read, as far as they are in the state; ``finished``: and the
        state itself. Raises OSError."""
        last = State(self.served, self.step)
        if finished and not self.unserved and self.state != last:
            await self.shorten(last)
        elif self._forgettable():
            await self.shorten(self.state)

    def _forgettable(self) -> list[Request]:
        requests = self.requests.forgettable(self._options)
        return [request for request in requests if request.head["seq"] <= self.state.seq]

    def _live(self) -> list[Record | None]:
        return [self._state_record, *self.requests.records()]

    async def close(self) -> None:
        await self._journal.close()


def first_record(
    facts: Facts,
    ledger: Ledger | None = None,
    steps: Steps | None = None,
    state: State | None = None,
) -> dict[str, Any]:
    """Return the head of the record that a model's journal begins with."""
    ledger = ledger or Ledger()
    return {
        "model": asdict(facts),
        "ledger": ledger.counts,
        "steps": (steps or Steps()).packed(),
        "state": asdict(state or State()),
    }
