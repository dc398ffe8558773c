"""RolloutEngine in plain torch: continuous batching in one compute thread.

    asyncio loop                              compute thread
    generate() ── submission ──┐              ┌─▶ run the functions in the inbox: only they change the engine
    load_weights() ── swap ────┼──▶ inbox ────┤      submit, abort, pause, resume, swap, sleep, wake, close
    pause(), aclose(), … ──────┘              │   ContinuousBatch.step: admit waiting rows, or decode one token
                                              │
    iterators ◀── call_soon_threadsafe ───────┴── finished rows are delivered; without rows: block on the inbox

A token boundary is one turn of the compute thread's loop. A swap prepares the new weights beside
the old ones in a thread of its own and exchanges references at a boundary: rows in flight keep
their keys and values, and their next tokens carry the new version. Rows that start after a swap get
a new prefill, also those of which an earlier turn was made here.

In a colocated run the engine sleeps while training has the device: rows with tokens are cut, the
others wait, and all memory but the weights' names and shapes is freed. Nothing may be computed
then: the weights' storages may be empty.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog
import torch

from stages import device as devices
from stages.adapters.options import AdapterOptions
from stages.engines.checks import check_request
from stages.engines.protocols import (
    Completion,
    EngineClosed,
    EngineFailed,
    GroupRequest,
    RequestRefused,
    SwapTimes,
    Token,
)
from stages.engines.responses import Responses, engine_failed
from stages.engines.torch.decoding.adapters import OWN
from stages.engines.torch.decoding.batch import ContinuousBatch, Decodes
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.decoding.drafted import DraftedSteps
from stages.engines.torch.decoding.rows import PendingGroup, ResponseRow, Submission
from stages.engines.torch.decoding.weights import WeightSet
from stages.engines.torch.sampling.drawing import ranked
from stages.threads import deferred, run_in_temporary_thread, run_in_thread

log = structlog.get_logger()

T = TypeVar("T")
# for a function that has started at a boundary when its caller gives up, and for the last step
BOUNDARY_SECONDS = 30.0
MOST_LOGITS = 1 << 28  # float32, of a part of a prompt whose logprobs are asked for


class TorchRolloutEngine:
    """Continuous batching over a transformers causal LM, on an accelerator if there is one, else on
    the CPU.

    ``model``: the engine changes it (its attention and, on CPU, its linear layers are replaced).
    ``tokenizer``: needed for stop strings and structures only. ``max_rows``: rows that decode at once.
    ``prefill_tokens``: padded tokens of one prefill forward at most; one prompt always fits.
    ``threads``: torch's CPU threads. ``accelerated`` (None: on an accelerator): decode steps are
    static and recorded, and the next token is launched before the newest one is read; responses are
    the same. ``packed`` (None: on a CPU that has it): weights are copied into the CPU's own layout;
    :attr:`tensors` needs False. ``context``: tokens of the longest sequence, by which a model with
    longrope takes its long factors for all sequences; train engines of the run get the same.
    ``adapters``: the weights that the engine takes are those of adapters beside the model's linear
    layers; it begins with ``first`` of them, or zeros. ``routed_experts``: completions have the
    experts that the model's routers chose. ``router_biases``: the weights that the engine takes have
    the biases of routers too. ``speculate``: rows that are few make several tokens a forward, by
    drafts from earlier responses, or of ``draft_model``, a smaller model of the same tokens, which it
    changes too. Raises ``ValueError`` for a model that keeps its own
    attention, or cannot have the adapters.
    """

    has_structures = True

    def __init__(
        self,
        model: Any,
        tokenizer: Decodes | None = None,
        *,
        max_rows: int,
        threads: int | None = None,
        device: torch.device | str | None = None,
        prefill_tokens: int = 4096,
        initial_version: int = 0,
        accelerated: bool | None = None,
        packed: bool | None = None,
        adapters: AdapterOptions | None = None,
        first: Mapping[str, torch.Tensor] | None = None,
        context: int | None = None,
        routed_experts: bool = False,
        sampled: int | None = None,
        router_biases: bool = False,
        speculate: bool = False,
        draft_model: Any = None,
    ) -> None:
        if max_rows < 1 or prefill_tokens < 1:
            raise ValueError(
                f"max_rows {max_rows}, prefill_tokens {prefill_tokens}: both must be at least 1"
            )
        if router_biases:
            from stages.engines.torch.model.balance import biases_as_parameters

            biases_as_parameters(model)
        chosen = devices.select() if device is None else torch.device(device)
        static = chosen.type != "cpu" if accelerated is None else accelerated
        decoder_of = partial(
            TorchDecoder,
            device=chosen,
            static=static,
            packed=packed,
            context=context,
            sampled=sampled,
        )
        drafting = None
        if draft_model is not None:
            from stages.engines.torch.draft_model import DraftModel, cost_of

            cost = cost_of(draft_model, model)
            drafting = DraftModel(run_in_temporary_thread(lambda: decoder_of(draft_model)), cost)
        self._decoder = run_in_temporary_thread(
            lambda: decoder_of(model, adapters=adapters, routed_experts=routed_experts)
        )
        if first is not None:
            self.fill(first)
        self._batch = ContinuousBatch(
            self._decoder,
            tokenizer,
            max_rows=max_rows,
            prefill_tokens=prefill_tokens,
            version=initial_version,
            launch_ahead=static,
            drafted=DraftedSteps(self._decoder, drafting) if speculate else None,
        )
        self._has_tokenizer = tokenizer is not None
        self._context = self._decoder.max_context
        self._paused = self._asleep = False
        self._failed: BaseException | None = None
        # of a repeated prompt, until a token is made or weights change
        self._last_read: tuple[tuple[str, int, bytes], torch.Tensor] | None = None
        self._closed = False  # nothing is posted after it is set
        # re-entrant: the garbage collector may post an abort at any point
        self._posting = threading.RLock()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loading = asyncio.Lock()
        self._threads = threads
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._thread.start()

    # -- called in the asyncio loop
    # --------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._batch.versions[OWN]

    @property
    def context(self) -> int:
        return self._context

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        """See :class:`RolloutEngine`.

        The rows are submitted before the iterator is awaited. Raises ``ValueError`` for a request
        that cannot be served, and ``EngineClosed``; the iterator raises that and ``EngineFailed``.
        """
        return self._generate(requests, None)

    def stream(
        self, requests: Sequence[GroupRequest], *, alternatives: int = 0
    ) -> AsyncIterator[Token | Completion]:
        return self._generate(requests, alternatives)

    def _generate(self, requests: Sequence[GroupRequest], alternatives: int | None) -> Responses:
        self._refuse_closed()
        for request in requests:
            self._check(request)
        count = sum(len(request.places) for request in requests)
        responses = Responses(count, lambda _: self._post_abort(submission))
        submission = Submission(asyncio.get_running_loop(), responses.queue, alternatives)
        rows: list[ResponseRow] = []
        for request in requests:
            group = PendingGroup(request, request.prompt_ids, waiting=len(request.places))
            rows += [ResponseRow(submission, group, place) for place in request.places]
        self._post(lambda: self._submit(submission, rows))
        return responses

    async def load_weights(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor],
        *,
        hold: bool = False,
        cut: bool = False,
    ) -> SwapTimes:
        async with self._loading:
            self._refuse_closed()
            self._refuse_asleep()
            began = time.perf_counter()
            self._decoder.weights.check(weights)
            preparing = run_in_thread(
                lambda: self._decoder.weights.prepare(weights), "rollout-weights"
            )
            try:
                prepared = await asyncio.shield(preparing)
            except asyncio.CancelledError:
                # The thread still reads the caller's tensors. A second cancellation ends this wait.
                await asyncio.wait([preparing])
                raise
            exposed, replaced = await self._at_boundary(
                lambda: self._swap(version, prepared, hold, cut)
            )
            prepared.clear()
            run_in_thread(replaced.clear, "rollout-weights")
            return SwapTimes(exposed=exposed, hidden=time.perf_counter() - began - exposed)

    async def put_adapters(
        self, name: str, version: int, weights: Mapping[str, torch.Tensor], *, scale: float
    ) -> None:
        if not name:
            raise ValueError("adapters need a name; '' is that of the engine's own weights")
        async with self._loading:
            self._refuse_closed()
            preparing = run_in_thread(
                lambda: self._decoder.weights.prepare_adapters(name, weights, scale),
                "rollout-weights",
            )
            try:
                adapters, prepared = await asyncio.shield(preparing)
            except asyncio.CancelledError:
                await asyncio.wait([preparing])
                raise

            def put() -> None:
                self._last_read = None
                self._decoder.put_adapters(name, adapters, prepared)
                self._batch.become(version, name)

            await self._at_boundary(put)

    async def remove_adapters(self, name: str) -> None:
        async with self._loading:
            await self._at_boundary(lambda: self._batch.remove_adapters(name))

    async def cut(self) -> None:
        await self._at_boundary(self._batch.cut)

    async def score(
        self, prompt_ids: torch.Tensor, response_ids: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor:
        def run() -> torch.Tensor:
            self._refuse_asleep()
            logits = self._decoder.score(prompt_ids, response_ids)
            logprobs = (logits / temperature if temperature else logits).log_softmax(-1)
            return logprobs.gather(1, response_ids.to(logits.device)[:, None])[:, 0].cpu()

        return await self._at_boundary(run)

    async def score_prompt(
        self, request: GroupRequest, *, alternatives: int
    ) -> list[tuple[Token, int]]:
        ids = request.prompt_ids

        def read(place: int, logits: torch.Tensor) -> list[tuple[Token, int]]:
            version = self._batch.version_of(request)
            part = ids[place : place + len(logits)]
            scored = zip(*ranked(logits, part, alternatives), strict=True)
            return [
                (
                    Token(
                        request.group,
                        0,
                        token,
                        logprob,
                        version,
                        tuple(zip(others, rest, strict=True)),
                    ),
                    rank,
                )
                for (token, *others), (logprob, *rest), rank in scored
            ]

        parts = await self.read_prompt(request, 1, read)
        return list(itertools.chain.from_iterable(parts))

    async def read_prompt(
        self, request: GroupRequest, first: int, read: Callable[[int, torch.Tensor], T]
    ) -> list[T]:
        self._check(request)
        most = max(1, MOST_LOGITS // self._decoder.vocabulary)

        def run(place: int) -> T:
            self._refuse_asleep()
            self._batch.version_of(request)
            return read(place, self._prompt_logits(request, place, most))

        # between parts other rows go on; each part computes the tokens before it again
        places = range(first, len(request.prompt_ids), most)
        return [await self._at_boundary(partial(run, place)) for place in places]

    async def pause(self) -> None:
        await self._at_boundary(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._at_boundary(lambda: self._set_paused(False))

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._decoder.weights.tensors()

    @property
    def fused(self) -> bool:
        return self._decoder.fused

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self._decoder.model.named_parameters())

    @torch.inference_mode()
    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._decoder.weights.check(weights)
        self._decoder.weights.install(self._decoder.weights.prepare(weights))

    def cache_bytes(self) -> int:
        return self._decoder.attention.nbytes() + self._batch.resting.nbytes

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
        if not (await asyncio.wait([ended], timeout=BOUNDARY_SECONDS))[0]:
            log.warning(
                "the rollout engine is closed in the middle of a step", waited=BOUNDARY_SECONDS
            )

    def _post(self, function: Callable[[], None]) -> None:
        with self._posting:
            self._refuse_closed()
            self._inbox.put(function)

    def _post_abort(self, submission: Submission) -> None:
        with self._posting:
            if not self._closed:
                self._inbox.put(lambda: self._batch.abort(submission))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the rollout engine is closed")

    def _refuse_asleep(self) -> None:
        if self._asleep:
            raise RuntimeError(
                "the rollout engine sleeps, and its weights may be elsewhere; wake it first"
            )

    async def _at_boundary(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the compute thread before its next token.

        After a cancellation ``function`` has ended or will never run; raises EngineFailed when it
        has started and does not end in time.
        """
        outcome, run = deferred(function)
        self._post(run)
        answer = asyncio.wrap_future(outcome)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if (
                not outcome.cancel()
                and not (await asyncio.wait([answer], timeout=BOUNDARY_SECONDS))[0]
            ):
                raise EngineFailed(
                    "the rollout engine failed: a function that started at a token boundary has "
                    "not ended in "
                    f"{BOUNDARY_SECONDS:g} s"
                ) from None
            raise

    def _check(self, request: GroupRequest) -> None:
        check_request(
            request,
            vocabulary=self._decoder.vocabulary,
            context=self._context,
            adapters=self._batch.versions,
        )
        if request.params.stop and not self._has_tokenizer:
            problem = f"stop is {request.params.stop}"
            raise RequestRefused(request.group, "stop", problem, "stop strings need a tokenizer")

    # -- run in the compute thread
    # ---------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while self._run_inbox():
                self._last_read = None
                try:
                    self._batch.step()
                except BaseException as error:
                    self._fail(error)

    def _run_inbox(self) -> bool:
        """Run the functions in the inbox until the batch can make a token.

        Returns False when the engine was closed.
        """
        while True:
            idle = self._paused or self._asleep or not (self._batch.rows or self._batch.waiting)
            if idle and self._inbox.empty():
                self._last_read = None
            try:
                function = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            try:
                self._batch.read_launched()
            except Exception as error:
                self._fail(error)
            function()
            if function == self._finish:
                return False

    def _submit(self, submission: Submission, rows: list[ResponseRow]) -> None:
        if self._failed is not None:
            submission.deliver([engine_failed(self._failed)])
        else:
            self._batch.submit(rows)

    def _prompt_logits(self, request: GroupRequest, place: int, most: int) -> torch.Tensor:
        """Return what predicts the tokens of a prompt from ``place`` on, at most ``most``. Requests
        of one repeated prompt that wait together share it."""
        ids = request.prompt_ids
        key = (request.adapters, place, ids.cpu().numpy().tobytes())
        if self._last_read is not None and self._last_read[0] == key:
            return self._last_read[1]
        self._last_read = None
        logits = self._decoder.score(ids[:place], ids[place : place + most], request.adapters)
        if request.is_repeated:
            self._last_read = key, logits
        return logits

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _swap(
        self, version: int, prepared: WeightSet, hold: bool, cut: bool
    ) -> tuple[float, list[torch.Tensor]]:
        began = time.perf_counter()
        if cut:
            self._batch.cut()
        self._last_read = None
        replaced = self._decoder.weights.install(prepared)
        self._batch.become(version)
        self._paused = self._paused or hold
        return time.perf_counter() - began, replaced

    def _fall_asleep(self) -> None:
        self._batch.sleep()
        self._last_read = None
        self._asleep = True

    def _wake(self, version: int, hold: bool) -> None:
        self._batch.become(version)
        self._asleep = False
        self._paused = self._paused or hold

    def _fail(self, error: BaseException) -> None:
        self._failed = error
        self._batch.fail(lambda: engine_failed(error))

    def _finish(self) -> None:
        self._batch.fail(lambda: EngineClosed("the rollout engine was closed"))
        del self._batch.decoder, self._decoder
