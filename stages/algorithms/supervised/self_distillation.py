"""Self-distillation: the policy learns from itself, as it answers when it sees more.

    prompt ─▶ policy ─▶ response ─┬─▶ policy, given the prompt ──────────────────────▶ q of each token ─┐
                                  └─▶ the same model, given the prompt and a solution ─▶ p ─────────────┴▶ divergence

OPSD (arXiv 2601.18734): the solution is a column of the prompt's row. SDPO (arXiv 2601.20802): it is
another response of the group, one that was successful.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from stages.algorithms.interface import with_defaults
from stages.algorithms.supervised.gkd import GKD
from stages.flow.catalogue import OPTIONAL, ROW_MASK, TEACHER_IDS, TEACHER_LOGPROBS
from stages.flow.declarations import Columns, Drop, RunsOn
from stages.json_schema import faults
from stages.prompts.rows.templates import fill_template, parse_template

if TYPE_CHECKING:
    from stages.flow.user_stage import StageRows
    from stages.prompts.rows.templates import Message

MOST_CHARACTERS = 2**20  # of a teacher's prompt; its tokens have a limit of their own
NO_SUCCESS = "no other response was successful"


class SelfDistillation(GKD):
    """What both share: a teacher that reads another prompt than the student."""

    teacher: Literal["frozen", "current"] = Field(
        default="frozen",
        description="`frozen`: the policy as the run begins, or `model.reference`, as a stage "
        "beside training; with `model.reference_every = 1` and a `model.reference_mix` of 0.01, "
        "say, the policy's moving average. `current`: the policy before the step, in training, "
        "without a gradient.",
    )
    template: str = Field(
        default="{prompt}\n\nHere is a reference solution to this problem:\n{solution}\n\n"
        "After understanding the reference solution, solve the problem in your own words.",
        description="The teacher's prompt, or the last message of it where prompts are "
        "conversations: `{prompt}` is the student's, other names are columns of its row. "
        "`prompts.template`, the system prompt and the chat template are around it.",
    )

    @pydantic.model_validator(mode="after")
    def _template_is_one(self) -> Self:
        try:
            parse_template(self.template)
        except ValueError as error:
            fix = "name columns in braces, and write a brace of its own twice"
            faults(self, [("template", f"is no template: {error}", fix)])
        return self

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        by: RunsOn = "policy" if self.teacher == "current" else "frozen model"
        return dict.fromkeys((TEACHER_IDS, TEACHER_LOGPROBS), by)

    @property
    def teacher_reads(self) -> Columns:
        return {"given": "text", "fields": "text", "response_ids": "int64 ragged"}

    @abstractmethod
    def privileged(self, group: StageRows) -> Sequence[Mapping[str, Any] | None]:
        """Return for each row what :attr:`template` may name beside the columns of the prompt's
        row. None: its teacher reads the student's prompt."""

    def teacher_prompts(self, group: StageRows) -> list[str | list[Message]]:
        return [
            prompt if more is None else self._rewritten(prompt, {**fields, **more})
            for prompt, fields, more in zip(
                group.prompts, group.fields, self.privileged(group), strict=True
            )
        ]

    def _rewritten(self, prompt: str | list[Message], fields: dict[str, Any]) -> Any:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        filled = fill_template(
            parse_template(self.template),
            fields | {"prompt": text},
            MOST_CHARACTERS,
            "a row of the prompts",
            key="algorithm.options.template",
        )
        if isinstance(prompt, str):
            return filled
        return [*prompt[:-1], {**prompt[-1], "content": filled}]


class OPSD(SelfDistillation):
    """The teacher reads the prompt and a solution that its row has (the column `solution`, or those
    that ``template`` names). No reward is needed."""

    name: ClassVar[str] = "opsd"
    use_for: ClassVar[str] = "Rows have a written solution, and there is no larger teacher."
    citation: ClassVar[str] = """
    @misc{zhao2026opsd,
      title = {Self-Distilled Reasoner: On-Policy Self-Distillation for Large Language Models},
      author = {Zhao, Siyan and Xie, Zhihui and Liu, Mengchen and others},
      year = {2026},
      eprint = {2601.18734},
      archivePrefix = {arXiv},
    }
    """

    def privileged(self, group: StageRows) -> Sequence[Mapping[str, Any] | None]:
        return [{}] * len(group.prompts)


@with_defaults(
    divergence="reverse",
    teacher="current",
    template="{prompt}\n\nCorrect solution:\n\n{solution}\n\n"
    "Correctly solve the original question.",
)
class SDPO(SelfDistillation):
    """The teacher reads the prompt and, as ``{solution}``, the first response of the group, but for
    the one that it judges, whose reward is at least ``success_reward``. Responses without such a
    one are not trained; a group without any is dropped.

    The teacher is the current policy. The paper's moving average is ``teacher = "frozen"`` with
    ``model.reference_every`` and ``model.reference_mix``. The teacher's most probable tokens are
    compared, where the paper takes the student's.
    """

    name: ClassVar[str] = "sdpo"
    use_for: ClassVar[str] = "As `opsd`, where some responses succeed and no solution is written."
    citation: ClassVar[str] = """
    @misc{hubotter2026sdpo,
      title = {Reinforcement Learning via Self-Distillation},
      author = {H{\\"u}botter, Jonas and L{\\"u}beck, Frederike and Behric, Lejs and others},
      year = {2026},
      eprint = {2601.20802},
      archivePrefix = {arXiv},
    }
    """
    least_group_size: ClassVar[int] = 2
    credit_makes: ClassVar[Columns] = {ROW_MASK: OPTIONAL[ROW_MASK]}

    success_reward: float = Field(
        default=1.0, description="The least reward of a response that others learn from."
    )

    @property
    def teacher_reads(self) -> Columns:
        return {**super().teacher_reads, "reward": "float32"}

    def privileged(self, group: StageRows) -> Sequence[Mapping[str, Any] | None]:
        return [
            None if at is None else {"solution": group.completions[at]}
            for at in self.solutions(group["reward"].tolist())
        ]

    def solutions(self, rewards: Sequence[float]) -> list[int | None]:
        """Return for each row the place of the response that its teacher reads."""
        successes = [at for at, reward in enumerate(rewards) if reward >= self.success_reward]
        return [next((at for at in successes if at != own), None) for own in range(len(rewards))]

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """Return which responses are trained."""
        solutions = self.solutions(group["reward"].tolist())
        if not any(at is not None for at in solutions):
            return Drop(NO_SUCCESS)
        return {ROW_MASK: group["reward"].new_tensor([at is not None for at in solutions]).bool()}
