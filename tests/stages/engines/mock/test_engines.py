"""The mock engines' own: the latency model, and training that learns nothing.

What every rollout engine holds is in tests/stages/engines.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from stages.algorithms import build_algorithm
from stages.engines.mock.engines import MockRolloutEngine, MockTrainEngine
from stages.engines.mock.options import MockRolloutOptions, MockTrainOptions
from stages.engines.protocols import Completion, GroupRequest, SamplingParams

FAST = 0.001  # a second of the model in a millisecond


class LoopClock:
    """Runs a coroutine on a loop whose time jumps to the next timer: the latency model, exact and
    without waiting."""

    def run(self, main: Any) -> Any:
        loop = asyncio.new_event_loop()
        self.now = 0.0
        loop.time = lambda: self.now  # type: ignore[method-assign]
        select = loop._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            if timeout:
                self.now += timeout
            return select(0 if timeout is not None else 5)

        loop._selector.select = jump  # type: ignore[attr-defined]
        try:
            return loop.run_until_complete(main)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def request(
    group: int, places: Sequence[int] = (0,), *, max_tokens: int = 10_000, prompt: int = 1
) -> GroupRequest:
    return GroupRequest(
        group=group,
        places=tuple(places),
        prompt_ids=torch.ones(prompt, dtype=torch.int64),
        params=SamplingParams(max_tokens=max_tokens),
        seed=1000 + group,
    )


async def collect(
    engine: MockRolloutEngine, requests: list[GroupRequest]
) -> dict[tuple[int, int], Completion]:
    return {(done.group, done.place): done async for done in engine.generate(requests)}


def rows_of(engine: MockRolloutEngine) -> int:
    """Number of rows that decode or wait."""
    return len(engine._decoding) + len(engine._waiting)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"head.weight": torch.full((3,), value)}


def test_lengths_are_log_normal_and_cut_at_max_tokens() -> None:
    async def lengths() -> None:
        engine = MockRolloutEngine(MockRolloutOptions(max_rows=4000, median_tokens=100, sigma=0.5))
        done = await collect(engine, [request(g, range(8), max_tokens=300) for g in range(500)])
        tokens = np.array([len(each.token_ids) for each in done.values()])
        assert np.median(tokens) == pytest.approx(100, rel=0.05)
        assert np.log(tokens).std() == pytest.approx(0.5, rel=0.05)
        cut = [each for each in done.values() if each.finish_reason == "length"]
        assert 0 < len(cut) < 100
        assert all(len(each.token_ids) == 300 for each in cut)

    LoopClock().run(lengths())


@pytest.mark.parametrize(
    ("rows", "max_rows", "seconds"),
    [
        (1, 8, 10.0),  # 100 tokens at 10 a second
        (4, 8, 10.0),  # below saturation each row keeps its rate
        (8, 8, 20.0),  # twice saturation: half the rate
        (8, 4, 20.0),  # two waves
        (9, 4, 30.0),
    ],
)
def test_time_follows_the_latency_model(rows: int, max_rows: int, seconds: float) -> None:
    options = MockRolloutOptions(
        max_rows=max_rows,
        row_rate=10,
        saturation_rows=4,
        median_tokens=100,
        sigma=0,
        prefill_rate=1e12,
        time_scale=0.5,
    )
    clock = LoopClock()
    done = clock.run(collect(MockRolloutEngine(options), [request(0, range(rows))]))
    assert len(done) == rows
    assert clock.now == pytest.approx(seconds * 0.5)


def test_the_prompt_of_a_group_costs_its_prefill_once() -> None:
    options = MockRolloutOptions(row_rate=10, median_tokens=100, sigma=0, prefill_rate=50)
    clock = LoopClock()
    clock.run(collect(MockRolloutEngine(options), [request(0, range(4), prompt=100)]))
    assert clock.now == pytest.approx(10 + 2)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 40),
    max_rows=st.integers(1, 12),
    saturation=st.integers(1, 12),
    late=st.floats(0.0, 5.0),
)
def test_rows_end_when_a_simulation_in_small_steps_says(
    seed: int, rows: int, max_rows: int, saturation: int, late: float
) -> None:
    """Against the plainest possible model: slots filled in order, every row moved on by its rate
    until one ends."""
    options = MockRolloutOptions(
        max_rows=max_rows,
        row_rate=10,
        saturation_rows=saturation,
        median_tokens=20,
        sigma=1.0,
        prefill_rate=1e12,
    )
    prompt = torch.ones(1, dtype=torch.int64)
    requests = [
        GroupRequest(g, (0,), prompt, SamplingParams(max_tokens=100), seed + g) for g in range(rows)
    ]
    first = requests[: rows // 2]
    second = requests[rows // 2 :]
    clock = LoopClock()
    ends: dict[int, float] = {}
    lengths: dict[int, int] = {}

    async def take(engine: MockRolloutEngine, some: list[GroupRequest]) -> None:
        async for done in engine.generate(some):
            ends[done.group], lengths[done.group] = clock.now, len(done.token_ids)

    async def main() -> None:
        engine = MockRolloutEngine(options)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take(engine, first))
            await asyncio.sleep(late)
            tasks.create_task(take(engine, second))

    clock.run(main())

    arrivals = [(0.0, each.group) for each in first] + [(late, each.group) for each in second]
    running: dict[int, float] = {}
    now = 0.0
    expected: dict[int, float] = {}
    while arrivals or running:
        while arrivals and arrivals[0][0] <= now + 1e-9 and len(running) < max_rows:
            group = arrivals.pop(0)[1]
            running[group] = lengths[group]
        rate = 10 * min(1.0, saturation / max(1, len(running)))
        until_end = min(running.values(), default=float("inf")) / rate
        until_arrival = (
            arrivals[0][0] - now if arrivals and arrivals[0][0] > now + 1e-9 else float("inf")
        )
        step = min(until_end, until_arrival)
        now += step
        running = {group: left - rate * step for group, left in running.items()}
        for group in [group for group, left in running.items() if left < 1e-6]:
            expected[group] = now
            del running[group]
    assert ends == pytest.approx(expected, abs=1e-3)


def test_tokens_carry_the_version_that_made_them_across_a_swap() -> None:
    options = MockRolloutOptions(
        row_rate=10, median_tokens=100, sigma=0, prefill_rate=1e12, swap_seconds=1, copy_seconds=0.5
    )
    clock = LoopClock()

    async def main() -> Completion:
        engine = MockRolloutEngine(options, version=3)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(collect(engine, [request(0)]))
            await asyncio.sleep(3.55)
            assert engine.version == 3
            await engine.load_weights(4, weights(1.0))
            assert engine.version == 4
        return task.result()[0, 0]

    done = clock.run(main())
    assert done.versions == ((3, 40), (4, 60))  # it decoded on through the copy, until 4.05 s
    assert done.oldest_version == 3
    assert clock.now == pytest.approx(10 + 1)


def test_pause_holds_the_rows_where_they_are() -> None:
    options = MockRolloutOptions(row_rate=10, median_tokens=100, sigma=0, prefill_rate=1e12)
    clock = LoopClock()

    async def main() -> None:
        engine = MockRolloutEngine(options)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(collect(engine, [request(0)]))
            await asyncio.sleep(4)
            await engine.pause()
            await asyncio.sleep(100)
            assert not task.done()
            assert rows_of(engine) == 1
            await engine.resume()

    clock.run(main())
    assert clock.now == pytest.approx(110)


def test_a_closed_iterator_gives_its_slots_to_those_who_wait() -> None:
    options = MockRolloutOptions(
        max_rows=2, row_rate=10, median_tokens=100, sigma=0, prefill_rate=1e12
    )
    clock = LoopClock()

    async def main() -> None:
        engine = MockRolloutEngine(options)
        first = asyncio.create_task(collect(engine, [request(0, range(5))]))
        await asyncio.sleep(1)
        second = asyncio.create_task(collect(engine, [request(1, range(2))]))
        await asyncio.sleep(1)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        assert rows_of(engine) == 2
        assert sorted(await second) == [(1, 0), (1, 1)]
        assert rows_of(engine) == 0

    clock.run(main())
    assert clock.now == pytest.approx(12)


def test_a_batch_joins_before_its_iterator_is_awaited_and_leaves_when_that_is_closed() -> None:
    async def main() -> None:
        engine = MockRolloutEngine(MockRolloutOptions())
        responses = engine.generate([request(0, range(3))])
        assert rows_of(engine) == 3
        await responses.aclose()  # type: ignore[attr-defined]
        assert rows_of(engine) == 0
        assert [done async for done in responses] == []

    LoopClock().run(main())


def test_thousands_of_rows_need_one_timer_each_and_keep_the_models_time() -> None:
    async def main() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        timers = 0
        call_at = loop.call_at

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal timers
            timers += 1
            return call_at(*arguments, **options)

        loop.call_at = counted  # type: ignore[method-assign]
        engine = MockRolloutEngine(MockRolloutOptions(max_rows=1000, median_tokens=500))
        await collect(engine, [request(g, range(8)) for g in range(250)])
        return timers, loop.time()

    timers, _ = LoopClock().run(main())
    assert timers <= 2000 + 2


@pytest.mark.parametrize(
    "wrong", [{"max_rows": 0}, {"row_rate": -1.0}, {"sigma": -0.1}, {"vocabulary": 1}]
)
def test_options_out_of_range_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MockRolloutOptions(**wrong)


# --- train
# --------------------------------------------------------------------------------------------------


def train_batch(seed: int = 0) -> TensorDict:
    """Two groups of two rows."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.nested.nested_tensor_from_jagged(
        torch.arange(10), torch.tensor([0, 3, 6, 8, 10])
    )
    offsets = torch.tensor([0, 4, 5, 8, 12])
    responses = torch.nested.nested_tensor_from_jagged(
        torch.randint(100, (12,), generator=generator), offsets
    )
    logprobs = torch.nested.nested_tensor_from_jagged(-torch.rand(12, generator=generator), offsets)
    return TensorDict(
        {
            "group": torch.tensor([0, 0, 1, 1]),
            "place": torch.tensor([0, 1, 0, 1]),
            "prompt_ids": prompts,
            "response_ids": responses,
            "rollout_logprobs": logprobs,
            "ref_logprobs": logprobs,
            "advantage": torch.tensor([1.0, -1.0, 0.5, -0.5]),
        },
        batch_size=[4],
    )


INSTANT = MockTrainOptions(step_seconds=0, token_seconds=0, logprob_token_seconds=0)


def test_a_step_reports_what_a_real_one_does_and_moves_the_weights() -> None:
    engine = MockTrainEngine(INSTANT, seed=1)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    metrics = engine.train_batch(train_batch(), build_algorithm("grpo", {"kl_coef": 0.1}))
    assert {
        "loss",
        "grad_norm",
        "learning_rate",
        "clip_fraction",
        "kl_reference",
        "ess",
    } <= metrics.keys()
    assert all(isinstance(value, float) for value in metrics.values())
    after = dict(engine.weights())
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_weights_are_the_same_exactly_when_the_data_was() -> None:
    algorithm = build_algorithm("grpo", {})

    def trained(*seeds: int) -> torch.Tensor:
        engine = MockTrainEngine(INSTANT, seed=1)
        for seed in seeds:
            engine.train_batch(train_batch(seed), algorithm)
        return torch.cat([tensor for _, tensor in engine.weights()])

    assert torch.equal(trained(1, 2), trained(1, 2))
    assert not torch.equal(trained(1, 2), trained(2, 1))
    assert not torch.equal(trained(1, 2), trained(1, 3))


def test_state_round_trips() -> None:
    algorithm = build_algorithm("grpo", {})
    engine = MockTrainEngine(INSTANT, seed=1)
    other = MockTrainEngine(INSTANT, seed=2)
    engine.train_batch(train_batch(1), algorithm)
    state = engine.state_dict()
    engine.train_batch(train_batch(2), algorithm)
    other.load_state_dict(state)
    other.train_batch(train_batch(2), algorithm)
    assert all(torch.equal(a, dict(other.weights())[name]) for name, a in engine.weights())


def test_calls_take_the_time_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = 0.0

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    options = MockTrainOptions(
        step_seconds=2, token_seconds=0.5, logprob_token_seconds=0.25, time_scale=0.1
    )
    engine = MockTrainEngine(options)
    engine.train_batch(train_batch(), build_algorithm("grpo", {}))
    engine.logprobs(train_batch())
    # 12 response tokens, and the prompts of the two groups once: 3 + 2.
    assert slept == pytest.approx([(2 + 0.5 * 17) * 0.1, 0.25 * 17 * 0.1])


def test_logprobs_are_those_of_the_responses_and_do_not_change() -> None:
    engine = MockTrainEngine(INSTANT)
    batch = train_batch()
    logprobs = engine.logprobs(batch)
    assert logprobs.offsets().tolist() == batch["response_ids"].offsets().tolist()
    assert logprobs.dtype == torch.float32
    assert bool((logprobs.values() <= 0).all())
    assert torch.equal(engine.logprobs(batch).values(), logprobs.values())


def test_weights_go_from_trainer_to_rollout_and_to_disk(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    async def main() -> None:
        trainer = MockTrainEngine(INSTANT)
        rollout = MockRolloutEngine(MockRolloutOptions(time_scale=FAST))
        await rollout.load_weights(1, dict(trainer.weights()))
        trainer.train_batch(train_batch(), build_algorithm("grpo", {}))
        await rollout.load_weights(2, dict(trainer.weights()))
        assert rollout.version == 2
        trainer.save_pretrained(tmp_path / "model")
        saved = load_file(tmp_path / "model" / "model.safetensors")
        assert all(torch.equal(saved[name], tensor) for name, tensor in trainer.weights())
        begun = MockRolloutEngine(
            MockRolloutOptions(time_scale=FAST), version=2, weights=tmp_path / "model"
        )
        first = await collect(rollout, [request(0)])
        second = await collect(begun, [request(0)])
        assert torch.equal(first[0, 0].token_ids, second[0, 0].token_ids), (
            "the tokens of a version, wherever it is from"
        )

    asyncio.run(main())
