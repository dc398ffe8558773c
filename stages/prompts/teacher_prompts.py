"""The stage of a teacher's prompts, where it sees more than the policy.

a group ─▶ algorithm.teacher_prompts ─▶ texts or conversations ─▶ template, chat template, tokens ─▶ teacher_prompt_ids
                  └▶ Drop                                                └▶ too long: Drop
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from pipeline.worker.controller import Stage
from stages.flow.catalogue import TEACHER_PROMPT, TEACHER_STAGE
from stages.flow.declarations import Drop, Result, StageDeclaration
from stages.flow.groups import GROUPS_AT_ONCE, groups_of, outputs_of, plain_columns, rows_at
from stages.flow.user_stage import StageRows

if TYPE_CHECKING:
    from tensordict import TensorDict

    from pipeline.index.client import Claim
    from pipeline.worker.outputs import Output
    from stages.algorithms.named import NamedAlgorithm
    from stages.model.load import Tokenizer
    from stages.prompts.formatter import PromptFormatter

WHERE = "the prompt of a teacher"  # in messages


class TeacherPrompts(Stage):
    """Makes the prompts that ``algorithm`` lets a teacher read. ``longest``: tokens of one; a group
    with a longer one is dropped."""

    name = TEACHER_STAGE

    def __init__(
        self,
        algorithm: NamedAlgorithm,
        declared: StageDeclaration,
        formatter: PromptFormatter,
        tokenizer: Tokenizer,
        longest: int,
    ) -> None:
        self.fetches = tuple(declared.needs)
        self._algorithm = algorithm
        self._formatter = formatter
        self._tokenizer = tokenizer
        self._longest = longest

    def room(self, held: int) -> int:
        return GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        columns = plain_columns(rows, self.fetches)
        members = groups_of(claim.group.tolist())
        results = [
            self._of_group(
                StageRows(
                    {name: rows_at(column, at) for name, column in columns.items()},
                    self._tokenizer,
                )
            )
            for at in members
        ]
        for output in outputs_of(members, results, claim.tokens.tolist()):
            yield output

    def _of_group(self, group: StageRows) -> Result:
        prompts = self._algorithm.teacher_prompts(group)
        if isinstance(prompts, Drop):
            return prompts
        column = self._formatter.options.column
        made = [
            self._formatter.prompt({**fields, column: prompt}, WHERE).ids
            for prompt, fields in zip(prompts, group.fields, strict=True)
        ]
        if max(map(len, made)) > self._longest:
            return Drop(f"a teacher's prompt is longer than {self._longest} tokens")
        return {TEACHER_PROMPT: made}
