"""A flow is resolved backwards from what an algorithm reads; what does not fit is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch

from pipeline.schedule.staleness import StalenessPlan
from stages.algorithms import Algorithm, LossOutput, TokenBatch, build_algorithm
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.catalogue import PROMPT, catalogue
from stages.flow.declarations import Columns, FlowError, RunsOn, StageDeclaration
from stages.flow.document import document
from stages.flow.graph import to_mermaid, to_svg, to_text
from stages.flow.resolver import resolve


class Plain(Algorithm):
    """The base of the small algorithms here: no credit, a loss that is not computed."""

    @property
    def credit_makes(self) -> Columns:
        return {}

    @property
    def loss_reads(self) -> Columns:
        return {}

    def loss(self, tokens: TokenBatch) -> LossOutput:
        raise AssertionError("not computed")


class Preferences(Plain):
    """As DPO: pairs that the source brings, and a frozen reference; a pair is never cut."""

    unit: ClassVar = "group"

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        return {"ref_logprobs": "frozen model"}

    @property
    def loss_reads(self) -> Columns:
        return {"ref_logprobs": "float32 ragged", "chosen": "bool"}


class Distillation(Plain):
    @property
    def scores(self) -> Mapping[str, RunsOn]:
        return {"teacher_logprobs": "frozen model"}

    @property
    def loss_reads(self) -> Columns:
        return {"teacher_logprobs": "float32 ragged"}


class ActorCritic(Plain):
    """As PPO: values of a critic, ragged advantages and returns."""

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        return {"values": "critic"}

    @property
    def credit_reads(self) -> Columns:
        return {"reward": "float32", "values": "float32 ragged"}

    @property
    def credit_makes(self) -> Columns:
        return {"advantage": "float32 ragged", "returns": "float32 ragged"}

    @property
    def loss_reads(self) -> Columns:
        ragged = ("rollout_logprobs", "advantage", "returns", "values")
        return dict.fromkeys(ragged, "float32 ragged")


PROMPTS_AND_RESPONSES = {"prompt_ids": "int64 ragged", "response_ids": "int64 ragged"}
CRITIC = StageDeclaration(
    "values", "groups", PROMPTS_AND_RESPONSES, {"values": "float32 ragged"}, "critic"
)
TEACHER = StageDeclaration(
    "teacher",
    "groups",
    PROMPTS_AND_RESPONSES,
    {"teacher_logprobs": "float32 ragged"},
    "frozen model",
)
JUDGE = StageDeclaration(
    "judge", "rows", {"response_ids": "int64 ragged"}, {"judged": "float32"}, place="stages.0.use"
)


def names(algorithm: Algorithm, **options: Any) -> list[str]:
    return [stage.name for stage in resolve(algorithm, catalogue(**options)).stages]


def problems(algorithm: Algorithm, *stages: StageDeclaration, **options: Any) -> str:
    with pytest.raises(FlowError) as error:
        resolve(algorithm, catalogue(stages=stages, **options))
    return str(error.value)


def test_the_flow_of_grpo_has_a_reference_where_its_loss_reads_one() -> None:
    assert names(GRPO()) == ["source", "rollout", "reward", "advantage", "update"]
    assert names(GRPO(kl_coef=0.1)) == [
        "source",
        "rollout",
        "reward",
        "reference",
        "advantage",
        "update",
    ]


def test_the_columns_and_masks_of_grpo_are_those_of_every_run_so_far() -> None:
    flow = resolve(GRPO(kl_coef=0.1), catalogue(rewards=2))
    assert [column.name for column in flow.schema.columns] == [
        *(
            "prompt_ids",
            "given",
            "fields",
            "response_ids",
            "rollout_logprobs",
            "versions",
            "truncated",
        ),
        *("reward", "scores", "ref_logprobs", "advantage"),
    ]
    assert flow.schema["scores"].describe() == "float32 [2]"
    assert flow.schema["reward"].finite
    assert flow.schema["given"].describe() == "text"
    config = flow.config(StalenessPlan(0, 2, 1))
    assert [(s.name, s.takes) for s in config.stages] == [
        ("rollout", "groups"),
        ("reward", "rows"),
        ("reference", "groups"),
        ("advantage", "groups"),
        ("update", "batch"),
    ]
    update = flow.schema.names(config.stages[-1].needs)
    assert update == ["prompt_ids", "response_ids", "rollout_logprobs", "ref_logprobs", "advantage"]


def test_pairs_of_a_source_need_no_rollout_and_no_reward() -> None:
    source = {**PROMPT, "response_ids": "int64 ragged", "chosen": "bool"}
    assert names(Preferences(), source=source) == ["source", "reference", "update"]
    assert names(Plain(), source=source) == ["source", "update"], "as supervised fine-tuning"


def test_a_teacher_and_a_critic_are_stages_like_others() -> None:
    assert names(Distillation(), stages=[TEACHER]) == ["source", "rollout", "teacher", "update"]
    flow = resolve(ActorCritic(), catalogue(stages=[CRITIC]))
    assert [stage.name for stage in flow.stages] == [
        "source",
        "rollout",
        "reward",
        "values",
        "advantage",
        "update",
    ]
    assert flow.schema["advantage"].describe() == "float32 ragged"


def test_a_stage_between_rollout_and_reward() -> None:
    flow = resolve(GRPO(), catalogue(stages=[JUDGE], reward_reads={"judged": "float32"}))
    assert [stage.name for stage in flow.stages] == [
        "source",
        "rollout",
        "judge",
        "reward",
        "advantage",
        "update",
    ]
    edges = {(edge.maker, edge.reader): edge for edge in flow.edges}
    assert edges["judge", "reward"].columns == ("judged",)
    assert edges["judge", "reward"].direct
    assert not edges["rollout", "reward"].direct, "it leads over the judge too"


def test_optional_columns_are_read_where_a_stage_makes_them() -> None:
    makes = {"loss_mask": "bool ragged", "row_weight": "float32"}
    flow = resolve(
        GRPO(), catalogue(stages=[StageDeclaration("turns", "rows", PROMPTS_AND_RESPONSES, makes)])
    )
    assert {"loss_mask", "row_weight"} <= flow["update"].needs.keys()
    assert not {"loss_mask", "row_weight"} & resolve(GRPO(), catalogue())["update"].needs.keys()


def test_credit_reads_a_mask_that_is_made_before_it() -> None:
    dapo = build_algorithm("dapo", {"longest_response": 8})
    makes = {"loss_mask": "bool ragged"}
    turns = StageDeclaration("turns", "rows", PROMPTS_AND_RESPONSES, makes)
    assert "loss_mask" in resolve(dapo, catalogue(stages=[turns]))["advantage"].needs
    assert "loss_mask" not in resolve(dapo, catalogue())["advantage"].needs
    assert "loss_mask" not in resolve(GRPO(), catalogue(stages=[turns]))["advantage"].needs
    assert "loss_mask" not in resolve(dapo, catalogue(), "mask")["advantage"].needs, (
        "it makes it itself"
    )
    later = [
        StageDeclaration("judge", "groups", {"advantage": "float32"}, {"judged": "float32"}),
        StageDeclaration("turns", "rows", {**PROMPTS_AND_RESPONSES, "judged": "float32"}, makes),
    ]
    flow = resolve(dapo, catalogue(stages=later))
    assert "loss_mask" not in flow["advantage"].needs, "it is made of the advantage"
    assert "loss_mask" in flow["update"].needs


def test_the_versions_of_tokens_are_carried_where_the_loss_reads_their_staleness() -> None:
    flow = resolve(build_algorithm("grpo", {"proximal": "interpolated"}), catalogue())
    assert flow["update"].needs["versions"] == "int64 ragged"
    assert "token_staleness" not in flow.columns
    assert "versions" not in resolve(GRPO(), catalogue())["update"].needs


def test_training_waits_for_a_stage_that_only_drops() -> None:
    flow = resolve(
        GRPO(), catalogue(stages=[StageDeclaration("sieve", "groups", {"reward": ""}, {})])
    )
    assert flow["update"].needs["passed_sieve"] == "bool"
    assert flow.columns["passed_sieve"] == "bool"


def test_a_column_that_nothing_makes_names_its_reader_and_what_could_make_it() -> None:
    text = problems(ActorCritic())
    assert "needs the column 'values', which no stage makes" in text
    assert "add a [[stages]] entry with a class that makes 'values'" in text
    misspelt = StageDeclaration(
        "judge", "rows", {"respnse_ids": ""}, {"judged": "float32"}, place="stages.0.use"
    )
    text = problems(GRPO(), misspelt, reward_reads={"judged": ""})
    assert (
        "stages.0.use = \"judge\": needs the column 'respnse_ids', which no stage makes; did you "
        "mean 'response_ids'" in text
    )


@pytest.mark.parametrize(
    ("stages", "reads", "wrong"),
    [
        (
            [
                JUDGE,
                StageDeclaration(
                    "other",
                    "rows",
                    {"response_ids": ""},
                    {"judged": "float32"},
                    place="stages.1.use",
                ),
            ],
            {"judged": ""},
            "the column 'judged', which 'reward' needs, is made by more than one stage: 'judge' "
            "and 'other'",
        ),
        (
            [JUDGE],
            {"judged": "int64"},
            "needs 'judged' as int64, but stage 'judge' makes it as float32",
        ),
        ([JUDGE], {}, "stages.0.use = \"judge\": makes 'judged', which nothing reads"),
        (
            [
                StageDeclaration(
                    "judge", "rows", {"reward": ""}, {"judged": "float32"}, place="stages.0.use"
                )
            ],
            {"judged": ""},
            "the stages 'reward' and 'judge' and 'advantage' wait for columns of one another",
        ),
        (
            [
                StageDeclaration(
                    "reward",
                    "rows",
                    {"response_ids": ""},
                    {"judged": "float32"},
                    place="stages.0.use",
                )
            ],
            {"judged": ""},
            "is the name of another stage too",
        ),
        (
            [
                StageDeclaration(
                    "judge",
                    "rows",
                    {"response_ids": ""},
                    {"judged": "float32", "reward": "float32"},
                )
            ],
            {"judged": ""},
            "the column 'reward', which 'advantage' needs, is made by more than one stage: "
            "'reward' and 'judge'",
        ),
        (
            [
                StageDeclaration(
                    "judge",
                    "rows",
                    {"response_ids": ""},
                    {f"judged{n}": "float32" for n in range(40)},
                    place="stages.0",
                )
            ],
            {"judged3": ""},
            "make 50 columns in all, at most 31 fit",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    stages: list[StageDeclaration], reads: Columns, wrong: str
) -> None:
    assert wrong in problems(GRPO(), *stages, reward_reads=reads)


def test_all_problems_are_found_at_once() -> None:
    wrong = StageDeclaration(
        "judge", "rows", {"nowhere": ""}, {"judged": "float64"}, place="stages.0.use"
    )
    text = problems(GRPO(), wrong, CRITIC, reward_reads={"judged": "float32", "missing": ""})
    for part in ("'nowhere'", "needs 'judged' as float32", "'missing'"):
        assert part in text


class ByPolicy(Plain):
    """As decoupled PPO: logprobs of the policy as it was before the batch's first optimizer
    step."""

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        return {"old_logprobs": "policy"}

    @property
    def loss_reads(self) -> Columns:
        return {"old_logprobs": "float32 ragged"}


def test_scores_must_come_from_what_the_algorithm_asks() -> None:
    assert names(ByPolicy()) == ["source", "rollout", "update"], "training computes it"
    cpu = StageDeclaration("values", "groups", PROMPTS_AND_RESPONSES, {"values": "float32 ragged"})
    assert (
        "wants 'values' from a critic, but stage 'values', which makes it, runs on cpu"
        in problems(ActorCritic(), cpu)
    )


def test_a_flow_can_be_looked_at() -> None:
    flow = resolve(GRPO(kl_coef=0.1), catalogue(stages=[JUDGE], reward_reads={"judged": "float32"}))
    assert "judge      (rows, cpu) needs response_ids; makes judged" in to_text(flow).splitlines()
    assert "    judge -->|judged| reward" in to_mermaid(flow).splitlines()
    assert "    rollout -->|response_ids| reward" not in to_mermaid(flow), (
        "the way over the judge implies it"
    )
    found = document(flow)
    layers = {stage["name"]: stage["layer"] for stage in found["stages"]}
    assert layers == {
        "source": 0,
        "rollout": 1,
        "judge": 2,
        "reference": 2,
        "reward": 3,
        "advantage": 4,
        "update": 5,
    }
    assert all(layers[edge["from"]] < layers[edge["to"]] for edge in found["edges"])
    picture = ElementTree.fromstring(to_svg(flow))
    texts = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {*layers, "judged", "weights"} <= texts


def test_a_declared_type_becomes_a_column_of_the_pipeline() -> None:
    made = {
        "a": "float32 [2, 3]",
        "b": "bool",
        "c": "bfloat16 ragged",
        "d": "text",
        "e": "float64 finite",
    }
    stage = StageDeclaration("many", "rows", {"response_ids": ""}, made)
    schema = resolve(GRPO(), catalogue(stages=[stage], reward_reads={"a": ""})).schema
    assert [schema[name].describe() for name in made] == [
        "float32 [2, 3]",
        "bool []",
        "bfloat16 ragged",
        "text",
        "float64 []",
    ]
    assert schema["a"].dtype is torch.float32
    assert schema["e"].finite
