"""From a recipe to engines, tokenizer and prompts: the one place that knows which adapter a name stands for.

Adapters are imported here, when they are asked for: a mock run loads no model code. Engines of others are made by their
factories (:mod:`stages.engines.registry`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchestration.recipe.schema import Recipe
from pipeline.warehouse.arena import shared_memory_directory
from stages import device as devices
from stages.engines.plans import Ranks
from stages.engines.protocols import RolloutEngine, SamplingParams, TrainEngine
from stages.engines.registry import BUILT_IN, EngineUnknown, Side, find_factory
from stages.external_checks import Terms
from stages.models import Tokenizer, load_config, load_model, load_tokenizer, model_folder, weight_shapes
from stages.weights.store import ProbeRule, Publisher, Reader, WeightStore

if TYPE_CHECKING:
    from stages.engines.torch.rollout import TorchRolloutEngine

# Making a model draws from torch's global generator: two threads of an inline run would disturb each other.
_LOADING = threading.Lock()


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The model's tokenizer; the mock model reads characters, as the tiny one."""
    return load_tokenizer("tiny" if recipe.model.source == "mock" else recipe.model.source)


def threads_of(recipe: Recipe, asked: int) -> int:
    """CPU threads of one engine: what the recipe asks, else the cores shared between generation and training, which run
    at the same time when the run is asynchronous, and in turn when it is not."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    training = recipe.train.ranks
    in_turn = recipe.colocated or recipe.staleness_plan.slack == 0
    rollouts = recipe.rollout.workers if recipe.runs_stage("rollout") else 0
    together = training if in_turn else training + rollouts
    return asked or max(1, cores // together)


def sampling_of(recipe: Recipe, tokenizer: Tokenizer) -> SamplingParams:
    rollout = recipe.rollout
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        stop_token_ids=() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),),
    )


def terms_of(recipe: Recipe, tokenizer: Tokenizer) -> Terms:
    """What another program must know to do one of the recipe's stages."""
    source = recipe.model.source
    if source == "mock":
        vocabulary = len(tokenizer)
    else:
        config = load_config(source)
        vocabulary = int(getattr(config, "text_config", config).vocab_size)
    sampling = replace(sampling_of(recipe, tokenizer), budget=recipe.rollout.budget)
    weights: dict[str, tuple[str, tuple[int, ...]]] | None = None
    if source != "mock" and not recipe.runs_stage("update"):
        weights = {name: (recipe.model.dtype, shape) for name, shape in weight_shapes(source).items()}
    return Terms(vocabulary, asdict(sampling), recipe.seed, len(recipe.reward.functions), weights)


def probe_tokens(recipe: Recipe) -> int:
    """Tokens that a swap is probed with, at least: one row where each token is judged, else enough for a percentile."""
    return (1 if recipe.model.dtype == "float32" else 128) if recipe.sync.probe else 0


def probe_rule(recipe: Recipe) -> ProbeRule | None:
    """How probed logprobs are held to the trainer's; None: nothing is probed."""
    sync, source = recipe.sync, recipe.model.source
    if not sync.probe:
        return None
    layers = 1 if source == "mock" else int(getattr(load_config(source).get_text_config(), "num_hidden_layers", 32))
    return ProbeRule(
        getattr(torch, recipe.model.dtype), layers, q95=sync.probe_tolerance, mean=sync.probe_mean_tolerance
    )


def _model(recipe: Recipe, weights: Path | None = None, dtype: str = "") -> tuple[Any, Tokenizer]:
    """The recipe's model, in its dtype or another; ``weights`` is the folder of a checkpoint that replaces its weights."""
    source = recipe.model.source if weights is None else str(weights)
    with _LOADING:
        model, tokenizer = load_model(source, dtype=getattr(torch, dtype or recipe.model.dtype), seed=recipe.seed)
    if recipe.colocated:
        from stages.resharding.swap import separate

        separate(model.parameters())
    return model, tokenizer


def rollout_engine(
    recipe: Recipe, *, version: int, weights: Path | None = None, shared: Path | None = None, secret: bytes = b""
) -> RolloutEngine:
    """``shared`` is a folder in shared memory for this engine alone, that need not be there yet; None makes one. ``secret``
    is what the run's nodes know each other by, for an engine that receives weights itself."""
    if recipe.colocated:
        return colocated_engine(recipe, Ranks(0, recipe.train.dp, recipe.train.tp), version=version, weights=weights)
    if recipe.rollout.engine not in BUILT_IN["rollout"]:
        engine: RolloutEngine = _foreign("rollout", recipe, RolloutEngine, version=version, weights=weights)
        return engine
    if recipe.rollout.engine == "mock":
        from stages.engines.mock.engines import MockRolloutEngine
        from stages.engines.mock.options import MockRolloutOptions

        options = {
            "max_rows": recipe.rollout.max_rows,
            "vocabulary": len(tokenizer_of(recipe)),
            **recipe.rollout.mock,
        }
        return MockRolloutEngine(MockRolloutOptions(**options), version=version)
    if recipe.rollout.engine == "vllm":
        shared = shared or Path(tempfile.mkdtemp(prefix="asyncdock-rollout-", dir=shared_memory_directory()))
        try:
            return _vllm_engine(recipe, version, weights, shared, secret)
        except BaseException:  # an engine that is made removes it when it is closed
            shutil.rmtree(shared, ignore_errors=True)
            raise
    return _torch_engine(recipe, version, weights, devices.select(recipe.rollout.device))


def _foreign(side: Side, recipe: Recipe, protocol: type, **told: Any) -> Any:
    """The engine that somebody else's factory makes. Raises EngineUnknown when it is none."""
    section = recipe.rollout if side == "rollout" else recipe.train
    engine = find_factory(side, section.engine)(recipe, **told, **section.options)
    lacks = [name for name in vars(protocol) if not name.startswith("_") and not hasattr(engine, name)]
    if lacks:
        raise EngineUnknown(
            f"{side}.engine = {section.engine!r} has made a {type(engine).__name__}, which has no {' and no '.join(lacks)}; "
            f"make what has all of {protocol.__name__} in stages/engines/protocols.py"
        )
    return engine


def colocated_engine(
    recipe: Recipe, ranks: Ranks, *, version: int = 0, weights: Path | None = None
) -> TorchRolloutEngine:
    """The rollout engine of one of the ranks, on the device that it shares with that rank of the train engine."""
    device = devices.of_rank(devices.select(recipe.rollout.device), ranks.rank)
    devices.use(device)
    return _torch_engine(recipe, version, weights, device, packed=False)


def _torch_engine(
    recipe: Recipe, version: int, weights: Path | None, device: torch.device, packed: bool | None = None
) -> TorchRolloutEngine:
    from stages.engines.torch.rollout import TorchRolloutEngine

    model, tokenizer = _model(recipe, weights)
    return TorchRolloutEngine(
        model,
        tokenizer,
        max_rows=recipe.rollout.max_rows,
        threads=threads_of(recipe, recipe.rollout.threads),
        initial_version=version,
        device=device,
        packed=packed,
    )


def weight_publisher(recipe: Recipe, shared: Path, secret: bytes) -> Publisher:
    """Where the train engine of this process (the first of its ranks) puts its weights; ``shared`` is the run's folder in
    shared memory, ``secret`` what the run's nodes know each other by."""
    store = WeightStore(shared)
    if recipe.sync.transport == "shared_memory":
        return store
    from stages.weights.collective import WeightSender

    device = devices.of_rank(devices.select("cpu" if recipe.train.engine == "mock" else recipe.train.device), 0)
    tls = recipe.pipeline.tls_contexts()
    try:
        return WeightSender(store, device, host=recipe.sync.serve, secret=secret, tls=tls and tls[0])
    except OSError as error:
        fix = "give the address under which engines reach the node that trains"
        raise OSError(f"sync.serve = {recipe.sync.serve!r}: nothing can be served there ({error}); {fix}") from error


def weight_reader(recipe: Recipe, shared: Path, secret: bytes) -> Reader:
    """Where a rollout engine gets the weights that :func:`weight_publisher` has."""
    if recipe.sync.transport == "shared_memory":
        return WeightStore(shared)
    from stages.weights.collective import WeightReceiver

    device = devices.select("cpu" if recipe.rollout.engine == "mock" else recipe.rollout.device)
    tls = recipe.pipeline.tls_contexts()
    return WeightReceiver(device, secret=secret, tls=tls and tls[1])


def _vllm_engine(recipe: Recipe, version: int, weights: Path | None, shared: Path, secret: bytes) -> RolloutEngine:
    from stages.engines.vllm.rollout import VllmCollectiveEngine, VllmRolloutEngine
    from stages.weights.collective import Credentials

    rollout = recipe.rollout
    folder = weights or shared / "model"
    if weights is None and recipe.model.source != "tiny":
        folder = model_folder(recipe.model.source)
    elif weights is None:  # made from the seed: there is no folder that vLLM could read
        model, tokenizer = _model(recipe, None)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    engine: type[VllmRolloutEngine] = VllmRolloutEngine
    if recipe.sync.transport == "collective":
        engine = VllmCollectiveEngine
        Credentials(secret, recipe.pipeline.tls_authority if recipe.pipeline.tls_certificate else None).write(shared)
    return engine(
        folder,
        shared=shared,
        dtype=getattr(torch, recipe.model.dtype),
        max_rows=rollout.max_rows,
        filters=bool(rollout.top_k) or rollout.top_p < 1,
        threads=threads_of(recipe, rollout.threads),
        transfer_timeout=recipe.sync.timeout,
        initial_version=version,
        **rollout.vllm.model_dump(),
    )


def train_engine(recipe: Recipe, ranks: Ranks | None = None, meeting: Path | None = None) -> TrainEngine:
    """The whole engine in this process, or that of one of the ``ranks`` of a run, which find each other by the file
    ``meeting``; then all of them make this call."""
    train = recipe.train
    if train.engine not in BUILT_IN["train"]:
        told = {"ranks": ranks or Ranks(0), "meeting": meeting}
        engine: TrainEngine = _foreign("train", recipe, TrainEngine, **told)
        return engine
    if train.engine == "mock":
        from stages.engines.mock.engines import MockTrainEngine
        from stages.engines.mock.options import MockTrainOptions

        return MockTrainEngine(MockTrainOptions(**train.mock), seed=recipe.seed)
    mixed = train.precision == "mixed"
    if ranks is None and not mixed:
        return reference_engine(recipe)
    from torch.distributed import FileStore, HashStore

    from stages.engines.torch.sharded import ShardedTrainEngine

    model, _ = _model(recipe, dtype="float32" if mixed else "")
    ranks = ranks or Ranks(0)
    if meeting is not None:  # torch would let all users read it
        os.close(os.open(meeting, os.O_CREAT | os.O_WRONLY, 0o600))
    return ShardedTrainEngine(
        model,
        ranks,
        compute=getattr(torch, recipe.model.dtype),
        store=FileStore(str(meeting), ranks.world) if meeting else HashStore(),
        timeout=recipe.launch.collective_timeout,
        **_train_options(recipe),
    )


def reference_engine(recipe: Recipe) -> TrainEngine:
    """The recipe's policy on one rank, all of it in model.dtype: what a frozen reference is."""
    if recipe.train.engine != "torch":
        return train_engine(recipe)
    from stages.engines.torch.train import TorchTrainEngine

    model, _ = _model(recipe)
    return TorchTrainEngine(model, **_train_options(recipe))


def _train_options(recipe: Recipe) -> dict[str, Any]:
    train = recipe.train
    return {
        "learning_rate": train.learning_rate,
        "total_steps": train.steps,
        "schedule": train.schedule,
        "warmup_steps": train.warmup_steps,
        "weight_decay": train.weight_decay,
        "betas": train.betas,
        "grad_clip": train.grad_clip,
        "token_budget": train.token_budget,
        "temperature": recipe.rollout.temperature,
        "activation_checkpointing": train.activation_checkpointing,
        "threads": threads_of(recipe, train.threads),
        "device": devices.select(train.device),
    }
