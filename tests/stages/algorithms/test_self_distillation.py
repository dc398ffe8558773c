"""What a policy's own teacher reads: a solution of the row, or a successful response of the group."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.algorithms import Drop, build_algorithm
from stages.algorithms.supervised.self_distillation import NO_SUCCESS
from stages.flow.catalogue import ROW_MASK
from stages.flow.user_stage import StageRows
from stages.prompts.rows.files import PromptError

TEXTS = {1: "one", 2: "two", 3: "three"}


def group(prompts: list[Any], fields: list[Any], **columns: Any) -> StageRows:
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: TEXTS[ids[0]])
    texts = {
        "given": [json.dumps(prompt) for prompt in prompts],
        "fields": [json.dumps(each) for each in fields],
    }
    return StageRows({**texts, **columns}, tokenizer)


def test_a_teacher_reads_the_solution_of_the_row() -> None:
    opsd = build_algorithm("opsd", {"template": "{prompt} It is {answer:>3}."})
    rows = group(["6 * 7?", "1 + 1?"], [{"answer": 42}, {"answer": 2}])
    assert opsd.teacher_prompts(rows) == ["6 * 7? It is  42.", "1 + 1? It is   2."]


def test_of_a_conversation_the_last_message_is_written_anew() -> None:
    opsd = build_algorithm("opsd", {"template": "{prompt} It is {answer}."})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]
    [prompt] = opsd.teacher_prompts(group([messages], [{"answer": "42"}]))
    assert prompt == [messages[0], {"role": "user", "content": "6 * 7? It is 42."}]


def test_a_template_that_names_no_column_is_named() -> None:
    opsd = build_algorithm("opsd", {})
    with pytest.raises(PromptError, match=r"algorithm\.options\.template.*'answer', 'prompt'"):
        opsd.teacher_prompts(group(["6 * 7?"], [{"answer": "42"}]))


def test_each_response_is_judged_by_another_successful_one() -> None:
    sdpo = build_algorithm("sdpo", {"template": "{prompt} {solution}", "success_reward": 0.5})
    responses = [torch.tensor([number]) for number in (1, 2, 3)]

    def prompts(*rewards: float) -> Any:
        columns = {"response_ids": responses, "reward": torch.tensor(rewards)}
        return sdpo.teacher_prompts(group(["p"] * 3, [{}] * 3, **columns))

    assert prompts(0.0, 1.0, 0.5) == ["p two", "p three", "p two"]
    assert prompts(0.0, 1.0, 0.0) == ["p two", "p", "p two"]


def test_a_response_without_another_successful_one_is_not_trained() -> None:
    sdpo = build_algorithm("sdpo", {})

    def trained(*rewards: float) -> Any:
        credit = sdpo.credit({"reward": torch.tensor(rewards)})
        return credit if isinstance(credit, Drop) else credit[ROW_MASK].tolist()

    assert trained(0.0, 1.0, 1.0) == [True, True, True]
    assert trained(0.0, 1.0, 0.0) == [True, False, True]
    assert trained(0.0, 0.9, float("nan")) == Drop(NO_SUCCESS)


def test_who_the_teacher_is_says_where_it_is_computed() -> None:
    for name, by in (("opsd", "frozen model"), ("sdpo", "policy")):
        assert {*build_algorithm(name, {}).scores.values()} == {by}
    assert {*build_algorithm("sdpo", {"teacher": "frozen"}).scores.values()} == {"frozen model"}
