"""Stages done by programs outside of the run: what holds for the run's own workers holds for
these."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from orchestration.external.errors import NotExternal, WeightsGone, WeightsTooOld
from orchestration.external.experience import Experience
from orchestration.external.session import External
from orchestration.recipe.flow import algorithm_of, flow_of
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.worker_kinds import workers_of
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.paths import WHERE
from orchestration.workers.engines import train_engine
from orchestration.workers.flow import EXTERNAL_PROMPTS
from pipeline.data.columns import ColumnError, Packed
from pipeline.index.client import LeaseLost
from stages.algorithms.batch import trained_columns
from stages.prompts.too_long import TOO_LONG_FILE
from stages.rollout.external_checks import Misfit, Terms, check_responses
from tests.orchestration.run.test_run import assert_each_sample_once
from tests.orchestration.runs import MOCK, TINY, Watched, executing, recipe

ROLLOUT: dict[str, Any] = {
    **MOCK,
    "external": {"stages": ["rollout"]},
    "pipeline": {"staleness": 1, "arena": "16MiB"},
}


def ragged(rows: list[list[Any]], dtype: torch.dtype) -> Packed:
    offsets = np.cumsum([0, *map(len, rows)])
    return Packed(
        torch.tensor([x for row in rows for x in row], dtype=dtype), torch.from_numpy(offsets)
    )


def responses(rows: int, version: int, tokens: int = 3, **changes: Any) -> dict[str, Any]:
    """``rows`` responses that are right, with ``changes`` of some columns (None: left out)."""
    columns = {
        "response_ids": ragged([[5] * tokens] * rows, torch.int64),
        "rollout_logprobs": ragged([[-0.5] * tokens] * rows, torch.float32),
        "versions": ragged([[version, tokens]] * rows, torch.int64),
        "truncated": torch.zeros(rows, dtype=torch.bool),
    }
    return {name: value for name, value in (columns | changes).items() if value is not None}


async def opened(run: Execution, **options: Any) -> External:
    where = json.loads((run.folder.path / WHERE).read_text())
    return await External.open(where["index"], where["run"], **options)


@asynccontextmanager
async def taking_part(
    run: Execution,
) -> AsyncGenerator[tuple[Watched, External, asyncio.Task[Any]], None]:
    """``run`` while it runs, and its interface."""
    async with executing(run) as (watched, work):
        await watched.until(
            lambda: any(state["state"] == "running" for state in watched.of("state"))
        )
        external = await opened(run)
        try:
            yield watched, external, work
        finally:
            await external.close()


async def roll_out(
    external: External,
    worker: str,
    until: Callable[[Experience], bool] = lambda answer: answer.over,
) -> None:
    """A rollout's loop: the newest weights, then groups, then responses, one commit for each
    group."""
    version = -1
    while True:
        if (
            newer := await external.weights(after=version, wait=0 if version >= 0 else 30)
        ) is not None:
            version = newer.version
            await external.notify(worker, version)
        try:
            answer = await external.get_experience("rollout", worker, 2, wait=5)
        except WeightsTooOld:
            continue
        if until(answer):
            if answer:
                await external.release(answer.token)
            return
        if answer:
            await answer_all(external, answer, version)


def groups(experience: Experience) -> list[int]:
    return sorted({row.group for row in experience.rows})


async def answer_all(external: External, experience: Experience, version: int) -> None:
    for group in groups(experience):
        rows = [row.id for row in experience.rows if row.group == group]
        await external.put_experience(experience.token, rows, responses(len(rows), version))


async def claimed(
    external: External, most: int = 1, version: int = 0, **options: Any
) -> Experience:
    experience = await external.get_experience(
        "rollout", "test", most, version=version, wait=30, **options
    )
    assert experience
    return experience


@pytest.mark.parametrize(("staleness", "window"), [(0, 1), (2, 3)])
async def test_a_run_with_an_external_rollout_trains_each_sample_once(
    staleness: int, window: int, tmp_path: Path
) -> None:
    of = recipe(ROLLOUT, pipeline__staleness=staleness, pipeline__window=window)
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        watched,
        external,
        work,
    ):
        other = await opened(watched.run, worker="another")
        async with asyncio.TaskGroup() as rollouts:
            rollouts.create_task(roll_out(external, "a"))
            rollouts.create_task(roll_out(other, "b"))
        await other.close()
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    swaps = [sync for sync in watched.of("sync") if sync["worker"] == "external-a"]
    assert [swap["version"] for swap in swaps] == sorted({swap["version"] for swap in swaps})
    assert all(swap["bytes"] > 0 for swap in swaps)


async def test_what_a_dead_worker_held_is_delivered_again_and_its_late_commit_refused(
    tmp_path: Path,
) -> None:
    of = recipe(ROLLOUT)
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        watched,
        external,
        work,
    ):
        lost = await claimed(external, 2, lease=0.2)
        first = [row.id for row in lost.rows if row.group == lost.rows[0].group]
        await external.put_experience(lost.token, first[:1], responses(1, 0))
        # the gate lets 8 in; these are the two that were held, and two more
        again = await claimed(external, 4)
        while set(lost.ids) - {*first[:1]} - set(again.ids):
            await external.release(again.token)
            await asyncio.sleep(0.05)
            again = await claimed(external, 4)
        assert first[0] not in again.ids, "a row that was committed was handed out again"
        with pytest.raises(LeaseLost):
            await external.put_experience(lost.token, first[1:], responses(len(first) - 1, 0))
        with pytest.raises(LeaseLost):
            await external.renew(lost.token)
        await answer_all(external, again, 0)
        await roll_out(external, "a")
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert (await work).state == "finished"


async def test_a_lease_is_held_as_long_as_it_is_renewed(tmp_path: Path) -> None:
    async with taking_part(Execution(RunFolder.create(recipe(ROLLOUT), tmp_path / "run"))) as (
        watched,
        external,
        _,
    ):
        held = await claimed(external, 1, lease=0.5)
        for _ in range(3):
            assert await external.renew(held.token, 0.5) == 0.5
            assert (
                await external.get_experience("rollout", "other", 8, version=0, wait=0.3)
                is not None
            )
        await answer_all(external, held, 0)
        watched.stop.set()


async def test_weights_too_old_are_refused_at_the_claim_and_at_the_commit(tmp_path: Path) -> None:
    of = recipe(ROLLOUT, train__steps=4)
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        watched,
        external,
        work,
    ):
        with pytest.raises(Misfit, match="1 is not published"):
            await external.get_experience("rollout", "test", 1, version=1)
        with pytest.raises(Misfit, match="call weight_sync_notify"):
            await external.get_experience("rollout", "test", 1)
        await roll_out(external, "a", until=lambda answer: answer.published >= 2)
        await external.notify("slow", 0)  # with η = 1 and P = 4 version 0 may make groups 0 .. 7
        with pytest.raises(WeightsTooOld, match="load version"):
            await external.get_experience("rollout", "slow", 1, wait=30)
        answer = await external.get_experience("rollout", "slow", 1, version=2, wait=10)
        assert answer
        with pytest.raises(WeightsTooOld, match="version 0 may make no tokens of group"):
            await external.put_experience(answer.token, answer.ids, responses(len(answer.ids), 0))
        await answer_all(external, answer, 2)
        await roll_out(external, "a")
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)


async def test_a_parked_response_goes_on_with_whoever_claims_it_next(tmp_path: Path) -> None:
    of = recipe(ROLLOUT)
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        watched,
        external,
        work,
    ):
        begun = await claimed(external, 1)
        rows = begun.ids
        progress = responses(1, 0, tokens=2, truncated=None)
        await external.put_experience(begun.token, rows[:1], progress, park=True)
        await external.put_experience(begun.token, rows[1:], responses(len(rows) - 1, 0))
        more = await claimed(external, 1)
        parked, columns = more.begun
        assert parked == rows[:1]
        assert columns["response_ids"].values.tolist() == [5, 5]
        assert columns["versions"].values.tolist() == [0, 2]
        longest = responses(1, 0, tokens=32, truncated=None)
        with pytest.raises(Misfit, match="has ended"):
            await external.put_experience(more.token, rows[:1], longest, park=True)
        await answer_all(external, more, 0)
        await roll_out(external, "a")
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)


IDS = torch.int64
LOGPROBS = torch.float32
VERSIONS = torch.int64
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a column is missing": ({"versions": None}, "versions.*is missing"),
    "a column of another stage": (
        {"reward": torch.zeros(4)},
        "reward.*not one that this stage makes",
    ),
    "too few rows": ({"truncated": torch.zeros(3, dtype=torch.bool)}, "truncated.*3 rows|3 rows"),
    "another dtype": (
        {"rollout_logprobs": ragged([[-0.5] * 3] * 4, torch.float64)},
        "rollout_logprobs.*float32",
    ),
    "no offsets": ({"response_ids": torch.ones(4, dtype=torch.int64)}, "response_ids.*no offsets"),
    "no token": (
        {"response_ids": ragged([[], [5], [5], [5]], IDS)},
        "response_ids.*row 0 has no token",
    ),
    "a token past the vocabulary": (
        {"response_ids": ragged([[5, 5, 999]] * 4, IDS)},
        "response_ids.*row 0.*999",
    ),
    "too long": (responses(4, 0, tokens=33), "response_ids.*33 tokens.*max_tokens = 32"),
    "a logprob too few": (
        {"rollout_logprobs": ragged([[-0.5] * 3] * 3 + [[-0.5]], LOGPROBS)},
        "logprobs.*row 3 has 1",
    ),
    "a logprob that is none": (
        {"rollout_logprobs": ragged([[-0.5, float("nan"), 0]] * 4, LOGPROBS)},
        "row 0.*nan",
    ),
    "versions that do not add up": (
        {"versions": ragged([[0, 2]] * 4, VERSIONS)},
        "versions.*counts 2 tokens",
    ),
    "half a version": ({"versions": ragged([[0, 3, 0]] * 4, VERSIONS)}, "versions.*3 numbers"),
    "a version of nothing": (
        {"versions": ragged([[0, 3, 0, 0]] * 4, VERSIONS)},
        "versions.*without tokens",
    ),
    "a version to come": (
        {"versions": ragged([[7, 3]] * 4, VERSIONS)},
        "versions.*row 0.*published",
    ),
}


async def test_what_does_not_fit_is_told_with_its_column_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    of = recipe(ROLLOUT)
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        watched,
        external,
        work,
    ):
        held = await claimed(external, 1)
        token = held.token
        rows = held.ids
        for changes, words in WRONG.values():
            with pytest.raises((Misfit, ColumnError), match=f"(?s){words}"):
                await external.put_experience(token, rows, responses(4, 0, **changes))
        with pytest.raises(LeaseLost, match="not held by token"):
            await external.put_experience(token, [*rows[:3], 10**6], responses(4, 0))
        with pytest.raises(Misfit, match="holds one twice"):
            await external.put_experience(token, rows[:1] * 4, responses(4, 0))
        with pytest.raises(NotExternal, match=r"external\.stages = \['reward'\]"):
            await external.get_experience("reward", "test", 1)
        with pytest.raises(NotExternal, match="prompts"):
            await external.put_prompts([{"prompt": "a"}])
        await answer_all(external, held, 0)
        await roll_out(external, "a")
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), min_size=1, max_size=4))
def test_versions_are_taken_only_when_they_add_up(pairs: list[list[int]]) -> None:
    """Whatever is put as versions is refused, or gives exactly the age of each token."""
    terms = Terms(10, {"max_tokens": 8}, 0, 1)
    columns = responses(len(pairs), 0, versions=ragged(pairs, torch.int64))
    try:
        made = check_responses(columns, terms, published=3)
    except Misfit:
        return
    for flat, (oldest, tokens) in zip(pairs, made, strict=True):
        assert sum(flat[1::2]) == tokens == 3
        assert all(count > 0 for count in flat[1::2])
        assert oldest == min(flat[::2]) >= 0
        assert max(flat[::2]) <= 3


PROMPTS = [{"prompt": f"{letter}b=", "answer": letter * 4} for letter in "abcdefgh"]


async def test_prompts_that_are_put_are_asked_in_their_order(tmp_path: Path) -> None:
    prompts = {"source": "external", "max_prompt_tokens": 16, "too_long": "skip"}
    of = recipe({**ROLLOUT, "prompts": prompts}, train__steps=4)
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        watched,
        external,
        work,
    ):
        assert await external.put_prompts(PROMPTS[:3]) == 3
        assert await external.put_prompts(PROMPTS[:5], first=0) == 5, (
            "a repeat puts only what is new"
        )
        assert await external.put_prompts([{"prompt": "a" * 40}], first=5) == 6
        with pytest.raises(Exception, match="out of order"):
            await external.put_prompts(PROMPTS[5:], first=9)
        with pytest.raises(ValueError, match="prompt 0 has no column 'prompt'"):
            await external.put_prompts([{"question": "?"}])
        with pytest.raises(ValueError, match="reward functions get from the run"):
            await external.put_prompts([{"prompt": "a", "completions": 1}])
        with pytest.raises(ValueError, match="prompt 0 has half of a surrogate pair"):
            await external.put_prompts([{"prompt": "\ud800"}])
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            await external.put_prompts([{"prompt": [{"role": "user", "content": "\udfff"}]}])
        async with asyncio.timeout(60):
            while (await external.index.status()).admitted < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        held = await claimed(external, 8)
        assert groups(held) == [0, 1, 2, 3, 4], "the one that is too long is left out"
        left_out = [event for event in watched.of("prompt") if event["change"] == "left out"]
        assert [event["position"] for event in left_out] == [5]
        assert "longer than 16 tokens" in left_out[0]["reason"]
        [listed] = [
            json.loads(line) for line in (tmp_path / "run" / TOO_LONG_FILE).read_text().splitlines()
        ]
        assert listed == {"where": "prompt 5", "length": "40 tokens", "done": "skipped"}
        await external.put_prompts(PROMPTS[5:], last=True)
        with pytest.raises(Exception, match="after the last"):
            await external.put_prompts(PROMPTS[:1])
        asked = held.columns["prompt_ids"].lengths()
        assert asked.tolist() == [3] * len(held.rows)
        await answer_all(external, held, 0)
        await roll_out(external, "a")
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)  # 16 groups of 8 prompts: they are gone through twice
    lines = [
        json.loads(line) for line in (tmp_path / "run" / EXTERNAL_PROMPTS).read_text().splitlines()
    ]
    assert [line["row"] for line in lines] == PROMPTS
    assert [line["position"] for line in lines] == [0, 1, 2, 3, 4, 6, 7, 8]


async def test_prompts_that_would_break_the_run_are_left_out_and_when_none_is_left_it_says_so(
    tmp_path: Path,
) -> None:
    """Prompts that cannot be asked: longer than the model's context, a gigabyte once the template
    is filled, a conversation for a tokenizer without a chat template, without a column that the
    template names, larger than there is room for."""
    template = "{prompt}{answer}" + "{prompt}" * 2000
    of = recipe(
        {**ROLLOUT, "prompts": {"source": "external", "template": template, "too_long": "fail"}},
        train__steps=4,
    )
    bad = [
        {"prompt": "a" * 600, "answer": ""},
        {"prompt": "a" * 500_000, "answer": ""},
        {"prompt": [{"role": "user", "content": "a"}], "answer": ""},
        {"prompt": "a"},
        {"prompt": "a", "answer": "", "about": "x" * 2_000_000},
    ]
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        watched,
        external,
        work,
    ):
        await external.put_prompts(bad, first=0)
        await watched.until(
            lambda: len([e for e in watched.of("prompt") if e["change"] == "left out"]) == len(bad)
        )
        await external.put_prompts([], first=len(bad), last=True)
        result = await work
    assert result.state == "failed"
    assert "all 5 prompts that were put are left out, and no more will come" in result.reason
    assert not [worker for worker in watched.of("worker") if worker["change"] == "restarted"]


async def test_a_resumed_run_has_the_prompts_that_were_put(tmp_path: Path) -> None:
    of = recipe({**ROLLOUT, "prompts": {"source": "external"}}, train__steps=8, checkpoint__every=2)
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        watched,
        external,
        work,
    ):
        await external.put_prompts(PROMPTS * 3, first=0)
        await roll_out(external, "a", until=lambda answer: answer.trained >= 3)
        watched.stop.set()
        assert (await work).state == "stopped"
    resumed = Execution(RunFolder.resume(tmp_path / "run"))
    assert resumed.folder.start is not None
    async with taking_part(resumed) as (watched, external, work):
        assert await external.put_prompts([], first=24) == 24
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(roll_out(external, "a"))
            tasks.create_task(external.put_prompts(PROMPTS, first=24))
        result = await work
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == list(
        range(resumed.folder.start.version + 1, 9)
    )
    assert sorted(group for step in watched.of("step") for group in step["groups"]) == list(
        range(resumed.folder.start.version * 4, 32)
    )


async def test_every_other_stage_may_be_external_too(tmp_path: Path) -> None:
    """Reward, reference and the trainer itself, while the run's own engine generates."""
    base = {**TINY, "external": {"stages": ["reward", "reference", "update"]}}
    of = recipe(base, algorithm__options={"kl_coef": 0.1}, train__steps=4, checkpoint__every=2)
    assert [kind for kind, _ in workers_of(of)] == ["flow", "rollout"]
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        watched,
        external,
        work,
    ):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(score(external))
            tasks.create_task(refer(external))
            tasks.create_task(train(external, of))
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert [step["loss"] == step["loss"] for step in watched.of("step")] == [True] * 4
    taken = [sync["version"] for sync in watched.of("sync") if sync["worker"] == "rollout-0"]
    assert taken[-1] == 4, "the run's engine follows the weights that were published from outside"


async def score(external: External) -> None:
    while not (answer := await external.get_experience("reward", "judge", 8, wait=5)).over:
        if answer:
            columns = answer.columns
            assert all(json.loads(text)["answer"] for text in columns["fields"].texts())
            total = (columns["response_ids"].lengths() % 3).float()
            wrong = {"reward": total * float("nan"), "scores": total[:, None]}
            with pytest.raises(ColumnError, match=r"column 'reward'.*row 0 holds nan"):
                await external.put_experience(answer.token, answer.ids, wrong)
            with pytest.raises(Misfit, match="park"):
                await external.put_experience(
                    answer.token, answer.ids, {"reward": total}, park=True
                )
            await external.put_experience(
                answer.token, answer.ids, {"reward": total, "scores": total[:, None]}
            )


async def refer(external: External) -> None:
    while not (answer := await external.get_experience("reference", "frozen", 2, wait=5)).over:
        if answer:
            ids = answer.columns["response_ids"]
            none = Packed(torch.zeros(0), torch.zeros(len(answer.rows) + 1, dtype=torch.int64))
            with pytest.raises(Misfit, match=r"ref_logprobs.*row 0 has 0 for"):
                await external.put_experience(answer.token, answer.ids, {"ref_logprobs": none})
            values = torch.full((len(ids.values),), -1.0)
            await external.put_experience(
                answer.token, answer.ids, {"ref_logprobs": Packed(values, ids.offsets)}
            )


async def train(external: External, of: Any) -> None:
    """A trainer: it publishes what it begins with, then a version after each step."""
    engine = train_engine(of)
    algorithm = algorithm_of(of)
    await external.publish(0, engine.weights())
    names = trained_columns(algorithm, flow_of(of).schema)
    while not (
        answer := await external.get_experience("update", "trainer", 1, columns=names, wait=5)
    ).over:
        if not answer:
            continue
        columns = answer.columns
        batch = {
            "group": torch.tensor([row.group for row in answer.rows]),
            "place": torch.tensor([row.place for row in answer.rows]),
            "advantage": columns["advantage"].values,
            **{name: columns[name].jagged() for name in names if columns[name].offsets is not None},
        }
        metrics = await asyncio.to_thread(
            engine.train_batch, TensorDict(batch, [len(answer.rows)]), algorithm
        )
        with pytest.raises(Exception, match="is not next"):
            await external.train(answer.token, answer.trained, metrics)
        version = await external.train(answer.token, answer.trained + 1, metrics)
        again = await external.replay(answer.trained + 1)
        assert again.ids == answer.ids
        with pytest.raises(Misfit, match="cannot be published"):
            await external.publish(version + 1, engine.weights())
        await external.publish(version, engine.weights())
    engine.close()


async def test_weights_that_are_held_are_read_verified_and_others_said_to_be_gone(
    tmp_path: Path,
) -> None:
    of = recipe(ROLLOUT, train__steps=3)
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        _,
        external,
        work,
    ):
        first = await external.weights(wait=30)
        assert first is not None
        assert first.version == 0
        tensors = await external.read_weights(0)
        begun = dict(train_engine(of).weights())
        assert all(torch.equal(tensors[name], begun[name]) for name in begun)
        assert await external.weights(after=0) is None
        await roll_out(external, "a", until=lambda answer: answer.published >= 2)
        with pytest.raises(WeightsGone, match="ask for the newest"):
            await external.read_weights(0)
        await roll_out(external, "a")
        assert (await work).state == "finished"


def test_a_recipe_says_which_external_stages_do_not_fit() -> None:
    with pytest.raises(RecipeError) as refused:
        recipe(ROLLOUT, external__stages=["rollout", "rollout", "advantage"], evaluate__every=2)
    assert {problem.key for problem in refused.value.problems} == {"external.stages.2"}
    with pytest.raises(RecipeError) as refused:
        recipe(ROLLOUT, external__stages=["rollout", "rollout", "reference"], evaluate__every=2)
    assert {problem.key for problem in refused.value.problems} == {
        "external.stages.1",
        "external.stages",
        "evaluate.every",
    }
    assert all(problem.fix for problem in refused.value.problems)
    with pytest.raises(RecipeError) as refused:
        recipe({**ROLLOUT, "prompts": {"source": "external", "task": "repeat"}})
    assert [(problem.key, problem.fix) for problem in refused.value.problems] == [
        ("prompts.task", 'take it out; over a recipe that has it, write task = ""')
    ]


async def test_a_run_that_ends_tells_who_waits(tmp_path: Path) -> None:
    async with taking_part(Execution(RunFolder.create(recipe(ROLLOUT), tmp_path / "run"))) as (
        watched,
        external,
        work,
    ):
        everything = await claimed(external, 8)
        waiting = asyncio.create_task(
            external.get_experience("rollout", "late", 1, version=0, wait=60)
        )
        newer = asyncio.create_task(external.weights(after=0, wait=60))
        watched.stop.set()
        async with asyncio.timeout(20):
            assert (await waiting).over
            assert await newer is None
        assert everything.rows
        assert (await work).state == "stopped"


async def test_the_time_of_an_external_worker_is_told_as_that_of_the_runs_own(
    tmp_path: Path,
) -> None:
    """Busy from a claim's answer to its last commit, or the end of its lease; waiting while a claim
    waits."""
    of = recipe(ROLLOUT, train__steps=200)
    async with taking_part(Execution(RunFolder.create(of, tmp_path / "run"))) as (
        watched,
        external,
        _,
    ):

        def last(worker: str) -> dict[str, Any]:
            found = [
                stage
                for stage in watched.of("stage")
                if stage["worker"] == f"external-rollout-{worker}"
            ]
            return (
                found[-1]
                if found
                else dict.fromkeys(("busy", "waiting_input", "other", "in_flight"), 0.0)
            )

        held = await claimed(external, 8)  # as many as the gate lets in
        rows = held.ids
        assert len(groups(held)) == 8
        idle = asyncio.create_task(
            external.get_experience("rollout", "idle", 1, version=0, wait=60)
        )
        await watched.until(
            lambda: last("test")["busy"] > 0.6 and last("idle")["waiting_input"] > 0.6
        )
        assert (last("test")["in_flight"], last("test")["rows"], last("test")["queue_depth"]) == (
            len(rows),
            0,
            0,
        )
        assert (last("idle")["busy"], last("idle")["in_flight"]) == (0, 0)

        await external.put_experience(
            held.token, rows[:1], responses(1, 0, tokens=2, truncated=None), park=True
        )
        await external.put_experience(held.token, rows[1:], responses(len(rows) - 1, 0))
        await watched.until(lambda: last("test")["in_flight"] == 0)
        done = last("test")
        assert (done["parked"], done["rows"], done["tokens"]) == (
            1,
            len(rows) - 1,
            2 + 3 * (len(rows) - 1),
        )
        await watched.until(lambda: last("test")["other"] > done["other"] + 0.4)
        assert last("test")["busy"] == done["busy"]
        [span] = [
            span
            for event in watched.of("span")
            if event["worker"] == done["worker"]
            for span in event["spans"]
        ]
        assert (span["name"], span["rows"], span["version"]) == ("rollout", len(rows), 0)
        assert span["seconds"] > 0.6

        answer = await idle  # the one that was parked, under a lease that is not renewed
        assert answer
        await external.put_experience(answer.token, answer.ids, responses(len(answer.ids), 0))
        await watched.until(lambda: last("idle")["in_flight"] == 0 and last("idle")["rows"] == 1)
        assert last("idle")["tokens"] == 1  # two of the three are of who parked it

        newest = await external.weights(after=1, wait=30)
        assert newest is not None
        await claimed(external, 1, version=newest.version, lease=0.4)  # and never heard of again
        await watched.until(lambda: last("test")["busy"] > done["busy"] + 0.3)
        await watched.until(lambda: last("test")["in_flight"] == 0)
        ended = last("test")
        await watched.until(lambda: last("test")["other"] > ended["other"] + 0.4)
        assert last("test")["busy"] == ended["busy"], (
            "its lease has ended, so it is not known to be busy"
        )
        for stage in watched.of("stage"):
            parts = sum(stage[part] for part in ("busy", "waiting_input", "waiting_room", "other"))
            assert parts == pytest.approx(stage["wall"])
        watched.stop.set()
