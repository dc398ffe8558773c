"""What every RolloutEngine must hold.

An adapter's tests subclass one of the two classes here and build it.

    RolloutContract   places, seeds, streaming, abort, pause, weights and their versions, close
    ModelContract     the same, and what an engine with a real model must hold besides: logprobs, stops, failure
    SleepContract     what an engine must hold that gives its device away (``ColocatedEngine``)

A subclass may share one engine among its tests (``engine`` is a fixture to override); each leaves
the engine idle and with the weights number 0.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from stages.engines.protocols import (
    Begun,
    ColocatedEngine,
    Completion,
    CuttingEngine,
    EngineClosed,
    EngineFailed,
    GroupRequest,
    RolloutEngine,
    SamplingParams,
    StreamingEngine,
    Token,
    WeightMismatch,
)
from stages.flow.catalogue import OBSERVED

Found = dict[tuple[int, int], Completion]


async def collect(stream: AsyncIterator[Completion]) -> Found:
    found: Found = {}
    async for done in stream:
        assert (done.group, done.place) not in found
        found[done.group, done.place] = done
    return found


async def order_of_ends(engine: RolloutEngine) -> list[int]:
    """Return the groups 1, 3 and 5 as their responses end on an engine with one row at a time. They
    wait for a response of group 0; then 1 is new, and 5 and 3 go on."""
    begun = {0: Begun(torch.tensor([5]), torch.tensor([-1.0]), ((engine.version, 1),))}
    ended = []

    async def answer(*groups: int, begun: Mapping[int, Begun], max_tokens: int = 4) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        prompt = torch.tensor([3, 4, 5])
        asked = [GroupRequest(group, (0,), prompt, params, group, begun) for group in groups]
        async for done in engine.generate(asked):
            ended.append(done.group)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer(0, 1, begun={}, max_tokens=40))
        await asyncio.sleep(0)
        await engine.pause()
        tasks.create_task(answer(5, begun=begun))
        tasks.create_task(answer(3, begun=begun))
        await asyncio.sleep(0.1)
        await engine.resume()
    return [group for group in ended if group]  # 0 may have begun before the others came


class RolloutContract(ABC):
    tokens = 8  # of an ordinary response
    # of one that is still being made when an ordinary one that was asked with it has ended
    long_tokens = 200
    atol = 1e-4  # between logprobs that differ by the rounding of another batch
    deadline = 60.0

    @abstractmethod
    async def build(self, version: int) -> RolloutEngine:
        """A new engine with the weights number 0 as ``version``."""

    @abstractmethod
    def weights(self, number: int) -> dict[str, torch.Tensor]:
        """The weights number 0, or others of the same layout that make other tokens."""

    def prompt(self, group: int) -> torch.Tensor:
        return torch.randint(
            3, 90, (5 + group % 7,), generator=torch.Generator().manual_seed(group)
        )

    def ask(
        self, group: int, places: Sequence[int] = (0, 1), seed: int | None = None, **params: Any
    ) -> GroupRequest:
        sampling = SamplingParams(**{"max_tokens": self.tokens, **params})
        return GroupRequest(
            group, tuple(places), self.prompt(group), sampling, group if seed is None else seed
        )

    @pytest.fixture
    async def engine(self) -> AsyncIterator[RolloutEngine]:
        built = await self.build(3)
        yield built
        await built.close()

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    async def made(self, engine: RolloutEngine, *requests: GroupRequest) -> Found:
        async with asyncio.timeout(self.deadline):
            return await collect(engine.generate(requests))

    async def load(self, engine: RolloutEngine, number: int) -> None:
        async with asyncio.timeout(self.deadline):
            times = await engine.load_weights(engine.version + 1, self.weights(number))
        assert times.exposed >= 0
        assert times.hidden >= 0

    def same(self, one: Completion, other: Completion) -> bool:
        return torch.equal(one.token_ids, other.token_ids) and torch.allclose(
            one.logprobs, other.logprobs, atol=self.atol
        )

    async def test_every_place_asked_for_comes_once_and_whole(self, engine: RolloutEngine) -> None:
        requests = [self.ask(0, (0, 1, 2)), self.ask(7, (3, 1)), self.ask(4, (5,), max_tokens=1)]
        found = await self.made(engine, *requests)
        assert set(found) == {(0, 0), (0, 1), (0, 2), (7, 3), (7, 1), (4, 5)}
        for (group, _), done in found.items():
            count = len(done.token_ids)
            assert 1 <= count <= next(r for r in requests if r.group == group).params.max_tokens
            assert (done.token_ids.dtype, done.logprobs.dtype) == (torch.int64, torch.float32)
            assert done.logprobs.shape == (count,)
            assert bool((done.logprobs <= 0).all())
            assert done.versions == ((engine.version, count),)
            assert done.finish_reason in ("stop", "length")

    async def test_a_response_depends_on_seed_and_place_and_not_on_its_company(
        self, engine: RolloutEngine
    ) -> None:
        alone = await self.made(engine, self.ask(1, (0,)))
        alone |= await self.made(engine, self.ask(1, (1,)))
        crowd = await self.made(engine, self.ask(2, (0, 1, 2)), self.ask(1), self.ask(3, (4,)))
        assert all(self.same(done, crowd[place]) for place, done in alone.items())
        assert not torch.equal(alone[1, 0].token_ids, alone[1, 1].token_ids)
        other = await self.made(engine, self.ask(1, (0,), seed=99))
        assert not torch.equal(alone[1, 0].token_ids, other[1, 0].token_ids)

    async def test_a_budget_cuts_a_response_and_what_is_begun_goes_on_to_the_same_end(
        self, engine: RolloutEngine
    ) -> None:
        whole = (await self.made(engine, self.ask(1, (0,), temperature=0.0)))[1, 0]
        request = self.ask(1, (0,), temperature=0.0, budget=3)
        visits = 1
        budget = 3
        done = (await self.made(engine, request))[1, 0]
        while done.finish_reason == "cut":
            assert len(done.token_ids) == len(done.logprobs) == visits * budget
            assert sum(count for _, count in done.versions) == visits * budget
            begun = Begun(done.token_ids, done.logprobs, done.versions)
            done = (await self.made(engine, replace(request, begun={0: begun})))[1, 0]
            visits += 1
        assert visits == -(-len(whole.token_ids) // budget) > 1
        assert done.finish_reason == whole.finish_reason
        assert self.same(done, whole)

    async def test_a_further_turn_follows_what_an_environment_has_added(
        self, engine: RolloutEngine
    ) -> None:
        """Its tokens are those of a new response to the same context, and ``max_tokens`` counts
        from the turn's beginning."""
        request = self.ask(1, (0,), temperature=0.0)
        turn = (await self.made(engine, request))[1, 0]
        observation = torch.tensor([11, 12, 13])
        tokens = torch.cat([turn.token_ids, observation])
        begun = Begun(
            tokens,
            torch.cat([turn.logprobs, torch.zeros(3)]),
            (*turn.versions, (OBSERVED, 3)),
            turn_start=len(tokens),
        )
        done = (await self.made(engine, replace(request, begun={0: begun})))[1, 0]
        count = len(done.token_ids) - len(tokens)
        assert 1 <= count <= self.tokens
        assert torch.equal(done.token_ids[: len(tokens)], tokens)
        assert not done.logprobs[len(turn.token_ids) : len(tokens)].any()
        assert done.versions == (*begun.versions, (engine.version, count))
        assert done.oldest_version == engine.version
        cut = replace(request, begun={0: begun}, params=replace(request.params, budget=1))
        first = (await self.made(engine, cut))[1, 0]
        assert len(first.token_ids) == len(tokens) + 1
        rest = Begun(first.token_ids, first.logprobs, first.versions, turn_start=len(tokens))
        again = (await self.made(engine, replace(request, begun={0: rest})))[1, 0]
        assert self.same(again, done)

    async def test_calls_in_flight_together_each_get_their_own(self, engine: RolloutEngine) -> None:
        streams = [
            engine.generate([self.ask(group), self.ask(group + 10, (2,))]) for group in range(3)
        ]
        async with asyncio.timeout(self.deadline):
            for group, found in enumerate(await asyncio.gather(*map(collect, streams))):
                assert set(found) == {(group, 0), (group, 1), (group + 10, 2)}

    async def test_a_response_is_yielded_when_it_ends_whatever_the_others_do(
        self, engine: RolloutEngine
    ) -> None:
        stream = engine.generate(
            [self.ask(0, (0,), max_tokens=self.long_tokens), self.ask(1, (0,), max_tokens=1)]
        )
        async with asyncio.timeout(self.deadline):
            assert (await anext(stream)).group == 1
            assert set(await collect(stream)) == {(0, 0)}

    async def test_an_abandoned_request_is_aborted_and_the_rest_goes_on(
        self, engine: RolloutEngine
    ) -> None:
        closed = engine.generate([self.ask(0, max_tokens=self.long_tokens)])
        consumer = asyncio.create_task(
            collect(engine.generate([self.ask(1, max_tokens=self.long_tokens)]))
        )
        kept = engine.generate([self.ask(2)])
        async with asyncio.timeout(self.deadline):
            await closed.aclose()  # type: ignore[attr-defined]
            await closed.aclose()  # type: ignore[attr-defined]
            await asyncio.sleep(0)  # the consumer has begun
            consumer.cancel()
            await asyncio.wait([consumer])
            assert consumer.cancelled()
            assert await collect(closed) == {}
            assert len(await collect(kept)) == 2
            await self.until(lambda: getattr(engine, "rows", 0) == 0)

    async def test_pause_holds_every_row_and_resume_goes_on_to_the_same_end(
        self, engine: RolloutEngine
    ) -> None:
        undisturbed = await self.made(engine, self.ask(1))
        await engine.pause()
        stream = engine.generate([self.ask(1)])
        first = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.wait([first], timeout=0.2)
        assert not first.done()
        await engine.resume()
        async with asyncio.timeout(self.deadline):
            done = await first
            found = await collect(stream) | {(done.group, done.place): done}
        assert all(self.same(done, found[place]) for place, done in undisturbed.items())

    async def test_new_weights_make_other_tokens_and_the_old_ones_the_same_again(
        self, engine: RolloutEngine
    ) -> None:
        before = await self.made(engine, self.ask(1))
        version = engine.version
        await self.load(engine, 1)
        assert engine.version == version + 1
        changed = await self.made(engine, self.ask(1))
        await self.load(engine, 0)
        back = await self.made(engine, self.ask(1))
        assert all(
            done.versions == ((version + 1, len(done.token_ids)),) for done in changed.values()
        )
        assert not any(self.same(done, changed[place]) for place, done in before.items())
        assert all(self.same(done, back[place]) for place, done in before.items())

    async def test_weights_that_are_held_make_no_token_before_resume(
        self, engine: RolloutEngine
    ) -> None:
        version = engine.version
        async with asyncio.timeout(self.deadline):
            await engine.load_weights(version + 1, self.weights(1), hold=True)
        stream = engine.generate([self.ask(1, (0,))])
        first = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.wait([first], timeout=0.2)
        assert not first.done()
        await engine.resume()
        async with asyncio.timeout(self.deadline):
            done = await first
        assert done.versions == ((version + 1, len(done.token_ids)),)
        await self.load(engine, 0)

    async def test_a_response_that_saw_a_swap_has_the_tokens_of_each_version(
        self, engine: RolloutEngine
    ) -> None:
        """The swap has to come between two of its tokens; on a slow machine it may come late, and
        is tried again."""
        until = time.monotonic() + self.deadline
        number = 0
        versions = ()
        while len(versions) < 2:
            assert time.monotonic() < until, "no swap came while a response was being made"
            old = engine.version
            number = 1 - number
            stream = engine.generate(
                [self.ask(0, (0,), max_tokens=self.long_tokens), self.ask(1, (0,), max_tokens=1)]
            )
            async with asyncio.timeout(self.deadline):
                await anext(stream)
                await self.load(engine, number)
                done = (await collect(stream))[0, 0]
            versions = done.versions
        assert [version for version, _ in versions] == [old, old + 1]
        assert all(count > 0 for _, count in versions)
        assert sum(count for _, count in versions) == len(done.token_ids) == len(done.logprobs)
        assert done.oldest_version == old
        if number:
            await self.load(engine, 0)

    async def test_a_swap_that_cuts_ends_what_it_meets_with_tokens_of_the_old_weights_alone(
        self, engine: RolloutEngine
    ) -> None:
        """The swap has to come between two tokens, and is tried again, as above.

        What was cut goes on with the new ones.
        """
        until = time.monotonic() + self.deadline
        number = 0
        request = self.ask(0, (0,), max_tokens=self.long_tokens)
        cut = None
        while cut is None or cut.finish_reason != "cut":
            assert time.monotonic() < until, "no swap came while a response was being made"
            old = engine.version
            number = 1 - number
            stream = engine.generate([request, self.ask(1, (0,), max_tokens=1)])
            async with asyncio.timeout(self.deadline):
                await anext(stream)
                await engine.load_weights(old + 1, self.weights(number), cut=True)
                cut = (await collect(stream))[0, 0]
        count = len(cut.token_ids)
        assert 0 < count == len(cut.logprobs) < self.long_tokens
        assert cut.versions == ((old, count),)
        begun = Begun(cut.token_ids, cut.logprobs, cut.versions)
        done = (await self.made(engine, replace(request, begun={0: begun})))[0, 0]
        assert torch.equal(done.token_ids[:count], cut.token_ids)
        assert torch.equal(done.logprobs[:count], cut.logprobs)
        assert done.versions == (*cut.versions, (old + 1, len(done.token_ids) - count))
        if number:
            await self.load(engine, 0)

    async def test_what_an_engine_cuts_is_continued(self, engine: RolloutEngine) -> None:
        """The cut has to come between two tokens, and is tried again, as above."""
        if not isinstance(engine, CuttingEngine):
            pytest.skip("it ends what is in flight before it leaves")
        until = time.monotonic() + self.deadline
        request = self.ask(0, (0,), max_tokens=self.long_tokens)
        cut = None
        while cut is None or cut.finish_reason != "cut":
            assert time.monotonic() < until, "no cut came while a response was being made"
            stream = engine.generate([request, self.ask(1, (0,), max_tokens=1)])
            async with asyncio.timeout(self.deadline):
                await anext(stream)
                await engine.cut()
                cut = (await collect(stream))[0, 0]
        count = len(cut.token_ids)
        assert 0 < count < self.long_tokens
        begun = Begun(cut.token_ids, cut.logprobs, cut.versions)
        done = (await self.made(engine, replace(request, begun={0: begun})))[0, 0]
        assert len(done.token_ids) > count
        assert torch.equal(done.token_ids[:count], cut.token_ids)

    async def test_a_swap_that_cuts_leaves_what_has_no_token_yet(
        self, engine: RolloutEngine
    ) -> None:
        await engine.pause()
        stream = engine.generate([self.ask(1, (0,))])
        async with asyncio.timeout(self.deadline):
            await engine.load_weights(engine.version + 1, self.weights(1), cut=True)
            await engine.resume()
            done = (await collect(stream))[1, 0]
        assert done.finish_reason != "cut"
        assert done.versions == ((engine.version, len(done.token_ids)),)
        await self.load(engine, 0)

    async def test_weights_loaded_while_it_is_paused_are_used_when_it_goes_on(
        self, engine: RolloutEngine
    ) -> None:
        await engine.pause()
        await self.load(engine, 1)
        stream = engine.generate([self.ask(1, (0,))])
        first = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.wait([first], timeout=0.2)
        assert not first.done()
        await engine.resume()
        async with asyncio.timeout(self.deadline):
            done = await first
        assert done.versions == ((engine.version, len(done.token_ids)),)
        await self.load(engine, 0)

    @pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
    async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
        self, engine: RolloutEngine, fault: str
    ) -> None:
        await self.load(engine, 0)
        before = await self.made(engine, self.ask(1, (0,)))
        version = engine.version
        offered = self.weights(1)
        name = sorted(offered)[0]
        if fault == "missing":
            del offered[name]
        elif fault == "unknown":
            name = "no.such.weight"
            offered[name] = torch.zeros(1)
        elif fault == "shape":
            offered[name] = torch.zeros(*offered[name].shape, 2, dtype=offered[name].dtype)
        else:
            offered[name] = offered[name].double()
        with pytest.raises(WeightMismatch, match=name.replace(".", r"\.")):
            await engine.load_weights(version + 1, offered)
        assert engine.version == version
        after = await self.made(engine, self.ask(1, (0,)))
        assert self.same(after[1, 0], before[1, 0])
        assert after[1, 0].versions == before[1, 0].versions

    async def test_a_request_that_cannot_be_served_is_refused_at_once(
        self, engine: RolloutEngine
    ) -> None:
        with pytest.raises(ValueError, match="max_tokens"):
            engine.generate([self.ask(0), self.ask(1, max_tokens=0)])
        assert len(await self.made(engine, self.ask(2))) == 2

    async def test_close_ends_what_is_in_flight_and_leaves_no_thread_and_no_process(self) -> None:
        threads = set(threading.enumerate())
        children = set(psutil.Process().children(recursive=True))
        engine = await self.build(0)
        stream = engine.generate([self.ask(0, max_tokens=self.long_tokens)])
        async with asyncio.timeout(self.deadline):
            await engine.close()
            await engine.close()
        with pytest.raises(EngineClosed):
            await collect(stream)
        with pytest.raises(EngineClosed):
            await collect(engine.generate([self.ask(0)]))
        with pytest.raises(EngineClosed):
            await engine.load_weights(1, self.weights(1))
        await self.until(lambda: not new_processes(children) and not new_threads(threads))

    async def until(self, condition: Any) -> None:
        end = time.monotonic() + self.deadline
        while not condition():
            assert time.monotonic() < end, "it did not come to be in time"
            await asyncio.sleep(0.01)


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads that have begun since, but for those of the loop's own pool, which the loop keeps for
    its callers."""
    return [
        t for t in threading.enumerate() if t not in before and not t.name.startswith("asyncio_")
    ]


def new_processes(before: set[psutil.Process]) -> list[psutil.Process]:
    """Children that have begun since, but for Python's tracker of shared memory, which lives as
    long as this process."""
    found = [child for child in psutil.Process().children(recursive=True) if child not in before]
    return [child for child in found if "resource_tracker" not in " ".join(child.cmdline())]


class ModelContract(RolloutContract):
    temperatures: Sequence[float] = (0.0, 0.7, 1.0, 1.4)
    stop_tokens = 24  # of the response in which stops are looked for

    @abstractmethod
    def teacher_forced(self, number: int, request: GroupRequest, done: Completion) -> torch.Tensor:
        """float32 [T]: the logprobs that a plain forward with the weights ``number`` gives the
        response's tokens, at the request's temperature (1 when it is greedy), before top-k and
        top-p."""

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, as the engine's own tokenizer has it."""

    @abstractmethod
    async def harm(self, engine: RolloutEngine) -> None:
        """Have the engine's compute fail while it generates."""

    async def test_logprobs_are_those_that_the_trainer_computes(
        self, engine: RolloutEngine
    ) -> None:
        requests = [
            self.ask(group, (0, 1), temperature=t) for group, t in enumerate(self.temperatures)
        ]
        await self._check_logprobs(engine, 0, requests)
        await self.load(engine, 1)
        await self._check_logprobs(engine, 1, requests)
        await self.load(engine, 0)

    async def test_logprobs_of_a_further_turn_are_those_that_the_trainer_computes(
        self, engine: RolloutEngine
    ) -> None:
        request = self.ask(1, (0,))
        turn = (await self.made(engine, request))[1, 0]
        tokens = torch.cat([turn.token_ids, torch.tensor([11, 12, 13])])
        logprobs = torch.cat([turn.logprobs, torch.zeros(3)])
        versions = (*turn.versions, (OBSERVED, 3))
        begun = Begun(tokens, logprobs, versions, turn_start=len(tokens))
        done = (await self.made(engine, replace(request, begun={0: begun})))[1, 0]
        expected = self.teacher_forced(0, request, done)[len(tokens) :]
        assert torch.allclose(done.logprobs[len(tokens) :], expected, atol=self.atol)

    async def test_scores_are_what_the_trainer_computes_also_while_weights_are_held(
        self, engine: RolloutEngine
    ) -> None:
        requests = [
            self.ask(group, (0,), temperature=t) for group, t in enumerate(self.temperatures)
        ]
        found = await self.made(engine, *requests)
        async with asyncio.timeout(self.deadline):
            for number in (0, 1, 0):
                if number != 0 or engine.version:
                    await engine.load_weights(engine.version + 1, self.weights(number), hold=True)
                compared = 0
                for (group, _), done in found.items():
                    asked = requests[group]
                    scores = await engine.score(
                        asked.prompt_ids, done.token_ids, temperature=asked.params.temperature
                    )
                    if scores is not None:
                        assert torch.allclose(
                            scores, self.teacher_forced(number, asked, done), atol=self.atol
                        )
                        compared += 1
                assert compared, "it must have scores at some temperature"
        await engine.resume()

    async def _check_logprobs(
        self, engine: RolloutEngine, number: int, requests: Sequence[GroupRequest]
    ) -> None:
        found = await self.made(engine, *requests)
        for (group, _), done in found.items():
            expected = self.teacher_forced(number, requests[group], done)
            assert torch.allclose(done.logprobs, expected, atol=self.atol), (
                number,
                requests[group].params,
            )

    async def test_greedy_takes_the_likeliest_token(self, engine: RolloutEngine) -> None:
        request = self.ask(0, (0, 1), temperature=0.0)
        found = await self.made(engine, request)
        assert self.same(found[0, 0], found[0, 1])
        sampled = await self.made(engine, self.ask(0, (0,), temperature=1.0))
        done = found[0, 0]
        assert float(self.teacher_forced(0, request, done)[0]) >= float(
            self.teacher_forced(0, request, sampled[0, 0])[0]
        )

    async def test_a_stream_has_each_token_before_its_completion_and_the_likeliest_others(
        self, engine: RolloutEngine
    ) -> None:
        assert isinstance(engine, StreamingEngine)
        temperatures = (0.0, 1.0)
        requests = [
            self.ask(group, temperature=t, max_tokens=9) for group, t in enumerate(temperatures)
        ]
        tokens = dict[tuple[int, int], list[Token]]()
        done = dict[tuple[int, int], Completion]()
        async with asyncio.timeout(self.deadline):
            async for item in engine.stream(requests, alternatives=3):
                assert (item.group, item.place) not in done
                if isinstance(item, Token):
                    tokens.setdefault((item.group, item.place), []).append(item)
                else:
                    done[item.group, item.place] = item
        assert done.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
        for key, whole in done.items():
            assert [replace(token, alternatives=()) for token in tokens[key]] == whole.tokens()
            for token in tokens[key]:
                names, logprobs = zip(*token.alternatives, strict=True)
                assert (len({*names}), list(logprobs)) == (3, sorted(logprobs, reverse=True))
                assert (
                    dict(token.alternatives).get(token.token_id, token.logprob)
                    == token.logprob
                    <= logprobs[0]
                )
            for name, logprob in tokens[key][0].alternatives:
                score = await engine.score(requests[key[0]].prompt_ids, torch.tensor([name]))
                assert score is not None
                assert float(score[0]) == pytest.approx(logprob, abs=self.atol)

    async def test_a_stop_token_ends_a_response_and_belongs_to_it(
        self, engine: RolloutEngine
    ) -> None:
        free = (await self.made(engine, self.ask(1, (0,), max_tokens=self.stop_tokens)))[
            1, 0
        ].token_ids.tolist()
        stop = free[self.stop_tokens // 2]
        request = self.ask(1, (0,), max_tokens=self.stop_tokens, stop_token_ids=(stop,))
        cut = (await self.made(engine, request))[1, 0]
        assert cut.token_ids.tolist() == free[: free.index(stop) + 1]
        assert cut.finish_reason == "stop"
        assert len(cut.logprobs) == len(cut.token_ids)

    @pytest.mark.parametrize("offset", [0, 1])
    async def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
        self, engine: RolloutEngine, offset: int
    ) -> None:
        """Also one that begins inside a token. Tokens stay as they were generated."""
        free = (await self.made(engine, self.ask(1, (0,), max_tokens=self.stop_tokens)))[
            1, 0
        ].token_ids.tolist()
        before = len(self.decode(free[: self.stop_tokens // 2])) + offset
        stop = self.decode(free)[before : before + 6]
        ends = next(n for n in range(1, len(free) + 1) if stop in self.decode(free[:n]))
        request = self.ask(1, (0,), max_tokens=self.stop_tokens, stop=("never there", stop))
        cut = (await self.made(engine, request))[1, 0]
        assert cut.token_ids.tolist() == free[:ends]
        assert cut.finish_reason == "stop"
        assert len(cut.logprobs) == len(cut.token_ids)

    async def test_a_failure_reaches_every_iterator(self) -> None:
        engine = await self.build(0)
        try:
            await self.made(engine, self.ask(0, (0,)))
            streams = [
                engine.generate([self.ask(group, max_tokens=self.long_tokens)])
                for group in range(3)
            ]
            await self.harm(engine)
            async with asyncio.timeout(self.deadline):
                for stream in streams:
                    with pytest.raises(EngineFailed):
                        await collect(stream)
                with pytest.raises(EngineFailed):
                    await collect(engine.generate([self.ask(4)]))
        finally:
            await engine.close()


class SleepContract(RolloutContract):
    """``sleeper`` is an engine as ``build`` makes it.

    Its weights are written into its own tensors while it sleeps.
    """

    @abstractmethod
    def fill(self, engine: ColocatedEngine, number: int) -> None:
        """Put the weights ``number`` into the engine's tensors, whose storages are empty."""

    @pytest.fixture
    async def sleeper(self) -> AsyncIterator[ColocatedEngine]:
        built = await self.build(3)
        yield built  # type: ignore[misc]
        await built.close()

    async def turn(self, engine: ColocatedEngine, number: int, *, hold: bool = False) -> None:
        """Somebody else has the device, then the engine has it again with the weights
        ``number``."""
        await engine.sleep()
        self.away(engine)
        self.fill(engine, number)
        await engine.wake(engine.version + 1, hold=hold)

    def away(self, engine: ColocatedEngine) -> None:
        assert engine.cache_bytes() == 0
        for tensor in engine.tensors.values():
            storage = tensor.untyped_storage()
            assert storage.nbytes() == tensor.nbytes, "of its own"
            storage.resize_(0)

    async def test_its_tensors_are_all_that_it_computes_with(
        self, sleeper: ColocatedEngine
    ) -> None:
        before = await self.made(sleeper, self.ask(1))
        version = sleeper.version
        assert sleeper.cache_bytes() > 0
        async with asyncio.timeout(self.deadline):
            await self.turn(sleeper, 1)
        assert sleeper.version == version + 1
        changed = await self.made(sleeper, self.ask(1))
        async with asyncio.timeout(self.deadline):
            await self.turn(sleeper, 0)
        back = await self.made(sleeper, self.ask(1))
        assert all(
            done.versions == ((version + 1, len(done.token_ids)),) for done in changed.values()
        )
        assert not any(self.same(done, changed[place]) for place, done in before.items())
        assert all(self.same(done, back[place]) for place, done in before.items())

    async def test_what_has_tokens_leaves_as_cut_and_goes_on_later_to_the_same_end(
        self, sleeper: ColocatedEngine
    ) -> None:
        request = self.ask(0, (0,), max_tokens=self.long_tokens, temperature=0.0)
        whole = (await self.made(sleeper, request))[0, 0]
        stream = sleeper.generate([request, self.ask(1, (0,), max_tokens=1)])
        async with asyncio.timeout(self.deadline):
            await anext(stream)  # type: ignore[arg-type]
            await self.turn(sleeper, 0)
            cut = (await collect(stream))[0, 0]
        assert cut.finish_reason == "cut"
        assert 0 < len(cut.token_ids) < len(whole.token_ids)
        begun = Begun(cut.token_ids, cut.logprobs, cut.versions)
        done = (await self.made(sleeper, replace(request, begun={0: begun})))[0, 0]
        assert self.same(done, whole)
        assert [version for version, _ in done.versions] == [3, 4]

    async def test_what_has_no_token_waits_and_so_does_what_is_asked_while_it_sleeps(
        self, sleeper: ColocatedEngine
    ) -> None:
        rows = 40  # more than it decodes at once
        stream = sleeper.generate([self.ask(0, tuple(range(rows)), max_tokens=self.long_tokens)])
        await sleeper.sleep()
        self.away(sleeper)
        later = sleeper.generate([self.ask(1, (0,))])
        first = asyncio.create_task(anext(later))  # type: ignore[arg-type]
        await asyncio.wait([first], timeout=0.2)
        assert not first.done()
        with pytest.raises(RuntimeError, match="sleeps"):
            await sleeper.score(self.prompt(0), self.prompt(1))
        with pytest.raises(RuntimeError, match="sleeps"):
            await sleeper.load_weights(9, self.weights(1))
        self.fill(sleeper, 1)
        async with asyncio.timeout(self.deadline):
            await sleeper.wake(7, hold=True)
            scores = await sleeper.score(self.prompt(0), self.prompt(1))
            assert scores is not None
            assert scores.isfinite().all()
            assert not first.done(), "held"
            await sleeper.resume()
            assert (await first).versions == ((7, len((await first).token_ids)),)
            found = await collect(stream)
        assert len(found) == rows
        waited = [done for done in found.values() if done.finish_reason != "cut"]
        assert waited
        assert all(done.versions == ((7, len(done.token_ids)),) for done in waited)

    async def test_it_may_be_closed_while_it_sleeps(self, sleeper: ColocatedEngine) -> None:
        await sleeper.sleep()
        self.away(sleeper)
        async with asyncio.timeout(self.deadline):
            await sleeper.close()
        with pytest.raises(EngineClosed):
            await sleeper.wake(4)
