"""Factories of what a recipe names: rollout and train engines, tokenizer, sampling parameters, and
the transport of weights.

An adapter is imported when its engine is made: a mock run loads no model code. Engines that are not
built in are made by their factories (:mod:`stages.engines.registry`).
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchestration.guard.rules import PROBE
from orchestration.recipe.devices import threads_of
from orchestration.recipe.flow import algorithm_of
from orchestration.recipe.model_files import PLAIN_MODELS, end_tokens
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import FILTERS
from orchestration.recipe.sizes.planner import longest_row, longrope_change, vocabulary_of
from pipeline.data.arena import shared_memory_directory
from pipeline.node import AUTO, announced, is_loopback
from pipeline.problems import Problem
from stages import device as devices
from stages.engines.protocols import RolloutEngine, SamplingParams, TrainEngine
from stages.engines.registry import EngineUnknown, Side, find_factory
from stages.model.load import (
    Tokenizer,
    load_config,
    load_model,
    model_folder,
    model_skeleton,
)
from stages.parallel.layout import ALONE, RankCoordinates
from stages.weights.transport.roles import Publisher, Reader
from stages.weights.transport.store import WeightStore
from stages.weights.verification.probe import ProbeRule

if TYPE_CHECKING:
    from torch.distributed import Store

    from stages.engines.torch.critic import TorchCriticEngine
    from stages.engines.torch.model.packing import MasksOf
    from stages.engines.torch.parallel.interface import Parallel
    from stages.engines.torch.rollout import TorchRolloutEngine

# Making a model draws from torch's global generator: two threads of an inline run would disturb
# each other.
_LOADING = threading.Lock()


def sampling_of(recipe: Recipe, tokenizer: Tokenizer) -> SamplingParams:
    """Return how responses are sampled.

    One ends with the tokenizer's end token, one of those that the model's generation_config.json
    names, or one of ``rollout.stop_token_ids``.
    """
    source = recipe.model.source
    ends = set(recipe.rollout.stop_token_ids)
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    if source not in PLAIN_MODELS:
        ends |= end_tokens(model_folder(source))
    sampling = recipe.rollout.model_dump(include={"max_tokens", *FILTERS})
    biases = sampling.pop("logit_bias").items()
    return SamplingParams(
        **sampling,
        logit_bias=tuple((int(token), bias) for token, bias in biases),
        temperature=recipe.logprob_temperature,
        structure=recipe.rollout.structure.of_responses,
        stop=tuple(recipe.rollout.stop),
        stop_token_ids=tuple(sorted(ends)),
    )


def unpadded_vocabulary(recipe: Recipe) -> int | None:
    """Return the number of the first tokens that the tokenizer has or that end a response; None
    where the model's embedding has no further ones, which pad it."""
    size = vocabulary_of(recipe)
    tokenizer = tokenizer_of(recipe)
    ends = sampling_of(recipe, tokenizer).stop_token_ids
    known = max((*tokenizer.get_vocab().values(), *ends)) + 1
    return known if size is not None and known < size else None


def known_vocabulary(recipe: Recipe) -> int | None:
    """Return how many of the first tokens have a probability; None: all of the model's."""
    return unpadded_vocabulary(recipe) if recipe.masks_padding else None


def masks_of(recipe: Recipe) -> MasksOf | None:
    """Return which tokens of a response could have been sampled; None: all of the model's."""
    structure = recipe.rollout.structure.of_responses
    size = vocabulary_of(recipe)
    if structure is None or size is None:
        return None
    from stages.engines.torch.model.matchers import Matchers

    tokenizer = tokenizer_of(recipe)
    ends = sampling_of(recipe, tokenizer).stop_token_ids
    return partial(Matchers(tokenizer, size).masks, structure, ends)


def probe_tokens(recipe: Recipe) -> int:
    """Return the least number of tokens that a swap is probed with: one row where each token is
    judged, else enough for a percentile; 0 without probes."""
    return (1 if recipe.model.dtype == "float32" else 128) if recipe.sync.probe else 0


def probe_rule(recipe: Recipe) -> ProbeRule | None:
    """Return how far probed logprobs may lie from the trainer's; None: nothing is probed."""
    sync = recipe.sync
    source = recipe.model.source
    if not sync.probe:
        return None
    dtype = getattr(torch, recipe.model.dtype)
    rule = ProbeRule(dtype) if source == "mock" else ProbeRule.of(dtype, load_config(source))
    return replace(rule, q95=sync.probe_tolerance, alarm=PROBE not in recipe.guard.off)


def _model(recipe: Recipe, weights: Path | None = None, dtype: str = "") -> tuple[Any, Tokenizer]:
    """Load the recipe's model, in its dtype or another; ``weights``: a checkpoint folder that
    replaces its weights."""
    source = recipe.model.source if weights is None else str(weights)
    with _LOADING:
        model, tokenizer = load_model(
            source, dtype=getattr(torch, dtype or recipe.model.dtype), seed=recipe.seed
        )
    if recipe.colocated:
        from stages.resharding.tensors import separate

        separate(model.parameters())
    return model, tokenizer


def rollout_engine(
    recipe: Recipe,
    *,
    version: int,
    weights: Path | None = None,
    shared: Path | None = None,
    secret: bytes = b"",
) -> RolloutEngine:
    """Make the engine that ``rollout.engine`` names.

    ``version``: what it begins with; ``weights``: the checkpoint folder with it (None: the recipe's
    model); ``shared``: a folder of its own in shared memory; ``secret``: of the run.
    """
    rollout = recipe.rollout
    if recipe.colocated:
        return colocated_engine(recipe, 0, version=version, weights=weights)
    match rollout.engine:
        case "torch":
            return _torch_rollout(devices.select(rollout.device), recipe, version, weights)
        case "vllm":
            shared_folder = shared or Path(
                tempfile.mkdtemp(prefix="asyncdock-rollout-", dir=shared_memory_directory())
            )
            try:
                return _vllm_rollout(
                    shared_folder,
                    recipe,
                    version,
                    weights,
                    secret,
                    depot=shared.parent if shared else shared_folder,
                )
            except BaseException:  # once the engine exists, its close removes the folder
                shutil.rmtree(shared_folder, ignore_errors=True)
                raise
        case "mock":
            from stages.engines.mock.engines import MockRolloutEngine
            from stages.engines.mock.options import MockRolloutOptions

            options = {
                "max_rows": rollout.max_rows,
                "vocabulary": len(tokenizer_of(recipe)),
                **rollout.mock,
            }
            return MockRolloutEngine(
                MockRolloutOptions(**options), version=version, weights=weights
            )
    engine: RolloutEngine = _by_factory(
        "rollout", recipe, RolloutEngine, version=version, weights=weights
    )
    return engine


def _by_factory(side: Side, recipe: Recipe, protocol: type, **arguments: Any) -> Any:
    """Make the engine of a user's factory. Raises EngineUnknown when the result is no engine."""
    section = recipe.rollout if side == "rollout" else recipe.train
    engine = find_factory(side, section.engine)(recipe, **arguments, **section.options)
    lacks = [
        name for name in vars(protocol) if not name.startswith("_") and not hasattr(engine, name)
    ]
    if lacks:
        problem = f"has made a {type(engine).__name__}, which has no {' and no '.join(lacks)}"
        fix = f"make what has all of {protocol.__name__} in stages/engines/protocols.py"
        raise EngineUnknown(Problem(f"{side}.engine", section.engine, problem, fix))
    return engine


def colocated_engine(
    recipe: Recipe, rank: int, *, version: int = 0, weights: Path | None = None
) -> TorchRolloutEngine:
    """Make the rollout engine of ``rank``, on the device that it shares with this rank of the train
    engine."""
    device = devices.of_rank(devices.select(recipe.rollout.device), rank)
    devices.use(device)
    return _torch_rollout(device, recipe, version, weights, packed=False)


def _torch_rollout(
    device: torch.device,
    recipe: Recipe,
    version: int,
    weights: Path | None,
    packed: bool | None = None,
) -> TorchRolloutEngine:
    from stages.engines.torch.rollout import TorchRolloutEngine

    model, tokenizer = _model(recipe, _base(recipe, weights))
    return TorchRolloutEngine(
        model,
        tokenizer,
        max_rows=recipe.rollout.max_rows,
        threads=threads_of(recipe, recipe.rollout.threads),
        initial_version=version,
        device=device,
        packed=packed,
        adapters=recipe.adapters,
        first=_first_adapters(recipe, weights),
        context=longest_row(recipe),
        routed_experts=recipe.train.router == "replay",
        sampled=known_vocabulary(recipe),
        router_biases=recipe.train.router_bias_rate > 0,
        speculate=_speculates(recipe, device),
        draft_model=_draft_model(recipe),
    )


def _draft_model(recipe: Recipe) -> Any:
    source = recipe.rollout.draft_model
    if source is None or recipe.rollout.speculate == "off":
        return None
    with _LOADING:
        return load_model(source, dtype=getattr(torch, recipe.model.dtype), seed=recipe.seed)[0]


def _speculates(recipe: Recipe, device: torch.device) -> bool:
    """Return whether an engine on ``device`` drafts. Its drafts are of responses that it has made,
    which one that was restarted has not, and their tokens are rounded otherwise."""
    rollout = recipe.rollout
    if rollout.speculate == "auto":
        wanted = device.type == "cpu" or rollout.draft_model is not None
        return wanted and recipe.staleness_plan.slack > 0
    return rollout.speculate == "on"


def _base(recipe: Recipe, weights: Path | None) -> Path | None:
    """Return the folder of the weights that an engine begins with: with adapters, the recipe's own
    model in any case."""
    return None if recipe.adapters else weights


def _first_adapters(recipe: Recipe, weights: Path | None) -> dict[str, torch.Tensor] | None:
    """Return the adapters of the checkpoint whose model is in the folder ``weights``."""
    if recipe.adapters is None or weights is None:
        return None
    from stages.adapters.export import load_adapter
    from stages.adapters.options import ADAPTER

    return load_adapter(weights.with_name(ADAPTER), getattr(torch, recipe.model.dtype))


def _vllm_rollout(
    shared: Path, recipe: Recipe, version: int, weights: Path | None, secret: bytes, *, depot: Path
) -> RolloutEngine:
    from stages.engines.vllm.rollout import VllmReceivingEngine, VllmRolloutEngine
    from stages.model.manifest import verify_part

    rollout = recipe.rollout
    pipeline = recipe.pipeline
    first = _first_adapters(recipe, weights)
    weights = _base(recipe, weights)
    folder = weights or shared / "model"
    if weights is None and recipe.model.source not in PLAIN_MODELS:
        folder = model_folder(recipe.model.source)
    elif weights is None:  # made from the seed: write a folder that vLLM can read
        model, tokenizer = _model(recipe, None)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    verify_part(folder)
    options = rollout.vllm.model_dump(include=set(type(rollout.vllm).model_fields))
    if longrope_change(recipe) is not None:
        options["max_model_len"] = longest_row(recipe)  # vLLM chooses the factors by it
    engine: type[VllmRolloutEngine] = VllmRolloutEngine
    if recipe.adapters is None:
        from stages.weights.transport.network import Credentials

        engine = VllmReceivingEngine
        files = (pipeline.tls_certificate, pipeline.tls_key, pipeline.tls_authority)
        Credentials(secret, depot, files if files[0] else None).write(shared)
    return engine(
        folder,
        shared=shared,
        dtype=getattr(torch, recipe.model.dtype),
        max_rows=rollout.max_rows,
        filters=bool(rollout.filters),
        threads=threads_of(recipe, rollout.threads),
        transfer_timeout=recipe.sync.timeout,
        initial_version=version,
        adapters=recipe.adapters,
        first=first,
        sampled=known_vocabulary(recipe),
        arguments=rollout.vllm.model_extra,
        **options,
    )


def train_engine(
    recipe: Recipe, coordinates: RankCoordinates = ALONE, meeting: Store | None = None
) -> TrainEngine:
    """Make the engine that ``train.engine`` names: the whole engine, or the rank of it at
    ``coordinates``. Ranks make this call together, and find each other in the store ``meeting``."""
    match recipe.train.engine:
        case "torch":
            return _torch_train(recipe, coordinates, meeting)
        case "mock":
            from stages.engines.mock.engines import MockTrainEngine
            from stages.engines.mock.options import MockTrainOptions

            return MockTrainEngine(MockTrainOptions(**recipe.train.mock), seed=recipe.seed)
    engine: TrainEngine = _by_factory(
        "train", recipe, TrainEngine, ranks=coordinates, meeting=meeting
    )
    return engine


def reference_engine(recipe: Recipe, weights: Path | None = None) -> TrainEngine:
    """Make the reference, on one rank, in ``model.dtype``: of the checkpoint folder ``weights``, or
    ``model.reference``, or the policy that the run begins with."""
    if recipe.train.engine != "torch":
        return train_engine(recipe)
    teacher = recipe.model.reference
    return _torch_reference(recipe, weights or (Path(teacher) if teacher else None))


def _torch_reference(recipe: Recipe, weights: Path | None) -> TrainEngine:
    from stages.engines.torch.train import TorchTrainEngine

    model, _ = _model(recipe, weights)
    return TorchTrainEngine(model, **_train_options(recipe), **_distribution(recipe))


def critic_engine(
    recipe: Recipe, coordinates: RankCoordinates = ALONE, meeting: Store | None = None
) -> TorchCriticEngine:
    """Make the critic's engine: its model is ``critic.source``, or that of the policy as the run
    begins.

    ``coordinates``, ``meeting``: as for :func:`train_engine`.
    """
    from stages.engines.torch.critic import VALUE_HEAD, TorchCriticEngine

    critic = recipe.critic
    source = recipe.critic.source
    named = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"source": source or recipe.model.source})}
    )
    options = {
        **_train_options(recipe),
        "compute": getattr(torch, recipe.model.dtype),
        "undoable": True,
    }
    options["learning_rate"] = critic.learning_rate or recipe.train.learning_rate
    options["threads"] = threads_of(recipe, recipe.train.threads)
    options["device"] = devices.select(recipe.train.device)
    head = Path(source) / VALUE_HEAD if source else None
    options["head"] = head if head and head.is_file() else None
    model, parallel = _shared_model(named, recipe.trained_dtype, coordinates, meeting)
    return TorchCriticEngine(model, parallel=parallel, **options)


def _torch_train(
    recipe: Recipe, coordinates: RankCoordinates, meeting: Store | None
) -> TrainEngine:
    from stages.engines.torch.train import TorchTrainEngine

    options = {
        **_train_options(recipe),
        "compute": getattr(torch, recipe.model.dtype),
        "adapters": recipe.adapters,
        "router_loss": recipe.train.router_loss,
        "router_bias_rate": recipe.train.router_bias_rate,
    }
    options["value_head"] = "value head" in algorithm_of(recipe).scores.values()
    options |= _distribution(recipe)
    # which may skip a batch that the policy has trained on
    options["undoable"] = recipe.trains_critic
    # of the model: a frozen one is not trained
    dtype = recipe.model.dtype if recipe.adapters else recipe.trained_dtype
    model, parallel = _shared_model(recipe, dtype, coordinates, meeting)
    return TorchTrainEngine(model, parallel=parallel, **options)


def _distribution(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a train engine that say which tokens have a probability."""
    return {"vocabulary": known_vocabulary(recipe), "masks_of": masks_of(recipe)}


def _shared_model(
    recipe: Recipe, dtype: str, coordinates: RankCoordinates, meeting: Store | None
) -> tuple[Any, Parallel | None]:
    """Load the model of a train engine, and say how its ranks share the work: None for one rank."""
    if coordinates.world == 1:
        return _model(recipe, dtype=dtype)[0], None
    from torch.distributed import HashStore

    from stages.engines.torch.parallel.sharded import Sharded

    with _LOADING:
        opened = model_skeleton(recipe.model.source, dtype=getattr(torch, dtype))
    model, weights = opened or (_model(recipe, dtype=dtype)[0], None)
    timeout = recipe.launch.collective_seconds
    store = meeting or HashStore()
    return model, Sharded(coordinates, weights=weights, store=store, timeout=timeout)


def _train_options(recipe: Recipe) -> dict[str, Any]:
    optimizer = ("optimizer", "learning_rate", "schedule", "schedule_floor", "warmup_steps")
    others = (
        "weight_decay",
        "betas",
        "grad_clip",
        "token_budget",
        "activation_checkpointing",
        "kernels",
    )
    return {
        **recipe.train.model_dump(include={*optimizer, *others}),
        "total_steps": recipe.train.steps,
        "temperature": recipe.logprob_temperature,
        "threads": threads_of(recipe, recipe.train.threads),
        "device": devices.select(recipe.train.device),
        "context": longest_row(recipe),
    }


def sync_addresses(host: str, route: str, others: str) -> tuple[str, str]:
    """Return the address to listen on for ``host``, a recipe's `sync_address`, and the one that
    other nodes are given.

    ``route``, ``others``: see :func:`pipeline.node.announced`. Loopback stays loopback: `check`
    refuses it where other machines start workers. Raises ValueError where other nodes cannot reach
    ``host``.
    """
    try:
        name = host if is_loopback(host) else announced(host, route, others)
    except ValueError as refused:
        raise ValueError(f"pipeline.{refused}") from refused
    return (name if host == AUTO else host), name


def weight_publisher(
    recipe: Recipe, shared: Path, secret: bytes, route: str = "", others: str = ""
) -> Publisher:
    """Make what rank 0 of the train engine publishes weights with.

    ``shared``: the run's folder in shared memory; ``secret``: what engines of the run prove to
    know; ``route``, ``others``: addresses of this node, see :func:`pipeline.node.announced`.
    """
    store = WeightStore(shared)
    if recipe.weight_transport == "shared_memory":
        return store
    from stages.weights.transport.network import WeightSender

    tls = recipe.pipeline.tls_contexts()
    try:
        host, name = sync_addresses(recipe.sync_address, route, others)
        return WeightSender(store, host=host, advertise=name, secret=secret, tls=tls and tls[0])
    except OSError as error:
        fix = "give the address under which engines reach the node that trains"
        raise OSError(
            f"pipeline.serve = {recipe.sync_address!r}: nothing can be served there ({error}); "
            f"{fix}"
        ) from error


def weight_reader(recipe: Recipe, shared: Path, secret: bytes) -> Reader:
    """Make what a rollout engine reads published weights from: one copy that all engines of the
    node map, or where there is one engine a copy of its own. ``shared``: the folder in shared
    memory of the run's workers on this node."""
    if recipe.weight_transport == "shared_memory" and recipe.replicas == 1:
        return WeightStore(shared)
    from stages.weights.transport.depot import Depot

    return Depot(shared, secret=secret, tls=recipe.pipeline.tls_contexts())
