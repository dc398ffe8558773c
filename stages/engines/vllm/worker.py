"""Weight updates inside vLLM's worker processes: from the node's shared memory into vLLM's model.

    start_weight_update ──▶ update_weights(land) ────────────▶ update_weights(load) ──▶ finish_weight_update
                               │ in a thread, beside generation:  │ vLLM is paused: it splits, fuses and packs
                               │ the bytes are in the node's      │ the full tensors, as at its start
                               │ memory, checksums are compared
                               └─▶ reports to the engine through a file store

The first worker has the node's depot (``weights.transport.depot``) hold the bytes, and all workers
map them where they lie. Weights that the engine was given as tensors it has written to memory of
its own. A landing that fails leaves the model unchanged.

vLLM imports this module in each worker because the engine names :class:`WorkerExtension` as
``worker_extension_cls``. The import registers the transports in the process that owns the model,
and ends that process with the engine. The bytes do not pass through the engine's pipe.
``model.load_weights`` alone is not enough: on the CPU vLLM keeps packed linear weights and empty
parameters.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from pipeline.compat.extras import extra
from stages.engines.vllm.library import ENGINE_PROCESS
from stages.engines.vllm.weights import (
    HALF_LOADED,
    RECEIVED,
    TRANSPORT,
    received_file,
)
from stages.model.load import checkpoint_tensors, empty_model, saved_buffers
from stages.weights.published import Published, WeightsUnreachable, tensors_of, verify
from stages.weights.transport.depot import Depot
from stages.weights.transport.network import Credentials
from stages.weights.transport.store import WeightStore, mapped

with extra("vllm"):
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )


class WorkerExtension:
    """Mixed into vLLM's worker class. vLLM imports this module because the engine names this
    class."""

    model_runner: Any

    def adapt_heads_of_prompts(self) -> bool:
        """Have logprobs of a prompt computed with the adapter on the head of its request.

        vLLM chooses this adapter by the places of sampled tokens, which those of a prompt are not
        among. Returns whether this vLLM's model runner is one that can be told.
        """
        runner = self.model_runner
        if not hasattr(runner, "num_prompt_logprobs"):
            return False
        compute = runner._get_prompt_logprobs_dict

        def compute_each(*step: Any) -> dict[str, Any]:
            asked = runner.num_prompt_logprobs
            logprobs: dict[str, Any] = {}
            logits_of = runner.model.compute_logits
            for request_id, count in [*asked.items()]:
                request = runner.requests[request_id].lora_request
                runner.num_prompt_logprobs = rest = {request_id: count}
                runner.model.compute_logits = partial(_logits, runner, logits_of, request)
                try:
                    logprobs |= compute(*step)
                finally:
                    runner.num_prompt_logprobs = asked
                    runner.model.compute_logits = logits_of
                if not rest:
                    del asked[request_id]
            return logprobs

        runner._get_prompt_logprobs_dict = compute_each
        return True


def _logits(runner: Any, logits_of: Any, request: Any, states: torch.Tensor) -> torch.Tensor:
    """Return the logits of hidden ``states`` [N, H] with the adapters that ``request`` names."""
    mapping = (request.lora_int_id,) * len(states)
    runner._set_active_loras(mapping, mapping, {request})
    logits: torch.Tensor = logits_of(states)
    return logits


@dataclass
class InitInfo(WeightTransferInitInfo):
    directory: str  # of the WeightStore that the engine's processes share
    landed: str  # file of the store in which workers report what has landed


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    published: dict[str, Any]  # Published.record()
    written: bool  # by the engine, into its own store; else it comes from the node's depot
    # key of the file store in which the worker reports the landing; "": load what has landed
    report_key: str


class WeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight transfer from the node's depot, or from a
    :class:`~stages.weights.transport.store.WeightStore` that the engine writes."""

    _depot: Depot | None = None

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._store = WeightStore(Path(init_info.directory), slots=1)
        # one at a time: they write to the same memory
        self._landing = ThreadPoolExecutor(1, "weights-land")
        self._engine = FileStore(init_info.landed, -1)
        # vLLM may have wrapped the model's class for itself
        with set_current_vllm_config(self.vllm_config):
            self._kind = empty_model(self.model_config.model)  # for the names of its checkpoints
        self._buffers = saved_buffers(self.model_config.model, self._kind)

    def start_weight_update(self) -> None:
        """Do nothing: the model is unchanged until the bytes have been verified."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Start to land a version, or load the one that has landed.

        An error of loading has :data:`HALF_LOADED` in its text. The workers of an engine share the
        node's memory: the first one lands for all.
        """
        published = Published.from_record(update_info.published)
        if not update_info.report_key:
            self._load(published, update_info.written)
        elif self.parallel_config.rank == 0:
            self._landing.submit(self._land, published, update_info.written, update_info.report_key)

    def _land(self, published: Published, written: bool, report_key: str) -> None:
        report: dict[str, Any] = {}
        try:
            self.land(published, written)
        except Exception as error:
            report = {"gone": isinstance(error, WeightsUnreachable), "reason": str(error)}
        self._engine.set(report_key, json.dumps(report))

    def land(self, published: Published, written: bool) -> None:
        """Verify the bytes of ``published`` in the store, where the engine has ``written`` them, or
        have the node's depot hold them.

        Raises ``WeightsDamaged`` and ``WeightsUnreachable``.
        """
        if written:
            return verify(self._store.mapped(published), published)
        if self._depot is None:
            self._depot = Credentials.read(self._store.directory).depot()
        path = self._received(published)
        self._depot.link(published, path)
        for file in path.parent.glob(f"{RECEIVED}*"):
            if file != path:  # landed before, and not loaded
                file.unlink(missing_ok=True)

    def _received(self, published: Published) -> Path:
        return received_file(self._store.directory, published)

    def _load(self, published: Published, written: bool) -> None:
        data = (
            self._store.mapped(published)
            if written
            else mapped(self._received(published))[: published.nbytes]
        )
        # A module that gets some of its tensors gets none of the others back: buffers are loaded
        # again too.
        weights = checkpoint_tensors(self._kind, tensors_of(data, published)) | self._buffers
        try:
            with torch.no_grad(), set_current_vllm_config(self.vllm_config):
                self._forget_packed_experts()
                initialize_layerwise_reload(self.model)
                self.model.load_weights(weights.items())
                finalize_layerwise_reload(self.model, self.model_config)
                self._repack_tied_heads()
        except Exception as error:
            raise RuntimeError(f"{HALF_LOADED}: {error!r}") from error

    def _repack_tied_heads(self) -> None:
        """Pack heads that share the embedding's weight again: vLLM's packed copy on the CPU is not
        updated by loading."""
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            for head in self.model.modules():
                if isinstance(head, ParallelLMHead):
                    head.quant_method.process_weights_after_loading(head)

    def _forget_packed_experts(self) -> None:
        """Have vLLM pack experts for the CPU again: it does so only when it first loads them, and
        would compute with new weights in a layout that they are not in."""
        for module in self.model.modules() if self.device.type == "cpu" else ():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def finish_weight_update(self) -> None:
        """Do nothing: ``update_weights`` has loaded the weights."""

    def shutdown(self) -> None:
        if hasattr(self, "_store"):
            self._landing.shutdown(wait=False, cancel_futures=True)
            self._store.close()
        if self._depot is not None:
            self._depot.close()


def end_with(engine: int) -> None:
    """End this process, and vLLM's engine core that started it, when the process ``engine`` ends,
    by SIGKILL too. Without this, vLLM's processes would run on for ever."""
    core = os.getppid()

    def end() -> None:
        if core != engine:
            os.kill(core, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        watched = os.pidfd_open(engine)
    except ProcessLookupError:
        end()
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        end()

    threading.Thread(target=wait, name="end-with-engine", daemon=True).start()


if hasattr(os, "pidfd_open") and ENGINE_PROCESS in os.environ:
    end_with(int(os.environ[ENGINE_PROCESS]))
WeightTransferEngineFactory.register_engine(TRANSPORT, WeightTransfer)
