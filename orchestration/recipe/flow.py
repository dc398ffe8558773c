"""The flow of a recipe: the stages that it names, and what its algorithm and its reward functions
read of them.

[[stages]], algorithm, reward.functions ──▶ declarations ──▶ stages.flow.resolver ──▶ Flow
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from orchestration.recipe.model_files import experts_of, text_config
from orchestration.recipe.problems import value_or_none
from stages.algorithms import NamedAlgorithm
from stages.flow.catalogue import (
    BRANCHES,
    ENDED,
    ENDING,
    MASK,
    PROMPT,
    REFERENCE,
    RESPONSE,
    ROUTED,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_PROMPT,
    TOKEN_REWARDS,
    TRAJECTORY,
    Truncated,
    catalogue,
    expert_type,
    frozen_columns,
)
from stages.flow.declarations import (
    BASE,
    Columns,
    Declared,
    StageDeclaration,
    itemsize,
    token_shape,
)
from stages.flow.resolver import Flow, resolve
from stages.flow.user_stage import UserStage, declaration_of, stage_class
from stages.rewards.registry import RewardFunctions, parameters_of

TEXT_BYTES = 8  # of a text column, for each token of the longest response
# tokens that the arena must have room for where the recipe sets no prompts.max_prompt_tokens
LONGEST_PROMPT = 2048
TEACHER_TEMPLATE = 256  # tokens of a teacher's prompt beside the student's and a response

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe
    from orchestration.recipe.sections import StageSection


def flow_of(recipe: Recipe) -> Flow:
    """The stages and columns of a run of ``recipe``.

    Raises FlowError, ValueError for a name that is not found.
    """
    declared = declarations_of(recipe)
    algorithm: Any = algorithm_of(recipe)
    functions = len(recipe.reward.functions)
    truncated = credit_truncated(recipe)
    reads = reward_reads(recipe, declared)
    given = len(recipe.prompts.responses)
    stages = catalogue(
        rewards=functions,
        reward_reads=reads,
        stages=declared,
        given_responses=given,
        critic=algorithm.critic_algorithm() is not None,
        routed=expert_type(experts_of(text_config(recipe.model.source))[0])
        if recipe.train.router == "replay"
        else "",
        in_training=[name for name, by in algorithm.scores.items() if by == BASE],
        environment=recipe.has_environment,
        reference=frozen_columns(algorithm, declared),
        teacher_reads=algorithm.teacher_reads,
        by_token=TOKEN_REWARDS in {**algorithm.credit_reads, **algorithm.loss_reads},
    )
    drops: dict[str, str] = {}  # columns by which groups are dropped
    if recipe.prompts.sampling == "difficulty":
        drops["reward"] = "float32"
    if recipe.has_environment:
        drops[ENDING] = ENDED[ENDING]
    flow = resolve(algorithm, stages, truncated, drops)
    if recipe.runs_stage("reward") and "reward" in flow:
        return resolve(algorithm, stages, truncated, {"scores": f"float32 [{functions}]", **drops})
    return flow


def credit_truncated(recipe: Recipe) -> Truncated:
    """What the credit stage does about truncated responses: nothing where they are given, as the
    stage that takes them over leaves them out."""
    return "train" if recipe.prompts.responses else recipe.rollout.truncated


def algorithm_of(recipe: Recipe) -> NamedAlgorithm:
    """The recipe's algorithm under its staleness bound.

    Where adapters are trained and the reference is the model that the run begins with, the trainer
    has it, its model without them: it computes the columns of the reference, unless another stage
    reads or makes one of them. Raises ValueError for a name or an option that is not known.
    """
    of = recipe.algorithm
    algorithm = recipe.typed_algorithm.under(recipe.oldest_trained)[0]
    scores = algorithm.scores
    names = {*REFERENCE, TEACHER_IDS, TEACHER_LOGPROBS} & scores.keys()
    names = {name for name in names if scores[name] == "frozen model"}
    from_here = (
        recipe.model.reference is None and not recipe.teacher.url and recipe.runs_stage("reference")
    )
    if recipe.adapters and from_here and names:
        stages = declarations_of(recipe)
        made = {column for declared in stages for column in declared.makes}
        read = {column for declared in stages for column in declared.needs} | {
            *algorithm.credit_reads
        }
        if not names & (made | read):
            scores = {**scores, **dict.fromkeys(names, BASE)}
    return NamedAlgorithm(of.name, algorithm, scores)


def declarations_of(recipe: Recipe) -> list[StageDeclaration]:
    """What the recipe's own stages declare, in its order.

    Their modules are imported, unless the recipe knows it.
    """
    if recipe.declared is not None:
        return list(recipe.declared.stages)
    sections = enumerate(recipe.stages)
    return [
        declaration_of(stage_of(section), workers=section.workers, place=f"stages.{at}.use")
        for at, section in sections
    ]


def stage_of(section: StageSection) -> UserStage:
    """A stage of the recipe's own. Raises ValueError."""
    return stage_class(section.use)(**section.options)


def declared_of(recipe: Recipe) -> Declared:
    """What the recipe's own stages declare, and which of their columns its reward functions
    read."""
    stages = declarations_of(recipe)
    return Declared(tuple(stages), reward_reads(recipe, stages))


def reward_reads(
    recipe: Recipe, declared: Iterable[StageDeclaration], *, required: bool = False
) -> Columns:
    """The columns of the recipe's own stages that its reward functions have parameters for;
    ``required``: those alone that have no default. Empty where another program scores."""
    if not recipe.runs_stage("reward") or not (recipe.stages or recipe.has_environment):
        return {}
    if recipe.declared is not None and not required:
        return recipe.declared.reads
    made = {name: kind for stage in declared for name, kind in stage.makes.items()}
    if recipe.has_environment:
        made |= {**TRAJECTORY, **ENDED}
    functions = RewardFunctions()
    parameters = [
        parameters_of(functions.find(function.name)) for function in recipe.reward.functions
    ]
    asked = {name for each in parameters for name, needed in each.items() if needed or not required}
    return {name: kind for name, kind in made.items() if name in asked}


def trajectory_reads(recipe: Recipe) -> list[str]:
    """The columns of trajectories that the recipe's reward functions have parameters for: those of
    its own stages are not made in evaluations."""
    columns = {**TRAJECTORY, **ENDED}.keys() - {MASK}
    return [name for name in reward_reads(recipe, ()) if name in columns]


def stage_columns(recipe: Recipe) -> Columns:
    """The columns that the recipe's own stages and its environments make; of the stages none where
    one cannot be made, which is reported elsewhere."""
    of_stages = value_or_none(lambda: [declared.makes for declared in declarations_of(recipe)])
    columns = {name: kind for makes in of_stages or () for name, kind in makes.items()}
    return {**columns, **TRAJECTORY, **ENDED} if recipe.has_environment else columns


def column_bytes(recipe: Recipe) -> int:
    """Bytes of a sample, at most, in the ragged columns and texts beside those of prompts,
    responses, their experts and a reference, and branches, of which there are few. 0 for a flow
    that cannot be resolved, which is reported elsewhere."""
    columns = value_or_none(lambda: flow_of(recipe).columns) or {}
    others = [
        kind
        for name, kind in columns.items()
        if name not in (*PROMPT, *RESPONSE, *REFERENCE, ROUTED, BRANCHES, TEACHER_PROMPT)
    ]
    tokens = recipe.longest_response
    sizes = [
        TEXT_BYTES if kind == "text" else itemsize(kind) * math.prod(token_shape(kind))
        for kind in others
        if kind == "text" or " ragged" in kind
    ]
    of_teacher = 8 * longest_teacher_prompt(recipe) if TEACHER_PROMPT in columns else 0
    return sum(sizes) * tokens + of_teacher


def longest_teacher_prompt(recipe: Recipe) -> int:
    """Tokens of the longest prompt of a teacher that sees more than the policy."""
    prompt = recipe.prompts.max_prompt_tokens or LONGEST_PROMPT
    return prompt + recipe.longest_response + TEACHER_TEMPLATE


def needs_reference(recipe: Recipe) -> bool:
    """Return whether the flow has the reference stage: some stage reads logprobs under the frozen
    reference policy."""
    return "reference" in flow_of(recipe)


def computes_reference(recipe: Recipe) -> bool:
    """Return whether a process of the run computes with the frozen reference, instead of a
    server."""
    return needs_reference(recipe) and not recipe.teacher.url


def device_count(recipe: Recipe) -> int:
    """Return how many devices the engines of the run compute on, if each has its own.

    A reference is not counted where code that the recipe names cannot be imported: whoever reads a
    run needs none of its code.
    """
    if recipe.colocated:
        return recipe.train.ranks
    references = int(value_or_none(lambda: computes_reference(recipe)) or False)
    return recipe.rollout.workers + recipe.train.ranks + references
