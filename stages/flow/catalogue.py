"""The catalogue: the stages that a flow can be resolved from, the product's own and those that a
recipe names.

source ▶ prompt_ids given fields          advantage ▶ what the algorithm's credit makes
rollout ▶ response_ids rollout_logprobs   update: reads what the algorithm's loss reads
          versions truncated
reward ▶ reward scores                    reference ▶ ref_logprobs, or      a recipe's [[stages]] ▶ columns of their own
                                                      teacher_ids teacher_logprobs
                                          critic ▶ values
                                          teacher_prompt ▶ teacher_prompt_ids
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from stages.flow.declarations import (
    IN_TRAINING,
    AlgorithmDeclaration,
    Columns,
    StageDeclaration,
    token_shape,
)

if TYPE_CHECKING:
    from pipeline.data.columns import Schema

SOURCE = "source"
CREDIT = "advantage"
UPDATE = "update"
CRITIC = "critic"
TEACHER_STAGE = "teacher_prompt"
ENVIRONMENT = "environment"
PROMPT: Columns = {"prompt_ids": "int64 ragged", "given": "text", "fields": "text"}
RESPONSE: Columns = {
    "response_ids": "int64 ragged",
    "rollout_logprobs": "float32 ragged",
    "versions": "int64 ragged",  # run-length encoded: version, tokens, version, tokens, …
    "truncated": "bool",
}
# In the column versions, of tokens that no policy has generated: an environment's.
OBSERVED = -1
# Read by every update where a stage makes them: tokens that are trained on, and a factor of each
# row's loss. And the experts that the rollout's routers chose, which the trainer's then follow: of
# each fed token (the prompt's, and the response's but its last) the numbers of its experts, layer
# by layer. Of the type expert_type() says. And which rows are trained at all, where loss_mask says
# which tokens the policy has generated. And where the branches of a row begin, and what of it they
# share (stages/branches.py); empty for a row whose tokens follow one another.
OPTIONAL: Columns = {
    "loss_mask": "bool ragged",
    "row_weight": "float32",
    "routed_experts": "",
    "row_mask": "bool",
    "branches": "int64 ragged",
}
MASK, WEIGHT, ROUTED, ROW_MASK, BRANCHES = OPTIONAL
# Of a row with turns of the policy and observations between them: which tokens are generated; the
# first token of each turn, as an index of response_ids; the reward of each turn; and its seconds,
# the TIMES one after the other: in the engine, waiting for a stage, in the environment, whose
# opening counts to the first turn.
TRAJECTORY: Columns = {
    MASK: OPTIONAL[MASK],
    "turn_starts": "int64 ragged",
    "turn_reward": "float32 ragged",
    "turn_seconds": "float32 ragged",
    BRANCHES: OPTIONAL[BRANCHES],
}
_, TURN_STARTS, TURN_REWARD, TURN_SECONDS, _ = TRAJECTORY
TIMES = ("engine", "waiting", "environment")
# Of one that has ended: the reward that its environment gave (NaN: none), and why it has ended, as
# stages/trajectories/progress.py numbers the reasons.
ENDED: Columns = {"environment_reward": "float32", "ending": "uint8"}
ENDING = "ending"
# Of each response token the part of the row's reward that comes with it; NaN: none. Made by the
# reward stage where the algorithm reads it.
TOKEN_REWARDS = "token_rewards"
# of that column: its environment has failed, and its group is dropped
DROPPED_ENDING = 6
REFERENCE: Columns = {"ref_logprobs": "float32 ragged"}
# Of each response token: the most probable tokens under the teacher, k of them, and their logprobs.
TEACHER_IDS = "teacher_ids"
TEACHER_LOGPROBS = "teacher_logprobs"
# The prompt as the teacher reads it, where it differs from the student's.
TEACHER_PROMPT = "teacher_prompt_ids"
PRIVILEGED: Columns = {TEACHER_PROMPT: "int64 ragged"}
# the column of responses that prompts bring: their tokens, and which of these are trained, as JSON
GIVEN = "responses"
# The update stage adds them to its batch: steps trained since the oldest token of the row was
# generated; and, of rows with versions, since each token was.
STALENESS = "staleness"
VERSIONS = "versions"
TOKEN_STALENESS = "token_staleness"
# And, where the rows have versions: of each token its index into AGES of
# stages/algorithms/token_batch.py; OBSERVED of those that were not generated.
AGE = "age"
EMPTY = "no token of a response is trained"  # reason of a group that brings its responses
# Responses that were cut at their longest: see stages/training/advantage.py.
Truncated = Literal["train", "mask", "drop"]


def catalogue(
    *,
    rewards: int = 1,
    reward_reads: Columns | None = None,
    source: Columns = PROMPT,
    stages: Iterable[StageDeclaration] = (),
    given_responses: int = 0,
    critic: bool = False,
    in_training: Collection[str] = (),
    routed: str = "",
    environment: bool = False,
    reference: Columns = REFERENCE,
    teacher_reads: Columns | None = None,
    by_token: bool = False,
) -> list[StageDeclaration]:
    """Return the catalogue of a run with ``rewards`` reward functions, which read the columns
    ``reward_reads`` beside responses. ``source``: columns that its prompts bring. A stage of the
    product whose columns the source brings, or the trainer computes (``in_training``), is left out.
    ``given_responses``: so many responses are in each prompt's row, which the rollout stage takes
    over, the best first. ``critic``: a critic of its own is trained in the run, and makes the
    values. ``routed``: dtype of the column of routed experts, which the rollout stage makes; "": it
    makes none. ``environment``: an environment answers the policy's turns; the two stages make the
    response together. ``by_token``: rewards are made by token, too."""
    rollout_makes = {**RESPONSE, **({ROUTED: f"{routed} ragged"} if routed else {})}
    if given_responses:
        del rollout_makes["rollout_logprobs"]
        rollout_makes |= {MASK: OPTIONAL[MASK]} | (
            {"reward": "float32 finite"} if given_responses > 1 else {}
        )
        source = {**source, GIVEN: "text"}
    needs: Columns = {GIVEN: "text"} if given_responses else {"prompt_ids": "int64 ragged"}
    rollout = StageDeclaration(
        "rollout",
        "groups",
        needs,
        rollout_makes,
        "cpu" if given_responses else "policy",
        workers=int(not given_responses),
    )
    makers = [rollout]
    if environment:
        reads = {"prompt_ids": "int64 ragged", "given": "text", "fields": "text"}
        makes = {**rollout_makes, **TRAJECTORY, **ENDED}
        makers = [
            StageDeclaration(ENVIRONMENT, "groups", reads, makes),
            replace(rollout, makes={}, takes_turns_with=ENVIRONMENT),
        ]
    trajectory = {name: TRAJECTORY[name] for name in (MASK, BRANCHES, TURN_STARTS)}
    product_stages = [
        StageDeclaration(SOURCE, "groups", {}, source, workers=0),
        *makers,
        StageDeclaration(
            "reward",
            "rows",
            {
                "given": "text",
                "fields": "text",
                "response_ids": "int64 ragged",
                **(trajectory if environment else {}),
                **(reward_reads or {}),
            },
            {
                "reward": "float32 finite",
                "scores": f"float32 [{rewards}]",
                **({TOKEN_REWARDS: "float32 ragged"} if by_token else {}),
            },
            workers=0,
        ),
        StageDeclaration(
            "reference",
            "groups",
            {
                "prompt_ids": "int64 ragged",
                "response_ids": "int64 ragged",
                **({BRANCHES: OPTIONAL[BRANCHES]} if environment else {}),
                **(PRIVILEGED if teacher_reads and TEACHER_IDS in reference else {}),
            },
            reference,
            "frozen model",
        ),
    ]
    if critic:
        product_stages.append(
            replace(
                product_stages[-1],
                name=CRITIC,
                makes={"values": "float32 ragged finite"},
                runs_on="critic",
            )
        )
    if teacher_reads:
        product_stages.append(
            StageDeclaration(TEACHER_STAGE, "groups", teacher_reads, PRIVILEGED, workers=0)
        )
    remaining = [
        stage for stage in product_stages[1:] if not {*source, *in_training} & {*stage.makes}
    ]
    others = [
        stage
        for stage in remaining
        if stage in makers or not given_responses or not {*rollout_makes} & {*stage.makes}
    ]
    return [product_stages[0], *others, *stages]


def expert_type(experts: int) -> str:
    """Return the dtype of the numbers of so many experts."""
    return "uint8" if experts <= 256 else "int16"


def credit_stage(
    algorithm: AlgorithmDeclaration,
    truncated: Truncated = "train",
    drops: Columns | None = None,
    *,
    masked: bool = False,
) -> StageDeclaration | None:
    """Return the stage that computes the algorithm's credit, and the mask that leaves out truncated
    responses, and drops groups by what the columns ``drops`` say; None where there is none of
    these. ``masked``: another stage makes loss_mask, so truncated responses are left out by
    row_mask."""
    reads = dict(algorithm.credit_reads if algorithm.credit_makes else {})
    makes = dict(algorithm.credit_makes)
    if truncated != "train":
        left_out_by = ROW_MASK if masked else MASK
        reads["truncated"], makes[left_out_by] = RESPONSE["truncated"], OPTIONAL[left_out_by]
    reads |= drops or {}
    if not makes and not drops:
        return None
    optional = dict(algorithm.credit_optional)
    if any(" ragged" in kind for kind in makes.values()):
        optional[MASK] = OPTIONAL[MASK]  # has the lengths of responses with observations
    optional = {name: kind for name, kind in optional.items() if name not in makes}
    return StageDeclaration(CREDIT, "groups", reads, makes, workers=0, optional=optional)


def made_in_training(algorithm: AlgorithmDeclaration) -> set[str]:
    """Return the columns that the loss reads and no stage makes: those that the trainer, the update
    stage or ``prepare`` computes."""
    computed = (name for name, by in algorithm.scores.items() if by in IN_TRAINING)
    return {STALENESS, TOKEN_STALENESS, *computed, *algorithm.prepare_makes}


def scored_columns(schema: Schema) -> tuple[str, ...]:
    """Return the columns of the run's ``schema`` of which models compute scores."""
    return "prompt_ids", "response_ids", *([BRANCHES] if BRANCHES in schema else [])


def frozen_columns(algorithm: AlgorithmDeclaration, stages: Iterable[StageDeclaration]) -> Columns:
    """Return the columns that the reference stage makes: those that ``algorithm`` wants of a frozen
    model, and logprobs of the sampled tokens where it wants none of the teacher's, or one of
    ``stages`` reads them."""
    wanted = {name for name, by in algorithm.scores.items() if by == "frozen model"}
    read = {name for stage in stages for name in stage.needs}
    teacher = {
        name: kind
        for name, kind in algorithm.loss_reads.items()
        if name in wanted and name in (TEACHER_IDS, TEACHER_LOGPROBS)
    }
    return {**(REFERENCE if not teacher or (wanted | read) & REFERENCE.keys() else {}), **teacher}


def teacher_tokens(declared: StageDeclaration) -> int:
    """Return how many most probable tokens of each place the stage ``declared`` makes, or 0."""
    return sum(token_shape(declared.makes.get(TEACHER_IDS, "")))


def trained_reads(algorithm: AlgorithmDeclaration) -> Columns:
    """Return the columns that training reads of samples for ``algorithm``: those of its loss, but
    for those that are made in training, and what these are made from."""
    trainer_columns = made_in_training(algorithm)
    reads = {
        name: kind for name, kind in algorithm.loss_reads.items() if name not in trainer_columns
    }
    if algorithm.teacher_reads and TEACHER_IDS in trainer_columns:
        reads |= PRIVILEGED
    return reads


def update_stage(algorithm: AlgorithmDeclaration) -> StageDeclaration:
    """Return the stage that trains."""
    reads = dict(trained_reads(algorithm))
    if TOKEN_STALENESS in algorithm.loss_reads:
        reads[VERSIONS] = RESPONSE[VERSIONS]
    needs = {"prompt_ids": "int64 ragged", "response_ids": "int64 ragged", **reads}
    return StageDeclaration(UPDATE, "batch", needs, {}, "policy", optional=OPTIONAL)
