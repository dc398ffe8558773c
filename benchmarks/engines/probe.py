"""How far the logprobs of two engines lie apart, with the same weights and after a swap that went
wrong: the probe's limits.

    python -m benchmarks.engines.probe [RECIPE] [--dtype bfloat16] [--seeds 0 1 2] [--steps 4] [--no-faults]
                                       [--set KEY=VALUE] [--json FILE]

    generate ─▶ one optimizer step ─▶ the trainer scores a probe ─▶ the engine scores it: still with the weights before (an
    undelivered update), then with the new ones (equal weights); after the last step with damaged ones, layer swapped, …
The engines are the recipe's, in one process; probes and verdict are those of a run (``probe_rows``
in stages/training/update.py, ``ProbeJudge`` in stages/weights/verification/probe.py). Advantages are
random: a step moves the weights as far as any other step of AdamW. It also compares both engines
with the same weights in float32, and prints where that error comes from: how it grows from layer to
layer, and what the output layer and the softmax add in float32 and in bfloat16.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import harness
from orchestration.recipe.flow import algorithm_of
from orchestration.recipe.loading.load import load_recipe
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.workers.engines import (
    probe_rule,
    probe_tokens,
    rollout_engine,
    sampling_of,
    train_engine,
)
from stages.engines.protocols import Completion, GroupRequest, RolloutEngine, TrainEngine
from stages.engines.torch.model.logits import float32_logits
from stages.model.load import load_model
from stages.prompts.sources import load_prompts
from stages.training.update import probe_rows
from stages.weights.published import Probe
from stages.weights.verification.probe import (
    Gap,
    ProbeFailed,
    ProbeJudge,
    ProbeLimits,
    gap,
    probed,
    scored,
)

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ENDS: tuple[tuple[str, Any], ...] = (("least", min), ("largest", max))
TEMPERATURES = (0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 2.0)
Weights = dict[str, torch.Tensor]


@dataclass
class Found:
    """``faults``: by name, each seed's gap, and the refusal's reason ("": it was accepted)."""

    equal: list[Gap] = field(default_factory=list)
    limits: list[ProbeLimits] = field(default_factory=list)  # of each of these
    refused: int = 0  # probes at equal weights
    exact: dict[str, list[Gap]] = field(default_factory=dict)  # each engine against float32
    layers: list[float] = field(default_factory=list)
    faults: dict[str, list[tuple[Gap, str]]] = field(default_factory=dict)


class Pair:
    """One trainer and one rollout engine of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        rule = probe_rule(recipe)
        assert rule is not None, "sync.probe is on"
        self.recipe = recipe
        self.version = 0
        self.trainer: TrainEngine = train_engine(recipe)
        self.rollout: RolloutEngine = rollout_engine(recipe, version=0)
        self.judge = ProbeJudge(rule)
        self.rows = list[list[int]]()
        tokenizer = tokenizer_of(recipe)
        self.prompts = load_prompts(recipe.prompts, tokenizer, recipe.seed).train
        self.sampling = sampling_of(recipe, tokenizer)
        self.algorithm = algorithm_of(recipe)
        self.random = torch.Generator().manual_seed(recipe.seed)
        self._asked = 0

    def weights(self) -> Weights:
        return {name: value.detach().cpu().clone() for name, value in self.trainer.weights()}

    async def load(self, weights: Weights) -> None:
        self.version += 1
        await self.rollout.load_weights(self.version, weights)

    async def score(self, probe: Probe, times: float = 1.0) -> list[torch.Tensor]:
        found = await scored(self.rollout, probe, times * (self.recipe.rollout.temperature or 1.0))
        assert found is not None, "the engine scores at this temperature"
        return found

    async def step(self) -> Probe:
        """Generate, train; the probe of the new weights."""
        size = self.recipe.algorithm.group_size
        requests = dict[int, GroupRequest]()
        for _ in range(self.recipe.train.groups_per_step):
            ids = torch.as_tensor(self.prompts.prompt(self._asked).ids)
            requests[self._asked] = GroupRequest(
                self._asked, tuple(range(size)), ids, self.sampling, self.recipe.seed
            )
            self._asked += 1
        made = [done async for done in self.rollout.generate(list(requests.values()))]
        made.sort(key=lambda done: (done.group, done.place))
        batch = self._batch([requests[done.group].prompt_ids for done in made], made)
        self.trainer.train_batch(batch, self.algorithm)
        self.rows = probe_rows(self.rows, batch, probe_tokens(self.recipe))
        return probed(self.trainer, self.rows)

    def _batch(self, prompts: Sequence[torch.Tensor], made: Sequence[Completion]) -> TensorDict:
        places = {"group": [done.group for done in made], "place": [done.place for done in made]}
        batch = TensorDict(
            {name: torch.tensor(values) for name, values in places.items()}, [len(made)]
        )
        batch["prompt_ids"] = _jagged(prompts)
        batch["response_ids"] = _jagged([done.token_ids for done in made])
        batch["rollout_logprobs"] = _jagged([done.logprobs for done in made])
        batch["advantage"] = torch.randn(len(made), generator=self.random)
        return batch

    async def close(self) -> None:
        await self.rollout.close()
        self.trainer.close()


def _jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


async def measure(recipe: Recipe, steps: int, faults: bool, found: Found) -> None:
    """Add what one seed gives to ``found``."""
    pair = Pair(recipe)
    try:
        for step in range(steps):
            probe = await pair.step()
            new = pair.weights()
            if step:  # before it, the judge has nothing to compare with
                _note(found, "undelivered update", pair.judge, probe, await pair.score(probe))
            await pair.load(new)
            scores = await pair.score(probe)
            found.equal.append(_gap(probe, scores))
            found.limits.append(pair.judge.rule.limits(probe))
            try:
                pair.judge.judge(probe, scores)
            except ProbeFailed as failed:
                found.refused += 1
                print(f"refused at equal weights: {failed}", flush=True)
            print(f"seed {recipe.seed} step {step}: {_line(found.equal[-1])}", flush=True)
        for name, logprobs in against_float32(recipe, probe, new, scores, found):
            found.exact.setdefault(name, []).append(_gap(probe, logprobs))
        if faults:
            for name, weights in damages(new):
                await pair.load(weights)
                _note(found, name, pair.judge, probe, await pair.score(probe))
            await pair.load(new)
            for times in TEMPERATURES:
                _note(
                    found,
                    f"temperature × {times:g}",
                    pair.judge,
                    probe,
                    await pair.score(probe, times),
                )
    finally:
        await pair.close()


def _note(
    found: Found, name: str, judge: ProbeJudge, probe: Probe, scores: list[torch.Tensor]
) -> None:
    reason = ""
    try:
        copy.deepcopy(judge).judge(probe, scores)
    except ProbeFailed as failed:
        reason = str(failed)
    found.faults.setdefault(name, []).append((_gap(probe, scores), reason))
    print(
        f"{name}: {_line(found.faults[name][-1][0])} {'refused' if reason else 'ACCEPTED'}",
        flush=True,
    )


def _gap(probe: Probe, scores: Sequence[torch.Tensor]) -> Gap:
    return gap(
        torch.tensor([value for row in probe.logprobs for value in row]), torch.cat(list(scores))
    )


def _line(one: Gap) -> str:
    return (
        f"mean {one.mean:.2g}, 95 % {one.q95:.2g}, max {one.max:.2g}, k3 {one.k3:.2g}, "
        f"{one.tokens} tokens"
    )


def damages(weights: Weights) -> Iterator[tuple[str, Weights]]:
    """Weights with one fault each, by its name; of a Llama's parameters."""
    count = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    for one, two, which in (
        (0, 1, "first"),
        (count // 2 - 1, count // 2, "middle"),
        (count - 2, count - 1, "last"),
    ):
        yield f"{which} two layers swapped", _exchanged(weights, one, two)
    for layer, which in ((0, "first"), (count // 2, "middle"), (count - 1, "last")):
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):
            yield (
                (f"{part} of the {which} layer is zero"),
                _changed(weights, layer, part, torch.zeros_like),
            )
        yield (
            f"mlp.up_proj of the {which} layer: rows moved by one",
            _changed(weights, layer, "mlp.up_proj", lambda w: w.roll(1, 0)),
        )
        yield (
            (f"mlp.down_proj of the {which} layer: half is zero"),
            _changed(weights, layer, "mlp.down_proj", _half),
        )
        yield (
            (f"mlp.down_proj of the {which} layer: one exponent bit"),
            _changed(weights, layer, "mlp.down_proj", _bit),
        )
        yield (
            (f"mlp.gate_proj of the {which} layer: 1 % shuffled"),
            _changed(weights, layer, "mlp.gate_proj", _shuffled),
        )
    embedding = "model.embed_tokens.weight"
    yield "embedding: rows moved by one", {**weights, embedding: weights[embedding].roll(1, 0)}


def _changed(weights: Weights, layer: int, part: str, change: Any) -> Weights:
    name = f"model.layers.{layer}.{part}.weight"
    return {**weights, name: change(weights[name])}


def _exchanged(weights: Weights, one: int, two: int) -> Weights:
    to = {
        f"model.layers.{one}.": f"model.layers.{two}.",
        f"model.layers.{two}.": f"model.layers.{one}.",
    }
    names = {n: n for n in weights} | {
        n: to[p] + n[len(p) :] for n in weights for p in to if n.startswith(p)
    }
    return {name: weights[source] for name, source in names.items()}


def _half(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.clone()
    weight[: len(weight) // 2] = 0
    return weight


def _bit(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.clone()
    bits = weight.view(torch.int16 if weight.dtype == torch.bfloat16 else torch.int32)
    bits[0, 0] ^= 1 << (8 * weight.dtype.itemsize - 2)
    return weight


def _shuffled(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.clone()
    random = torch.Generator().manual_seed(0)
    flat = weight.view(-1)
    places = torch.randperm(len(flat), generator=random)[: len(flat) // 100]
    flat[places] = flat[places.roll(1)]
    return weight


@torch.no_grad()
def against_float32(
    recipe: Recipe, probe: Probe, weights: Weights, scores: Sequence[torch.Tensor], found: Found
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The logprobs of a model with the same weights that computes in float32, each engine's place
    taken by its errors: what is yielded differs from the probe's by how far that engine is off."""
    dtype = getattr(torch, recipe.model.dtype)
    exact, lower = (
        load_model(recipe.model.source, dtype=d, seed=recipe.seed)[0]
        for d in (torch.float32, dtype)
    )
    for model in (exact, lower):
        model.load_state_dict(weights, strict=False)
    logprobs = []
    errors = list[list[torch.Tensor]]()
    ends: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("head float32", "head bfloat16", "head, softmax bfloat16")
    }
    for ids in map(torch.tensor, probe.sequences):
        one, other = (
            m(input_ids=ids[None], output_hidden_states=True, use_cache=False)
            for m in (exact, lower)
        )
        logprobs.append(one.logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
        pairs = zip(one.hidden_states[1:], other.hidden_states[1:], strict=True)
        errors.append([((b.float() - a).norm(dim=-1) / a.norm(dim=-1))[0] for a, b in pairs])
        head = lower.get_output_embeddings()
        of_head = float32_logits(other.hidden_states[-1], head.weight, head.bias)
        low = other.logits.log_softmax(-1).float()
        ways = (of_head.log_softmax(-1), other.logits.float().log_softmax(-1), low)
        for rows, found_by in zip(ends.values(), ways, strict=True):
            rows.append(found_by[0, :-1].gather(1, ids[1:, None])[:, 0])
    found.layers = [float(torch.cat(list(layer)).median()) for layer in zip(*errors, strict=True)]
    yield "trainer against float32", logprobs
    trainer = [torch.tensor(row) for row in probe.logprobs]
    yield (
        "rollout engine against float32",
        [t + e - x for t, e, x in zip(trainer, logprobs, scores, strict=True)],
    )
    for name, rows in ends.items():
        yield (
            (f"plain forward, {name}"),
            [t + e - x for t, e, x in zip(trainer, logprobs, rows, strict=True)],
        )


def table(found: Found, recipe: Recipe, seeds: Sequence[int]) -> str:
    equal = found.equal
    limits = found.limits
    shares = [
        {name: getattr(gap, name) / getattr(limit, name) for name in ("mean", "q95", "max", "k3")}
        for gap, limit in zip(equal, limits, strict=True)
    ]
    name = f"{recipe.name}, {recipe.model.dtype}"
    steps = len(equal) // len(seeds)
    lines = [
        f"{name}: {len(seeds)} seeds × {steps} steps, probes of {min(g.tokens for g in equal)} to "
        f"{max(g.tokens for g in equal)} tokens; refused at equal weights: {found.refused} of "
        f"{len(equal)}",
        "",
        f"{'equal weights':<44}{'mean':>9}{'95 %':>9}{'max':>9}{'k3':>9}",
        _row("median probe", _over(equal, 0.5)),
        _row("largest of all probes", _over(equal, 1.0)),
        *(
            _row(f"{which} limit", {n: at(getattr(one, n) for one in limits) for n in shares[0]})
            for which, at in ENDS
        ),
        _row(
            "largest share of its limit", {n: max(share[n] for share in shares) for n in shares[0]}
        ),
        *(_row(which, _over(gaps, 0.5)) for which, gaps in found.exact.items()),
    ]
    if found.layers:
        at = sorted(
            {
                0,
                len(found.layers) // 4,
                len(found.layers) // 2,
                3 * len(found.layers) // 4,
                len(found.layers) - 2,
            }
        )
        errors = ", ".join(f"{found.layers[i]:.2%} after {i + 1}" for i in at if i >= 0)
        lines += [
            "",
            f"error of the hidden states against float32, median over tokens, by layers: {errors}",
        ]
    if found.faults:
        lines += ["", f"{'fault, least of the seeds':<52}{'mean':>9}{'95 %':>9}  refused"]
    for fault, seen in found.faults.items():
        least = _over([g for g, _ in seen], 0.0)
        refused = sum(bool(reason) for _, reason in seen)
        lines.append(
            f"{fault:<52}{least['mean']:>9.2g}{least['q95']:>9.2g}  {refused} of {len(seen)}"
        )
    return "\n".join(lines)


def _over(gaps: Sequence[Gap], quantile: float) -> dict[str, float]:
    values = {name: sorted(getattr(g, name) for g in gaps) for name in ("mean", "q95", "max", "k3")}
    return {name: all_of[round(quantile * (len(all_of) - 1))] for name, all_of in values.items()}


def _row(name: str, values: Mapping[str, float]) -> str:
    return f"{name:<44}" + "".join(f"{value:>9.2g}" for value in values.values())


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("recipe", nargs="?", default="quickstart", help="a recipe's name or file")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-faults", action="store_true", help="equal weights alone")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args()
    path = (
        Path(asked.recipe) if asked.recipe.endswith(".toml") else RECIPES / f"{asked.recipe}.toml"
    )
    found = Found()
    for seed in asked.seeds:
        recipe = load_recipe(
            path, [f"model.dtype={asked.dtype}", f"seed={seed}", "train.warmup_steps=0", *asked.set]
        )
        asyncio.run(measure(recipe, asked.steps, not asked.no_faults, found))
    print("\n" + table(found, recipe, asked.seeds))
    if asked.json:
        asked.json.write(asdict(found))


if __name__ == "__main__":
    main()
