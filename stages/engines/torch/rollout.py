"""RolloutEngine in plain torch: continuous batching in one compute thread.

    asyncio loop                              compute thread
    generate() ── submission ──┐              ┌─▶ run what the inbox holds ── the only place where things change:
    load_weights() ── swap ────┼──▶ inbox ────┤      submit, abort, pause, resume, swap, sleep, wake, close
    pause(), aclose(), … ──────┘              │   rows free and rows waiting? ─▶ admit: prefill new prompts, first token
                                              │   else ─▶ decode one token of every row
    iterators ◀── call_soon_threadsafe ───────┴── finished rows leave; nothing to do: block on the inbox

On an accelerator the decode of the next token is launched before the newest one is read: the host reads, checks for ends
and delivers while the device computes. What a row gets beyond its end is dropped; whatever changes the batch (the inbox,
an admission, a row that ended) first brings the rows up to date.

A token boundary is one turn of that loop. Waiting rows are a first-in-first-out queue, a submission enters it whole,
and a turn depends on nothing but the queue and the rows: the same submissions give the same batches and the same bits.
A swap prepares the new weights beside the old ones in a thread of its own and exchanges references at a boundary: rows in
flight keep their KV, and their next tokens carry the new version. Rows that start after a swap get a fresh prefill.

Where training takes turns with it on the device, it sleeps meanwhile: rows with tokens leave as cut, the others wait, and
all but the weights' names and shapes is given back. Nothing may be computed then: the weights' storages may be empty.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import structlog
import torch

from stages import device as devices
from stages.engines.protocols import (
    Completion,
    EngineClosed,
    EngineFailed,
    FinishReason,
    GroupRequest,
    SwapTimes,
)
from stages.engines.torch.decoder import Prompt, TorchDecoder, WeightSet
from stages.engines.torch.sampling import Drawn, draw, uniform
from stages.threads import run_in_temporary_thread, run_in_thread

log = structlog.get_logger()

T = TypeVar("T")
STOP_SLACK = 8  # tokens decoded beyond a stop string's length: its first byte may lie inside a token
BEGUN_SECONDS = (
    30.0  # for what has begun at a token boundary when its caller gives up, and for the last step at the end
)


class Decodes(Protocol):
    """What the engine needs of a tokenizer, and only for stop strings."""

    def decode(self, token_ids: list[int]) -> Any: ...


@dataclass(eq=False)
class _Group:
    """A request while some of its rows have not begun: its prompt's KV, and the logits of the first token."""

    request: GroupRequest
    ids: torch.Tensor  # int64 [P]
    waiting: int
    prompt: Prompt | None = None
    logits: torch.Tensor | None = None  # float32 [V]
    version: int = -1


@dataclass(eq=False)
class _Row:
    submission: _Submission
    group: _Group
    place: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    begun: int = 0  # tokens of earlier visits
    whole: _Group | None = None  # of a row with such tokens, while it waits: a prompt that ends with them
    ended: FinishReason | None = None

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + 1)
        else:
            self.versions.append((version, 1))

    def completion(self) -> Completion:
        assert self.ended is not None
        return Completion(
            group=self.group.request.group,
            place=self.place,
            token_ids=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            versions=tuple(self.versions),
            finish_reason=self.ended,
        )


@dataclass(eq=False)
class _Submission:
    """One call of generate: where its completions go."""

    loop: asyncio.AbstractEventLoop
    results: asyncio.Queue[Completion | BaseException]

    def deliver(self, items: Sequence[Completion | BaseException]) -> None:
        def put() -> None:
            for item in items:
                self.results.put_nowait(item)

        _tell(self.loop, put)


class _Responses(AsyncIterator[Completion]):
    """The iterator that generate returns; the batch is joined before it is first awaited."""

    def __init__(self, submission: _Submission, rows: int, abort: Callable[[_Submission], None]) -> None:
        self._submission, self._left, self._abort = submission, rows, abort

    def __aiter__(self) -> _Responses:
        return self

    async def __anext__(self) -> Completion:
        if not self._left:
            raise StopAsyncIteration
        try:
            item = await self._submission.results.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, BaseException):
            self._left = 0
            raise item
        self._left -= 1
        return item

    async def aclose(self) -> None:
        """Abort what has not been yielded. Harmless when repeated."""
        if self._left:
            self._left = 0
            self._abort(self._submission)

    def __del__(self) -> None:
        if self._left:
            self._abort(self._submission)


class TorchRolloutEngine:
    """Continuous batching over a transformers causal LM, on the accelerator when there is one, else on the CPU.

    ``model`` belongs to the engine from now on (its attention and, on CPU, its linear layers are replaced);
    ``tokenizer`` is needed for stop strings only. ``max_rows`` rows decode at once; ``prefill_tokens`` bounds the
    padded tokens of one prefill forward (one prompt always fits). ``threads`` sets torch's CPU threads, ``dtype``
    converts the model first. ``accelerated`` (None: on an accelerator): decode steps are static and recorded, and the next
    token is launched before the newest one is read, so that the device never waits for the host; responses are the
    same. ``packed`` False: the weights are torch's own tensors on the CPU too, as :attr:`tensors` needs them (None: copies
    in the CPU's own layout where it has one). Raises ``ValueError`` for a model whose attention cannot be served.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Decodes | None = None,
        *,
        max_rows: int,
        threads: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        prefill_tokens: int = 4096,
        initial_version: int = 0,
        accelerated: bool | None = None,
        packed: bool | None = None,
    ) -> None:
        if max_rows < 1 or prefill_tokens < 1:
            raise ValueError(f"max_rows {max_rows}, prefill_tokens {prefill_tokens}: both must be at least 1")
        chosen = devices.select() if device is None else torch.device(device)
        self._launch_ahead = chosen.type != "cpu" if accelerated is None else accelerated
        model = model if dtype is None else model.to(dtype)
        self._decoder = run_in_temporary_thread(
            lambda: TorchDecoder(model, chosen, static=self._launch_ahead, packed=packed)
        )
        self._tokenizer, self._max_rows, self._prefill_tokens = tokenizer, max_rows, prefill_tokens
        self._version = initial_version
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []  # in the order of the decoder's rows
        self._launched: Drawn | None = None  # a token of every row that has not been read
        self._paused = self._asleep = False
        self._failed: BaseException | None = None
        self._closed = False  # nothing is posted after it is set
        self._posting = threading.RLock()  # re-entrant: a collected iterator posts its abort from anywhere
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loading = asyncio.Lock()
        self._threads = threads
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._thread.start()

    # -- the asyncio side ------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @property
    def rows(self) -> int:
        """Rows that are decoding or waiting to (a snapshot)."""
        return len(self._rows) + len(self._waiting)

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        """See :class:`RolloutEngine`. Joins at once, before the iterator is awaited. Raises ``ValueError`` for a
        request that cannot be served, and ``EngineClosed``; the iterator raises that and ``EngineFailed``."""
        self._refuse_closed()
        for request in requests:
            self._check(request)
        submission = _Submission(asyncio.get_running_loop(), asyncio.Queue())
        rows: list[_Row] = []
        for request in requests:
            group = _Group(request, request.prompt_ids, waiting=len(request.places))
            rows += [_row(submission, group, place) for place in request.places]
        self._post(lambda: self._submit(submission, rows))
        return _Responses(submission, len(rows), self._abort_soon)

    async def load_weights(
        self, version: int, weights: Mapping[str, torch.Tensor], *, hold: bool = False, cut: bool = False
    ) -> SwapTimes:
        async with self._loading:
            self._refuse_closed()
            self._refuse_asleep()
            began = time.perf_counter()
            self._decoder.check(weights)
            preparing = run_in_thread(lambda: self._decoder.prepare(weights), "rollout-weights")
            try:
                prepared = await asyncio.shield(preparing)
            except asyncio.CancelledError:
                # The caller's tensors are still being read. Whoever will not wait for that cancels once more.
                await asyncio.wait([preparing])
                raise
            exposed, replaced = await self._at_boundary(lambda: self._swap(version, prepared, hold, cut))
            prepared.clear()
            run_in_thread(replaced.clear, "rollout-weights")
            return SwapTimes(exposed=exposed, hidden=time.perf_counter() - began - exposed)

    async def score(
        self, prompt_ids: torch.Tensor, response_ids: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor:
        def run() -> torch.Tensor:
            self._refuse_asleep()
            logits = self._decoder.score(prompt_ids, response_ids)
            logprobs = (logits / temperature if temperature else logits).log_softmax(-1)
            return logprobs.gather(1, response_ids.to(logits.device)[:, None])[:, 0].cpu()

        return await self._at_boundary(run)

    async def pause(self) -> None:
        await self._at_boundary(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._at_boundary(lambda: self._set_paused(False))

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._decoder.tensors()

    @property
    def fused(self) -> bool:
        return self._decoder.fused

    def cache_bytes(self) -> int:
        return self._decoder.cache_bytes()

    async def sleep(self) -> None:
        await self._at_boundary(self._fall_asleep)

    async def wake(self, version: int, *, hold: bool = False) -> None:
        await self._at_boundary(lambda: self._wake(version, hold))

    async def close(self) -> None:
        with self._posting:
            if not self._closed:
                self._closed = True
                self._inbox.put(self._finish)
        ended = run_in_thread(self._thread.join, "rollout-end")
        if not (await asyncio.wait([ended], timeout=BEGUN_SECONDS))[0]:
            log.warning("the rollout engine is closed in the middle of a step", waited=BEGUN_SECONDS)

    def _post(self, act: Callable[[], None]) -> None:
        with self._posting:
            self._refuse_closed()
            self._inbox.put(act)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the rollout engine is closed")

    def _refuse_asleep(self) -> None:
        if self._asleep:
            raise RuntimeError("the rollout engine sleeps, and its weights may be elsewhere; wake it first")

    def _abort_soon(self, submission: _Submission) -> None:
        with self._posting:
            if not self._closed:
                self._inbox.put(lambda: self._abort(submission))

    async def _at_boundary(self, act: Callable[[], T]) -> T:
        """Run ``act`` in the compute thread before its next token. When this is cancelled ``act`` has run to its end, or
        never will; raises EngineFailed where neither can be had in time."""
        outcome: Future[T] = Future()

        def run() -> None:
            if not outcome.set_running_or_notify_cancel():
                return  # whoever asked has given up
            try:
                outcome.set_result(act())
            except BaseException as error:
                outcome.set_exception(error)

        self._post(run)
        answer = asyncio.wrap_future(outcome)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not outcome.cancel() and not (await asyncio.wait([answer], timeout=BEGUN_SECONDS))[0]:
                raise EngineFailed(
                    f"the rollout engine failed: what it began at a token boundary has not ended in {BEGUN_SECONDS:g} s"
                ) from None
            raise

    def _check(self, request: GroupRequest) -> None:
        ids, params = request.prompt_ids, request.params
        where = f"group {request.group}: "
        if ids.dim() != 1 or ids.dtype != torch.int64 or not len(ids):
            raise ValueError(f"{where}prompt_ids is {ids.dtype} {tuple(ids.shape)}; give int64 [P] with P >= 1")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._decoder.vocabulary:
            raise ValueError(f"{where}prompt_ids has {low}..{high}; the model knows 0..{self._decoder.vocabulary - 1}")
        if not request.places or len(set(request.places)) != len(request.places):
            raise ValueError(f"{where}places is {request.places}; give at least one, each once")
        if min(params.temperature, params.top_k, params.budget, params.max_tokens - 1) < 0 or not 0 < params.top_p <= 1:
            raise ValueError(
                f"{where}{params}; max_tokens >= 1, temperature, top_k and budget >= 0, 0 < top_p <= 1 are needed"
            )
        if params.stop and (self._tokenizer is None or "" in params.stop):
            raise ValueError(f"{where}stop is {params.stop}; stop strings need a tokenizer and may not be empty")
        need, room = len(ids) + params.max_tokens, self._decoder.max_context
        if need > room:
            raise ValueError(
                f"{where}{len(ids)} prompt tokens + max_tokens {params.max_tokens} > context {room}; shorten one"
            )

    # -- the compute thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while self._thread_goes_on():
                try:
                    if self._waiting and len(self._rows) < self._max_rows:
                        self._read_launched()
                    if not self._admit():
                        self._decode()
                except BaseException as error:
                    self._fail(error)

    def _thread_goes_on(self) -> bool:
        """Run the inbox until there is a token to make; False when closed."""
        while True:
            idle = self._paused or self._asleep or not (self._rows or self._waiting)
            try:
                act = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            try:
                self._read_launched()
            except Exception as error:
                self._fail(error)
            act()
            if act == self._finish:
                return False

    def _submit(self, submission: _Submission, rows: list[_Row]) -> None:
        if self._failed is not None:
            submission.deliver([_failure(self._failed)])
        else:
            self._waiting.extend(rows)

    def _abort(self, submission: _Submission) -> None:
        dropped = [row for row in self._waiting if row.submission is submission]
        self._waiting = deque(row for row in self._waiting if row.submission is not submission)
        for row in dropped:
            self._started(row.group)
        for number in reversed(range(len(self._rows))):
            if self._rows[number].submission is submission:
                self._leave(number)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _swap(self, version: int, prepared: WeightSet, hold: bool, cut: bool) -> tuple[float, list[torch.Tensor]]:
        began = time.perf_counter()
        if cut:
            self._cut()
        replaced = self._decoder.install(prepared)
        self._version, self._paused = version, self._paused or hold
        return time.perf_counter() - began, replaced

    def _cut(self) -> None:
        """Rows that have got a token in this visit leave."""
        for row in self._rows:
            row.ended = "cut"
        self._dismiss()

    def _fall_asleep(self) -> None:
        self._cut()
        for row in self._waiting:  # their prompts are computed again: the weights will be others
            row.group.prompt = row.group.logits = None
        self._decoder.clear()
        self._asleep = True
        devices.release_cached(self._decoder.device)

    def _wake(self, version: int, hold: bool) -> None:
        self._version, self._asleep, self._paused = version, False, self._paused or hold

    def _finish(self) -> None:
        self._drop_all(lambda: EngineClosed("the rollout engine was closed"))
        del self._decoder

    def _fail(self, error: BaseException) -> None:
        self._failed = error
        self._drop_all(lambda: _failure(error))

    def _drop_all(self, error: Callable[[], BaseException]) -> None:
        for submission in {id(row.submission): row.submission for row in [*self._rows, *self._waiting]}.values():
            submission.deliver([error()])
        self._rows.clear()
        self._waiting.clear()
        self._launched = None
        self._decoder.clear()

    def _admit(self) -> bool:
        """Start waiting rows, in order, as far as rows and one prefill's tokens allow. False when none may start."""
        count = min(len(self._waiting), self._max_rows - len(self._rows))
        new: list[_Group] = []
        longest = 0
        for i, row in enumerate(itertools.islice(self._waiting, count)):
            needed = [
                group
                for group in (row.group, row.whole)
                if group is not None and (group.prompt is None or group.version != self._version) and group not in new
            ]
            if needed:
                widest = max(longest, *(len(group.ids) for group in needed))
                if new and widest * (len(new) + len(needed)) > self._prefill_tokens:
                    count = i
                    break
                new += needed
                longest = widest
        if not count:
            return False
        self._prefill(new)
        begun = [self._waiting.popleft() for _ in range(count)]
        self._rows += begun
        for row in begun:
            assert row.group.prompt is not None
            self._decoder.join(row.group.prompt, row.whole.prompt if row.whole else None)
        sources = [row.whole or row.group for row in begun]
        logits = torch.stack([source.logits for source in sources if source.logits is not None])
        for row in begun:
            row.whole = None
            self._started(row.group)
        self._extend(len(self._rows) - len(begun), logits)
        return True

    def _prefill(self, groups: list[_Group]) -> None:
        if not groups:
            return
        for group in groups:
            if group.prompt is not None:  # made with older weights; rows in flight keep it
                self._decoder.release(group.prompt)
        prompts, logits = self._decoder.prefill([group.ids for group in groups])
        for group, prompt, first in zip(groups, prompts, logits, strict=True):
            group.prompt, group.logits, group.version = prompt, first, self._version

    def _started(self, group: _Group) -> None:
        """One row of ``group`` waits no more; with the last one the group gives up its hold on the prompt."""
        group.waiting -= 1
        if not group.waiting and group.prompt is not None:
            self._decoder.release(group.prompt)
            group.prompt = group.logits = None

    def _decode(self) -> None:
        """One more token of every row: launched here, and read here unless the next one can be launched before."""
        before = self._launched
        fed = before.tokens if before else torch.tensor([row.tokens[-1] for row in self._rows])
        launched = self._draw(0, self._decoder.decode(fed), unread=1 if before else 0)
        finished = before is not None and self._append(0, before)
        self._launched = launched
        if finished or not self._launch_ahead or self._next_may_end():
            self._read_launched()

    def _next_may_end(self) -> bool:
        """Whether the launched token is the last one that some row may have; then none is launched beyond it."""
        return any(len(row.tokens) + 1 >= row.group.request.params.max_tokens for row in self._rows)

    def _read_launched(self) -> None:
        """Bring the rows up to date; those that have ended leave. Their numbers hold only while nothing is launched."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._append(0, launched)
            self._dismiss()

    def _extend(self, first: int, logits: torch.Tensor) -> None:
        """Draw the next token of each row from number ``first`` on; those that end leave and are delivered."""
        self._append(first, self._draw(first, logits))
        self._dismiss()

    def _draw(self, first: int, logits: torch.Tensor, unread: int = 0) -> Drawn:
        """The next token of each row from number ``first`` on, ``unread`` tokens after the last one that it has."""
        rows = self._rows[first:]
        points = [uniform(row.group.request.seed, row.place, len(row.tokens) + unread) for row in rows]
        return draw(logits, [row.group.request.params for row in rows], points)

    def _append(self, first: int, drawn: Drawn) -> bool:
        """Give the rows from number ``first`` on their tokens; a row that has ended takes none. True if any ended."""
        ended = False
        for row, token, logprob in zip(self._rows[first:], *drawn.read(), strict=True):
            if row.ended is None:
                row.append(token, logprob, self._version)
                row.ended = self._reason(row)
                ended = ended or row.ended is not None
        return ended

    def _dismiss(self) -> None:
        """Rows that have ended leave and are delivered."""
        finished = [number for number, row in enumerate(self._rows) if row.ended is not None]
        results: dict[int, tuple[_Submission, list[Completion | BaseException]]] = {}
        for row in map(self._rows.__getitem__, finished):
            results.setdefault(id(row.submission), (row.submission, []))[1].append(row.completion())
        for submission, completions in results.values():
            submission.deliver(completions)
        for number in reversed(finished):
            self._leave(number)

    def _leave(self, number: int) -> None:
        self._decoder.leave(number)
        last = self._rows.pop()
        if number < len(self._rows):
            self._rows[number] = last

    def _reason(self, row: _Row) -> FinishReason | None:
        params = row.group.request.params
        if row.tokens[-1] in params.stop_token_ids:
            return "stop"
        if params.stop:
            assert self._tokenizer is not None
            # A token is at least one byte, so this many hold any stop string that the newest token has completed.
            tail = max(len(stop.encode()) for stop in params.stop) + STOP_SLACK
            text = self._tokenizer.decode(row.tokens[-tail:])
            if any(stop in text for stop in params.stop):
                return "stop"
        if len(row.tokens) == params.max_tokens:
            return "length"
        return "cut" if params.budget and len(row.tokens) - row.begun >= params.budget else None


def _row(submission: _Submission, group: _Group, place: int) -> _Row:
    """A row that begins, or goes on from what the request gives: then its KV is made again in one prefill."""
    row, request = _Row(submission, group, place), group.request
    if (begun := request.begun.get(place)) is not None:
        row.tokens, row.logprobs = begun.token_ids.tolist(), begun.logprobs.tolist()
        row.versions, row.begun = list(begun.versions), len(row.tokens)
        row.whole = _Group(request, torch.cat([request.prompt_ids.cpu(), begun.token_ids.cpu()]), waiting=1)
    return row


def _failure(error: BaseException) -> EngineFailed:
    failed = EngineFailed(f"the rollout engine failed: {error!r}")
    failed.__cause__ = error
    return failed


def _tell(loop: asyncio.AbstractEventLoop, act: Callable[[], Any]) -> None:
    """Run ``act`` in ``loop``; a loop that has been closed has nobody left to hear it."""
    try:
        loop.call_soon_threadsafe(act)
    except RuntimeError:
        if not loop.is_closed():
            raise
