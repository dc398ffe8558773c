"""What runs inside vLLM's worker processes: new weights, out of the node's shared memory into vLLM's model.

    start_weight_update ──▶ update_weights(published) ──▶ finish_weight_update        vLLM's own weight transfer
                               │ map the store, verify every bucket's checksum: what fails here has touched nothing
                               └ layerwise reload: vLLM splits, fuses and packs the full tensors as it did at its start

vLLM imports this module in each worker because the engine names :class:`WorkerExtension` as ``worker_extension_cls``.
The import registers the transport, which has to happen in the process that owns the model, and ties the process's life
to the engine's. The bytes never pass
through the engine's pipe. A plain ``model.load_weights`` would not do: on the CPU vLLM keeps its linear weights packed
and the parameters empty.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from stages.engines.vllm_rollout import ENGINE_PROCESS, HALF_LOADED, SHARED_MEMORY
from stages.weight_sync import Published, WeightStore


class WorkerExtension:
    """Mixed into vLLM's worker class; naming it is what has this module imported."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    directory: str  # of the WeightStore that the engine writes


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    published: dict[str, Any]  # Published.record()


class SharedMemoryTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight transfer over a :class:`~stages.weight_sync.WeightStore` on the same node."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._store = WeightStore(Path(init_info.directory))

    def start_weight_update(self) -> None:
        """Nothing yet: the model is left alone until the bytes have been verified."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises ``WeightsDamaged`` with the model as it was; any other error leaves it half loaded, and says so."""
        weights = self._store.view(Published.from_record(update_info.published))
        try:
            with torch.no_grad():
                initialize_layerwise_reload(self.model)
                self.model.load_weights(weights.items())
                finalize_layerwise_reload(self.model, self.model_config)
                self._repack_tied_heads()
        except Exception as error:
            raise RuntimeError(f"{HALF_LOADED}: {error!r}") from error

    def _repack_tied_heads(self) -> None:
        """A head that shares the embedding's weight is loaded with it; what vLLM packed from it on the CPU is not."""
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            for head in self.model.modules():
                if isinstance(head, ParallelLMHead):
                    head.quant_method.process_weights_after_loading(head)

    def finish_weight_update(self) -> None:
        """Everything was done when ``update_weights`` returned."""

    def shutdown(self) -> None:
        if hasattr(self, "_store"):
            self._store.close()


def end_with(engine: int) -> None:
    """End this process, and vLLM's engine core that started it, when the process ``engine`` ends however it may: vLLM's
    own would go on for ever after a SIGKILL of the one that they serve."""
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
WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryTransfer)
