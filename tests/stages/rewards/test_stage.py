import asyncio
import json
import threading
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from stages.model.load import load_tokenizer
from stages.rewards import stage
from stages.rewards.number_rewards import last_number
from stages.rewards.registry import RewardError
from stages.rewards.stage import FIRST, ErrorPolicy, RewardScores, RewardSet, score_rows
from stages.tasks.tasks import REWARDS, repeat


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


async def matches(completions: list[str], answer: list[str]) -> list[float]:
    """Async, and without ``**columns``: it gets what it names."""
    await asyncio.sleep(0)
    return [
        float(completion == right) for completion, right in zip(completions, answer, strict=True)
    ]


def only_sums(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [1.0 if "+" in prompt else None for prompt in prompts]


def sees_everything(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
) -> list[float]:
    assert prompts == [[{"role": "user", "content": "hi"}], "hi"]
    assert completions == [[{"role": "assistant", "content": "yes"}], "no"]
    assert completion_ids == [[1, 2], [3]]
    assert columns == {"answer": ["a", None], "level": [None, 2]}
    return [0.0, 1.0]


def too_many(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * (len(completions) + 1)


def too_large(completions: list[str], **columns: Any) -> list[float]:
    return [1e300 for _ in completions]


calls: list[str] = []


def third_time(completions: list[str], **columns: Any) -> list[float]:
    """Raises in its first two calls with a row, each alone or among others."""
    calls.append("".join(completions))
    if any(sum(text in call for call in calls) < 3 for text in completions):
        raise ConnectionError("busy")
    return [1.0 for _ in completions]


def not_numbers(completions: list[str], **columns: Any) -> list[Any]:
    return [*[1.0] * (len(completions) - 1), "good"]


def not_finite(completions: list[str], **columns: Any) -> list[float]:
    return [*[1.0] * (len(completions) - 1), float("nan")]


def not_a_list(completions: list[str], **columns: Any) -> float:
    return 1.0


def breaks_on_bad(completions: list[str], **columns: Any) -> list[float]:
    return [1 / (completion != "bad") for completion in completions]


async def never(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.Event().wait()
    return []


def thread_name(completions: list[str], **columns: Any) -> list[float]:
    return [float(threading.current_thread() is threading.main_thread())]


def tensor(completions: list[str], **columns: Any) -> torch.Tensor:
    return torch.tensor([0.5] * len(completions), dtype=torch.float64)


def score(
    functions: list[tuple[str, float]],
    prompts: list[Any],
    completions: list[str],
    fields: list[dict[str, Any]] | None = None,
    **policy: Any,
) -> RewardScores:
    ids = [[1]] * len(completions)
    functions = [
        (name if name in REWARDS else f"{__name__}:{name}", weight) for name, weight in functions
    ]
    rewards = RewardSet(functions, policy=ErrorPolicy(**policy))
    return asyncio.run(rewards.score(prompts, completions, ids, fields or [{}] * len(completions)))


def test_several_functions_add_up_by_their_weights() -> None:
    rewards = score(
        [("length", 0.5), ("matches", 2.0)],
        ["1+1", "1+2"],
        ["2", "three"],
        [{"answer": "2"}, {"answer": "3"}],
    )
    assert rewards.scores.tolist() == [[1.0, 1.0], [5.0, 0.0]]
    assert rewards.total.tolist() == [2.5, 2.5]
    assert rewards.scores.dtype == rewards.total.dtype == torch.float32


def test_a_function_that_does_not_apply_counts_as_nothing() -> None:
    rewards = score([("length", 1.0), ("only_sums", 1.0)], ["1+1", "hi"], ["2", "ho"])
    assert rewards.scores[0].tolist() == [1.0, 1.0]
    assert rewards.scores[1].isnan().tolist() == [False, True]
    assert rewards.total.tolist() == [2.0, 2.0]


def test_functions_get_what_trl_would_give_them() -> None:
    conversation = [{"role": "user", "content": "hi"}]
    rewards = RewardSet([(f"{__name__}:sees_everything", 1.0)])
    fields = [{"answer": "a"}, {"level": 2}]
    scores = asyncio.run(rewards.score([conversation, "hi"], ["yes", "no"], [[1, 2], [3]], fields))
    assert scores.total.tolist() == [0.0, 1.0]


def test_plain_functions_leave_the_loop_free_and_may_return_tensors() -> None:
    assert score([("thread_name", 1.0), ("tensor", 1.0)], ["a"], ["b"]).scores.tolist() == [
        [0.0, 0.5]
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_many", "too_many' returned 3 scores for 2 rows; one for each is wanted; correct it"),
        ("not_numbers", "not_numbers' returned 'good' as a score"),
        ("not_finite", "not_finite' returned nan as a score"),
        ("too_large", "too_large' returned 1e[+]300 as a score"),
        ("not_a_list", "not_a_list' returned a float"),
        (
            "breaks_on_bad",
            r"breaks_on_bad' raised ZeroDivisionError.* at prompt 'q', completion "
            r"'bad' .*, line \d+",
        ),
        ("never", r"never' took more than 0\.01 s for 1 rows"),
    ],
)
def test_what_a_function_does_wrong_is_named_with_its_row(name: str, message: str) -> None:
    timeout = 0.01 if name == "never" else 60.0
    names = [(name, 1.0)] if name == "never" else [("length", 1.0), (name, 1.0)]
    with pytest.raises(RewardError, match=message):
        score(names, ["p", "q"], ["good", "bad"], on_error="fail", timeout=timeout, retries=0)


def test_a_failure_costs_its_own_row_alone() -> None:
    """In a call of three rows one fails: the others get their scores, whatever is done about the
    one."""
    given: Any = [("length", 1.0), ("breaks_on_bad", 2.0)], ["p", "q", "r"], ["good", "bad", "fine"]
    dropped = score(*given, on_error="drop")
    assert dropped.failed.tolist() == [[False, False], [False, True], [False, False]]
    assert dropped.total.tolist() == [6.0, 3.0, 6.0]
    zero = score(*given, on_error="zero")
    assert zero.scores.tolist() == [[4.0, 1.0], [3.0, 0.0], [4.0, 1.0]]
    assert not zero.failed.any()


def test_a_row_is_called_again_as_often_as_the_policy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "BACKOFF_SECONDS", 0.0)
    for retries, failed in ((0, True), (1, True), (2, False)):
        calls.clear()
        assert score([("third_time", 1.0)], ["p"], ["c"], retries=retries).failed.item() is failed
        assert calls == ["c"] * (retries + 1)
        calls.clear()  # of several rows: one call of them all, then of each alone
        score([("third_time", 1.0)], ["p", "p"], ["a", "b"], retries=retries)
        assert sorted(calls) == sorted(["ab", *["a", "b"] * min(2, retries + 1)])


def test_a_run_fails_when_too_many_of_the_recent_samples_fail() -> None:
    rewards = RewardSet(
        [(f"{__name__}:breaks_on_bad", 1.0)], policy=ErrorPolicy(retries=0, max_error_share=0.25)
    )

    async def one(completion: str) -> bool:
        return bool((await rewards.score(["q"], [completion], [[1]], [{}])).failed)

    async def all_of(completions: list[str]) -> list[bool]:
        return [await one(completion) for completion in completions]

    assert (
        asyncio.run(all_of(["good", "good", "good", "bad"] * 100))
        == [False, False, False, True] * 100
    )
    with pytest.raises(
        RewardError,
        match=r"breaks_on_bad' raised ZeroDiv.*'bad'.*65 of the last "
        r"256.*max_error_share",
    ):
        asyncio.run(one("bad"))
    fresh = RewardSet([(f"{__name__}:breaks_on_bad", 1.0)], policy=ErrorPolicy(retries=0))
    with pytest.raises(RewardError, match=f"{FIRST // 4 + 1} of the last {FIRST // 4 + 1} samples"):
        asyncio.run(fresh.score(["q"] * 64, ["bad"] * 64, [[1]] * 64, [{}] * 64))


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "at least one"),
        ([("spelling", 1.0), ("spelling", 2.0)], "given twice"),
        ([("spelling", float("nan"))], "finite"),
        ([("speling", 1.0)], r"\"speling\": is not known; did you mean 'spelling'\? Or use "),
        ([("mine", 1.0)], r"\"mine\": is not known; use 'module:function' or one of \['arith"),
        ([("no.such.module:f", 1.0)], "cannot be imported"),
        ([("math:pi", 1.0)], "not a function"),
    ],
)
def test_reward_sets_that_cannot_work_are_refused(
    functions: list[tuple[str, float]], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        RewardSet(functions)


def test_entry_points_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    found = EntryPoints([EntryPoint("brevity", f"{__name__}:length", "asyncdock.rewards")])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found.select(group=group))
    rewards = RewardSet([("brevity", 1.0)])
    assert asyncio.run(rewards.score(["p"], ["abc"], [[1]], [{}])).total.tolist() == [3.0]


def test_prompts_whose_columns_hide_the_runs_own_are_refused() -> None:
    with pytest.raises(RewardError, match="completions"):
        score([("length", 1.0)], ["p"], ["c"], [{"completions": "x"}])


def test_arithmetic_grades_from_talk_to_the_bare_number() -> None:
    ladder = ["I cannot say", "It is 8", "3 + 4 is, as one easily finds, 7", "3 + 4 = 7", "7"]
    scores = score(
        [("arithmetic", 1.0)], ["3 + 4"] * 5, ladder, [{"answer": "7"}] * 5
    ).total.tolist()
    assert scores == sorted(scores)
    assert len(set(scores)) == 5
    assert (scores[0], scores[-1]) == (0.0, 1.0)


def test_arithmetic_does_not_pay_for_listing_numbers() -> None:
    responses = ["7 8", "1 2 3 4 5 6 7 8 9"]
    scores = score([("arithmetic", 1.0)], ["3 + 4"] * 2, responses, [{"answer": "7"}] * 2).total
    assert scores.max() < 0.2


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("12", "12"),
        ("3-4=-1", "-1"),
        ("1,234.5 kg", "1234.5"),
        ("5 - 3", "3"),
        ("x2 none", None),
        ("it is 7.", "7"),
    ],
)
def test_the_last_number_is_read_as_a_person_would(response: str, number: str | None) -> None:
    assert last_number(response) == number


def test_reasoning_gym_scores_by_the_task_that_asked() -> None:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", seed=3, size=1)[0]
    answer = entry["answer"]
    responses = [
        answer,
        f"thinking... <answer> {answer} </answer>",
        f"it is {answer}, I think",
        "no idea",
    ]
    scores = score(
        [("reasoning_gym", 1.0)], [entry["question"]] * 4, responses, [entry] * 4
    ).total.tolist()
    assert scores[0] == scores[1] == 1.0
    assert 0.0 < scores[2] < 1.0
    assert scores[3] < scores[2]


def test_spelling_counts_the_letters_in_their_places() -> None:
    row = repeat(0, 0, length=4)
    answer = row["answer"]
    responses = [answer, answer[:2], answer + answer, ""]
    scores = score([("spelling", 1.0)], [row["prompt"]] * 4, responses, [row] * 4).total.tolist()
    assert scores == [1.0, 0.5, 0.5, 0.0]


seen: list[Any] = []


def reads(completions: list[Any], **columns: Any) -> list[float]:
    seen.extend(completions)
    return [1.0 for _ in completions]


def test_a_function_gets_a_trajectory_as_turns_and_observations() -> None:
    tokenizer = load_tokenizer("tiny")
    texts = [("ab", True), ("+", False), ("c", True)]
    ids = [tokenizer(text)["input_ids"] for text, _ in texts]
    mask = [is_turn for part, (_, is_turn) in zip(ids, texts, strict=True) for _ in part]
    row = [token for part in ids for token in part]
    conversation = [{"role": "user", "content": "ab="}]
    prompts: list[Any] = ["ab=", conversation, conversation]
    branches = [*(torch.tensor([], dtype=torch.int64) for _ in range(2)), torch.tensor([1, 0])]
    rows = TensorDict(
        {
            "response_ids": torch.nested.nested_tensor([row] * 3, layout=torch.jagged),
            "loss_mask": torch.nested.nested_tensor([mask] * 3, layout=torch.jagged),
            "branches": torch.nested.nested_tensor(branches, layout=torch.jagged),
            "turn_starts": torch.nested.nested_tensor(
                [torch.tensor([0, 3])] * 3, layout=torch.jagged
            ),
            "given": NonTensorStack(*map(json.dumps, prompts)),
            "fields": NonTensorStack("{}", "{}", "{}"),
        },
        batch_size=[3],
    )
    rewards = RewardSet([(f"{__name__}:reads", 1.0)])
    asyncio.run(score_rows(rewards, tokenizer, rows))
    assert seen == [
        "abc",
        [
            {"role": "assistant", "content": "ab"},
            {"role": "tool", "content": "+"},
            {"role": "assistant", "content": "c"},
        ],
        [
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "tool", "content": "+"},
            {"role": "assistant", "content": "c"},
        ],
    ]


def graded(
    completions: list[str], least: list[int], answer: list[str], mark: list[float] | None = None
) -> list[float]:
    """A function with options: ``least``, and ``mark`` where it has one."""
    marks = mark or [1.0] * len(completions)
    rows = zip(completions, least, answer, marks, strict=True)
    return [full * (len(text) >= most and text == right) for text, most, right, full in rows]


async def test_an_option_is_a_column_where_a_row_has_none_of_its_own() -> None:
    """Another function does not get it."""
    name = f"{__name__}:graded"
    texts = ["abc", "abc", "abcd", "ab"]
    fields = [
        {"answer": text, "least": own} for text, own in zip(texts, [None, 4, 4, 1], strict=True)
    ]
    rewards = RewardSet(
        [(name, 1.0), (f"{__name__}:names", 10.0)], options={name: {"least": 3, "mark": 0.5}}
    )
    scores = await rewards.score(["q"] * 4, texts, [[1]] * 4, fields)
    assert scores.scores[:, 0].tolist() == [0.5, 0.0, 0.5, 0.5]
    assert scores.scores[:, 1].tolist() == [4.0] * 4


def names(completions: list[str], **columns: Any) -> list[float]:
    """How many arguments there are beside the completions: prompts, token ids, and two columns."""
    return [float(len(columns)) for _ in completions]
