"""The service of training calls, as its clients see it: order, failures, samplers, checkpoints."""

from __future__ import annotations

import asyncio
import itertools
import os
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from orchestration.calls.interface import Acknowledged, Busy, Done, Failed, Gone, NotThere
from stages.calls.interface import (
    AdamOptions,
    CallRefused,
    ModelOptions,
    PassOutput,
    SampleOutput,
    ServedBase,
)
from tests.orchestration.calls.services import SECONDS, Client, datum, prompt, small_service
from tests.orchestration.calls.small_engine import CALLS


def size_of(path: Path) -> int:
    return path.stat().st_size


async def read_until_gone(client: Client, request: Acknowledged) -> None:
    async with asyncio.timeout(SECONDS):
        while await client.result(request):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_steps_change_what_a_model_says_and_all_requests_may_wait_together(
    tmp_path: Path,
) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        before = await client.logprobs()
        requests = [await client.train(datum(1, 2)) for _ in range(20)]
        requests.append(await client.step(learning_rate=0.1))
        results = [await client.done(request) for request in requests]
        assert len(results) == 21
        assert await client.logprobs() != before


async def test_numbers_order_calls_that_arrive_in_another_order(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        straight = await Client.create(service)
        for token in (1, 2, 3):
            await straight.train(datum(token))
        await straight.step()
        mixed = await Client.create(service)
        acknowledged = [await mixed.step(seq=4)]
        for token in (3, 2, 1):
            acknowledged.append(await mixed.train(datum(token), seq=token))
        norms = [
            (await client.done(f"{client.model_id}:4"))["metrics"] for client in (straight, mixed)
        ]
        assert norms[0] == norms[1]
        assert await straight.logprobs() == await mixed.logprobs()


async def test_the_same_number_again_is_the_same_request(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        first = await client.train(datum(1), seq=1)
        step = await client.step(seq=2)
        await client.done(step)
        assert await client.train(datum(1), seq=1) == first
        assert await client.step(seq=2) == step
        with pytest.raises(CallRefused, match="number was another call's"):
            await client.train(datum(2), seq=1)
        ledger = await service.ledger("ann", client.model_id)
        assert ledger["steps"] == 1
        session = client.session_id
        again = await service.create_model("ann", session, 0, "small", ModelOptions(), {})
        assert again.model_id == client.model_id
        with pytest.raises(CallRefused, match="number was another call's"):
            await service.create_model("ann", session, 0, "small", ModelOptions(rank=8), {})


async def test_a_gap_holds_later_calls_for_a_time_and_then_costs_the_step(tmp_path: Path) -> None:
    async with small_service(tmp_path, gap_seconds=0.2) as service:
        client = await Client.create(service)
        before = await client.logprobs()
        second = await client.train(datum(1), seq=3)
        step = await client.step(seq=4)
        assert isinstance(await client.done(second), PassOutput)
        message = await client.failure(step)
        assert "call 2 has not come" in message
        assert "send the data again" in message
        late = await client.train(datum(1), seq=2)
        with pytest.raises(Gone):
            await client.result(late)
        assert await client.logprobs() == before
        await client.train(datum(1))
        await client.done(await client.step())


async def test_a_call_that_fills_the_gap_in_time_is_served_first(tmp_path: Path) -> None:
    async with small_service(tmp_path, gap_seconds=SECONDS) as service:
        client = await Client.create(service)
        step = await client.step(seq=2)
        assert await service.result("ann", step.request_id, 0.0) is None
        await client.train(datum(1), seq=1)
        await client.done(step)


async def test_after_a_failed_pass_the_step_fails_and_the_next_one_does_not(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        twin = await Client.create(service)
        good = await client.train(datum(5))
        bad = await client.train(datum(5), loss="nonsense")
        step = await client.step()
        again = await client.train(datum(7))
        last = await client.step()
        await client.done(good)
        assert "nonsense" in await client.failure(bad)
        assert "call 2, forward_backward, has failed" in await client.failure(step)
        await client.done(again)
        await client.done(last)
        await twin.train(datum(7))
        await twin.step()
        assert await client.logprobs() == await twin.logprobs()  # the dropped window left nothing


async def test_a_loss_that_is_not_finite_is_the_clients_failure(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        data = datum(1)
        data = type(data)(data.tokens, {"weights": np.array([np.nan], np.float32)})
        result = await client.result(await client.train(data))
        assert isinstance(result, Failed)
        assert result.by_client
        assert "not finite" in result.message


async def test_what_the_api_refuses_keeps_its_place_and_costs_the_step(tmp_path: Path) -> None:
    async with small_service(tmp_path, gap_seconds=SECONDS) as service:
        client = await Client.create(service)
        refused = await service.refuse(
            "ann", client.model_id, 1, "forward_backward", "data.0: an image is not taken"
        )
        step = await client.step(seq=2)
        assert "an image" in await client.failure(refused)
        assert "call 1, forward_backward, has failed" in await client.failure(step)


async def test_a_call_that_nobody_has_foreseen_fails_alone(tmp_path: Path) -> None:
    nameless: Any = b"no text"
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        with capture_logs():
            odd = await client.result(await client.train(datum(1, sampled=((nameless, 0, 1),))))
        assert isinstance(odd, Failed)
        assert not odd.by_client
        assert isinstance(await client.result(await client.step()), Failed)
        await client.result(await client.train(datum(1)))
        assert isinstance(await client.result(await client.step()), Done)


async def test_a_call_that_is_too_large_fails_and_says_what_to_do(tmp_path: Path) -> None:
    async with small_service(tmp_path, call_bytes=1000) as service:
        client = await Client.create(service)
        message = await client.failure(await client.train(datum(*range(1000))))
        assert "at most 1000 are taken; send its data in several calls" in message


async def test_a_model_that_cannot_be_created_says_so_to_each_call(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        session = await service.open_session("ann", tags=[], metadata={})
        created = await service.create_model(
            "ann", session, 0, "small", ModelOptions(rank=9999), {}
        )
        client = Client(service, session, 0, "ann")
        assert "rank 9999: at most 512" in await client.failure(created)
        assert "rank 9999" in await client.failure(await client.step())
        assert (await service.model("ann", client.model_id)).failed
        with pytest.raises(CallRefused, match="'other' is not served; there are small"):
            await service.create_model("ann", session, 1, "other", ModelOptions(), {})


async def test_a_snapshot_does_not_change_and_an_inflight_sampler_follows(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        frozen = (await client.done(await client.snapshot(0)))["sampling_session_id"]
        following = (await client.done(await client.snapshot(1, inflight=True)))[
            "sampling_session_id"
        ]
        first = await client.sampled(frozen, 0)
        await client.train(datum(1))
        await client.step(learning_rate=1.0)
        await client.done(await client.snapshot(2, inflight=True))
        later = await client.sampled(frozen, 1)
        assert later.sequences[0].tokens.tolist() == first.sequences[0].tokens.tolist()
        assert later.sequences[0].versions == ((0, 8),)
        followed = await client.sampled(following, 0)
        assert followed.sequences[0].tokens.tolist() != first.sequences[0].tokens.tolist()
        assert followed.sequences[0].versions == ((1, 8),)
        assert (await service.sampler("ann", frozen)).base == "small"


async def test_a_sample_has_an_id_for_each_response_and_is_made_once(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        session = await service.open_session("ann", tags=[], metadata={})
        sampler = await service.open_sampler("ann", session, 0, base="small", path=None)
        request = type(prompt())(prompt().prompt, prompt().options, count=3)
        asked = await service.sample("ann", sampler.sampler_id, 10**18, request)
        assert len(set(asked.sequence_ids)) == 3
        assert await service.sample("ann", sampler.sampler_id, 10**18, request) == asked
        result = await service.result("ann", asked.request_id, SECONDS)
        assert isinstance(result, Done)
        assert isinstance(result.value, SampleOutput)
        assert len(result.value.sequences) == 3


async def test_one_wait_tells_which_samples_have_answers(tmp_path: Path) -> None:
    """Of one clone of a sampler; and a client that goes on with the next server misses none."""
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        session = client.session_id
        sampler = (
            await service.open_sampler("ann", session, 0, base="small", path=None)
        ).sampler_id
        for seq, hundredths in ((0, 0), (1, 20), (10**9 + 5, 0)):
            await service.sample("ann", sampler, seq, prompt(hundredths=hundredths))

        async def answered(
            clone: int, after: int, seconds: float = SECONDS
        ) -> tuple[list[str], int]:
            completions, cursor = await service.completions("ann", sampler, clone, after, seconds)
            assert all(each.succeeded and each.bytes > 0 for each in completions)
            return [each.request_id for each in completions], cursor

        first, cursor = await answered(0, 0)
        assert first == [f"{sampler}:0"]
        second, last = await answered(0, cursor)
        assert second == [f"{sampler}:1"]
        assert last > cursor
        assert await answered(0, last, 0.0) == ([], last)
        assert (await answered(1, 0))[0] == [f"{sampler}:{10**9 + 5}"]
        assert await answered(2, 7, 0.0) == ([], 7)
        ahead = 10**17  # of a server whose clock was wrong
        assert (await answered(0, ahead, 0.0))[0] == [*first, *second]
        with pytest.raises(NotThere):
            await service.completions("bob", sampler, 0, 0, 0.0)
    async with small_service(tmp_path) as service:
        assert (await answered(0, last))[0] == [*first, *second]


async def test_a_long_sample_and_training_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        sampler = (await client.done(await client.snapshot(0)))["sampling_session_id"]
        long = await service.sample("ann", sampler, 0, prompt(hundredths=10**6))
        await client.train(datum(1))
        await client.done(await client.step())
        assert len((await client.sampled(sampler, 1)).sequences) == 1
        assert await service.result("ann", long.request_id, 0.0) is None


async def test_staleness_of_sampled_data_is_in_the_metrics_and_in_the_ledger(
    tmp_path: Path,
) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        sampler = (await client.done(await client.snapshot(0)))["sampling_session_id"]
        asked = await service.sample("ann", sampler, 0, prompt())
        await client.done(asked)
        for _ in range(2):
            await client.train(datum(1))
            await client.step()
        newer = (await client.done(await client.snapshot(1)))["sampling_session_id"]
        fresh = await service.sample("ann", newer, 0, prompt())
        await client.done(fresh)
        other = await Client.create(service, number=1)
        spans = [((asked.sequence_ids[0], 0, 2),), ((fresh.sequence_ids[0], 0, 2),)]
        unknown = ("nobody:sample:0:0:0", 0, 2)
        data = [datum(1, 2, sampled=sampled) for sampled in (*spans, (unknown,), ())]
        output = await client.done(await client.train(*data))
        assert output.metrics["staleness:mean"] == 1.0
        assert output.metrics["staleness:max"] == 2.0
        ledger = await service.ledger("ann", client.model_id)
        assert ledger["staleness"] == {"data": 2, "sum": 2, "max": 2}
        assert ledger["sampled"] == {
            "sequences": 2,
            "tokens": 16,
            "versions": {"0": 8, "2": 8},
        }
        elsewhere = await other.done(await other.train(data[0]))
        assert "staleness:mean" not in elsewhere.metrics  # another model has sampled it
        stranger = await Client.create(service, owner="bob")
        foreign = await stranger.done(await stranger.train(data[0]))
        assert "staleness:mean" not in foreign.metrics


async def test_checkpoints_are_listed_loaded_archived_expired_and_deleted(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service, seed=3)
        await client.train(datum(1))
        await client.step()
        saved = await client.save("first", metadata={"note": "x"})
        path = (await client.done(saved))["path"]
        assert path == f"tinker://{client.model_id}/weights/first"
        state = await client.logprobs()
        await client.train(datum(9))
        await client.step(learning_rate=1.0)
        assert await client.logprobs() != state
        assert "exists; give another name, or overwrite it" in await client.failure(
            await client.save("first")
        )
        await client.done(await client.load(path))
        assert await client.logprobs() == state
        info = await service.checkpoint("ann", path)
        assert (info.kind, info.metadata, info.options.seed) == ("weights", {"note": "x"}, 3)
        with tarfile.open(await service.archive("ann", path)) as tar:
            assert "first/weights.npy" in tar.getnames()
        await client.train(datum(2))
        await client.step()
        await client.done(await client.save("first", overwrite=True))
        assert await service.checkpoints("ann", client.model_id) != [info]
        await service.expire_checkpoint("ann", path, 3600.0)
        assert (await service.checkpoint("ann", path)).expires is not None
        await service.expire_checkpoint("ann", path, -1.0)
        assert await service.checkpoints("ann") == []
        with pytest.raises(NotThere):
            await service.checkpoint("ann", path)
        second = (await client.done(await client.save("second")))["path"]
        await service.delete_checkpoint("ann", second)
        with pytest.raises(NotThere):
            await service.checkpoint("ann", second)


async def test_a_copy_of_a_checkpoint_stays_when_the_checkpoint_goes(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        await client.train(datum(1))
        await client.done(await client.step(learning_rate=0.1))
        kept = await client.logprobs()
        path = (await client.done(await client.save("a", metadata={"of": "x"})))["path"]
        options: dict[str, Any] = {"number": 0, "ttl": None}
        copied = await service.copy_checkpoint("ann", path, session_id=None, key="k", **options)
        again = await service.copy_checkpoint("ann", path, session_id=None, key="k", **options)
        other = await service.copy_checkpoint("ann", path, session_id=None, key="", **options)
        own = await service.copy_checkpoint(
            "ann", path, session_id=client.session_id, number=5, ttl=3600.0, key="k"
        )
        assert own.model_id == f"{client.session_id}:train:5"
        assert own.expires is not None
        assert again == copied
        assert len({path, copied.path, other.path, own.path}) == 4
        assert (copied.kind, copied.name, copied.metadata) == ("weights", "a", {"of": "x"})
        assert (await service.checkpoint("ann", path)).path == path, "it has its own document"
        with pytest.raises(NotThere):
            await service.copy_checkpoint("bob", path, session_id=None, key="k", **options)
        with pytest.raises(CallRefused, match="is another model's"):
            await service.copy_checkpoint(
                "ann", path, session_id=client.session_id, key="", **options
            )
        copy = Client(service, client.session_id, 5, "ann")
        with pytest.raises(CallRefused, match="is not trained; create a model from that"):
            await copy.train(datum(1))
        await service.delete_checkpoint("ann", path)
    async with small_service(tmp_path) as service:
        assert copied.model_id in [each.model_id for each in await service.models("ann")]
        begun = Client(service, client.session_id, 6, "ann")
        created = await service.create_model_from(
            "ann", client.session_id, 6, copied.path, optimizer=True, metadata={}
        )
        await begun.done(created)
        assert await begun.logprobs() == kept


async def test_a_model_begins_with_a_checkpoint_with_or_without_its_optimizer(
    tmp_path: Path,
) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        for _ in range(2):
            await client.train(datum(1))
            await client.step()
        path = (await client.done(await client.save("a")))["path"]
        clients = []
        for number, optimizer in ((1, True), (2, False)):
            created = await service.create_model_from(
                "ann", client.session_id, number, path, optimizer=optimizer, metadata={}
            )
            clients.append(Client(service, client.session_id, number, "ann"))
            assert (await clients[-1].done(created))["model_id"] == created.model_id
        await service.delete_checkpoint("ann", path)  # they do not need it any more
        said = []
        for each in (client, *clients):
            await each.train(datum(1))
            await each.step()
            said.append(await each.logprobs())
        assert said[1] == said[0]
        assert said[2] != said[0]


async def test_a_checkpoint_of_another_base_is_refused(tmp_path: Path) -> None:
    bases = [ServedBase(name, name, 1000, name) for name in ("small", "other")]
    async with small_service(tmp_path, bases=bases) as service:
        client = await Client.create(service)
        path = (await client.done(await client.save("a")))["path"]
        other = await Client.create(service, base="other")
        message = await other.failure(await other.load(path))
        assert "is of 'small', the model of 'other'" in message


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a" * 129, "ä", "a\n", "a b"])
async def test_names_of_checkpoints_have_no_tricks(tmp_path: Path, name: str) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        message = await client.failure(await client.save(name))
        assert "give 1 to 128 of the characters" in message


async def test_another_owners_things_are_not_there(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        sampler = (await client.done(await client.snapshot(0)))["sampling_session_id"]
        path = (await client.done(await client.save("a")))["path"]
        sample = await service.sample("ann", sampler, 0, prompt())
        session, model = client.session_id, client.model_id
        stranger = Client(service, session, 0, "bob")
        own = await service.open_session("bob", tags=[], metadata={})
        attempts = [
            service.heartbeat("bob", session),
            service.session("bob", session),
            service.finish_session("bob", session, "success"),
            service.create_model("bob", session, 1, "small", ModelOptions(), {}),
            service.create_model_from("bob", own, 0, path, optimizer=True, metadata={}),
            service.model("bob", model),
            service.optim_step("bob", model, 9, AdamOptions()),
            service.unload_model("bob", model),
            service.ledger("bob", model),
            service.steps("bob", model, 0),
            service.sampler("bob", sampler),
            service.sample("bob", sampler, 1, prompt()),
            service.open_sampler("bob", own, 0, base="small", path=path),
            service.result("bob", sample.request_id, 0.0),
            service.result("bob", f"{model}:1", 0.0),
            service.result("bob", f"{model}:unload", 0.0),
            service.checkpoint("bob", path),
            service.delete_checkpoint("bob", path),
            service.expire_checkpoint("bob", path, 1.0),
            service.archive("bob", path),
        ]
        for attempt in attempts:
            with pytest.raises(NotThere):
                await attempt
        assert await service.sessions("bob") == [own]
        assert await service.models("bob") == []
        assert await service.checkpoints("bob") == []
        thief = await Client.create(service, owner="bob", session_id=own, number=1)
        assert "is not there" in await thief.failure(await thief.load(path))
        with pytest.raises(NotThere):
            await stranger.train(datum(1))
        await client.done(sample)


@pytest.mark.parametrize(
    "request_id",
    ["", ":", "x", "a:train:0:1", "../..:train:0:1", "SESSION", "SESSION:train:0", "SESSION:train:0:x",
     "SESSION:train:00:0", "SESSION:train:0:-1", "SESSION:train:99999999999999:0", "SESSION:other:0:0"],
)  # fmt: skip
async def test_ids_that_nobody_has_given_are_not_there(tmp_path: Path, request_id: str) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        with pytest.raises(NotThere):
            await service.result("ann", request_id.replace("SESSION", client.session_id), 0.0)


async def test_limits_of_an_owner_are_said_and_do_not_reach_others(tmp_path: Path) -> None:
    async with small_service(
        tmp_path, owner_sessions=2, owner_models=1, waiting_requests=2, gap_seconds=SECONDS
    ) as service:
        client = await Client.create(service)
        other = await Client.create(service, owner="bob")
        await service.open_session("ann", tags=[], metadata={})
        with pytest.raises(Busy, match="2 sessions are open, at most 2"):
            await service.open_session("ann", tags=[], metadata={})
        with pytest.raises(Busy, match="1 models are there, at most 1"):
            await Client.create(service, session_id=client.session_id, number=1)
        await client.train(datum(1), seq=2)
        await client.train(datum(1), seq=3)
        with pytest.raises(Busy, match="2 requests wait, at most 2") as busy:
            await client.train(datum(1), seq=4)
        assert busy.value.seconds > 0
        await other.done(await other.train(datum(1)))
        first = await client.train(datum(1), seq=1)  # the others wait for it
        await client.done(first)
        await client.done(f"{client.model_id}:3")
        await client.done(await client.train(datum(1), seq=4))


async def test_requests_that_are_not_forgotten_are_bounded(tmp_path: Path) -> None:
    async with small_service(tmp_path, owner_requests=4) as service:
        client = await Client.create(service)
        for _ in range(3):
            await client.done(await client.train(datum(1)))
        with pytest.raises(Busy, match="4 requests are not forgotten yet, at most 4"):
            await client.train(datum(1))
        await Client.create(service, owner="bob")
    async with small_service(tmp_path, owner_requests=4) as service:
        client.service = service
        with pytest.raises(Busy, match="4 requests"):
            await client.train(datum(1), seq=4)
    limits: dict[str, Any] = {
        "owner_requests": 4,
        "answer_seconds": 0.0,
        "state_steps": 1,
        "silent_seconds": 0.2,
    }
    async with small_service(tmp_path, **limits) as service:
        for seq_id in range(4):
            client.service = service
            await client.done(f"{client.model_id}:{seq_id}")
        await service.finish_session("ann", client.session_id, "")
        async with asyncio.timeout(SECONDS):
            while True:
                with suppress(Busy):
                    await Client.create(service)
                    break
                await asyncio.sleep(0.05)


async def test_waiting_bytes_of_an_owner_are_bounded(tmp_path: Path) -> None:
    async with small_service(tmp_path, waiting_bytes=30_000, gap_seconds=SECONDS) as service:
        client = await Client.create(service)
        await client.train(datum(*range(1000)), seq=2)
        await client.train(datum(*range(1000)), seq=3)
        with pytest.raises(Busy, match="at most 30000"):
            await client.train(datum(*range(1000)), seq=4)


async def test_answers_are_kept_a_while_after_they_were_read(tmp_path: Path) -> None:
    async with small_service(tmp_path, state_steps=1, answer_seconds=0.0) as service:
        client = await Client.create(service)
        read = await client.train(datum(1))
        unread = await client.step()
        await client.done(read)
        await client.done(read)
        for _ in range(2):  # a state is saved, and the records before it are removed
            await client.train(datum(1))
            await client.done(await client.step())
        await client.logprobs()
        with pytest.raises(Gone, match="forgotten"):
            await client.result(read)
        await client.done(unread)
        assert await client.train(datum(1), seq=1) == read  # a resend is not made again
        assert (await service.ledger("ann", client.model_id))["steps"] == 3


async def test_samples_are_forgotten_and_the_versions_of_their_tokens_are_not(
    tmp_path: Path,
) -> None:
    async with small_service(tmp_path, silent_seconds=0.1, answer_seconds=0.0) as service:
        client = await Client.create(service)
        sampler = (await client.done(await client.snapshot(0)))["sampling_session_id"]
        asked = [await service.sample("ann", sampler, seq, prompt()) for seq in range(300)]
        for each in asked:
            await client.done(each)
        with pytest.raises(Gone):
            await read_until_gone(client, asked[0])
        data = [datum(1, 2, sampled=((each.sequence_ids[0], 0, 2),)) for each in asked]
        await client.done(await client.train(*data[:10]))
    async with small_service(tmp_path) as service:
        client = Client(service, client.session_id, 0, "ann")
        output = await client.done(await client.train(*data, seq=3))
        assert output.metrics["staleness:max"] == 0.0
        ledger = await service.ledger("ann", client.model_id)
        assert ledger["staleness"]["data"] == 310
        assert ledger["sampled"]["sequences"] == 300


async def test_of_many_snapshots_the_unused_ones_are_removed(tmp_path: Path) -> None:
    async with small_service(tmp_path, kept_snapshots=2, snapshot_seconds=0.0) as service:
        client = await Client.create(service)
        samplers = [
            (await client.done(await client.snapshot(number)))["sampling_session_id"]
            for number in range(4)
        ]
        folder = tmp_path / "sessions" / client.session_id / "samplers"
        assert sorted(os.listdir(folder)) == ["2", "3"]
    async with small_service(tmp_path) as service:
        client = Client(service, client.session_id, 0, "ann")
        for number, sampler in enumerate(samplers):
            if number < 2:
                with pytest.raises(NotThere):
                    await client.sampled(sampler, 0)
            else:
                await client.sampled(sampler, 0)


async def test_a_journal_is_shortened_with_each_state(tmp_path: Path) -> None:
    async with small_service(tmp_path, state_steps=4, answer_seconds=0.0) as service:
        client = await Client.create(service)
        folder = tmp_path / "sessions" / client.session_id / "train.0"
        sizes = []
        for _ in range(6):
            for _ in range(4):
                await client.done(await client.train(datum(*range(2000))))
                await client.done(await client.step())
            await client.logprobs()
            sizes.append(size_of(folder / "journal"))
        assert max(sizes) < 8000, "less than half a pass: of the steps some figures stay"
        assert sum(name.startswith("state") for name in os.listdir(folder)) == 1


async def test_more_models_than_are_loaded_take_turns_and_keep_their_bits(tmp_path: Path) -> None:
    async def train(client: Client) -> list[float]:
        for token in range(5):
            await client.train(datum(token))
            await client.done(await client.step())
        await client.train(datum(77))  # gradients that are not used yet
        return await client.logprobs()

    async with small_service(tmp_path / "alone") as service:
        alone = [await train(await Client.create(service, seed=seed)) for seed in range(5)]
    async with small_service(tmp_path / "together", loaded_models=2) as service:
        clients = [await Client.create(service, seed=seed) for seed in range(5)]
        assert await asyncio.gather(*map(train, clients)) == alone
        norms = [await client.done(await client.step()) for client in clients]
    assert len({str(norm) for norm in norms}) == 1  # of the same tokens


async def test_models_that_are_unloaded_or_silent_come_back_as_they_were(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        await client.train(datum(1))
        await client.done(await client.step())
        before = await client.logprobs()
        unloaded = await service.unload_model("ann", client.model_id)
        assert await client.done(unloaded) == {"model_id": client.model_id}
        assert await client.logprobs() == before


async def test_models_may_be_created_while_others_are_swept(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with small_service(tmp_path, silent_seconds=0.001) as service:
            first = await Client.create(service)
            for number in range(1, 20):
                await first.train(datum(1))
                await Client.create(service, session_id=first.session_id, number=number)
    assert not [entry for entry in logs if entry["log_level"] == "error"], logs


async def test_a_finished_session_takes_no_calls_and_its_checkpoints_stay(tmp_path: Path) -> None:
    async with small_service(tmp_path, silent_seconds=0.1) as service:
        client = await Client.create(service)
        await client.train(datum(1))
        await client.step()
        await client.done(await client.snapshot(0))
        saved = await client.save("a")
        path = (await client.done(saved))["path"]
        await service.finish_session("ann", client.session_id, "success")
        await service.finish_session("ann", client.session_id, "success")
        with pytest.raises(NotThere, match="is finished; open another one"):
            await client.step()
        with pytest.raises(NotThere):
            await service.heartbeat("ann", client.session_id)
        assert (await client.done(saved))["path"] == path
        session = await service.open_session("ann", tags=[], metadata={})
        created = await service.create_model_from(
            "ann", session, 0, path, optimizer=True, metadata={}
        )
        await Client(service, session, 0, "ann").done(created)
        folder = tmp_path / "sessions" / client.session_id
        assert "samplers" not in os.listdir(folder)
        async with asyncio.timeout(SECONDS):
            while os.listdir(folder / "train.0") != ["journal"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # its state is removed in time
        assert (await client.done(saved))["path"] == path


async def test_of_finished_sessions_the_newest_are_kept(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"silent_seconds": 0.1, "answer_seconds": 0.0}
    async with small_service(tmp_path, finished_sessions=1, **limits) as service:
        clients = [await Client.create(service) for _ in range(3)]
        for client in clients:
            path = (await client.done(await client.save("a")))["path"]
            await client.logprobs()
        unread = await clients[0].train(datum(1))
        for client in clients:
            await service.finish_session("ann", client.session_id, "success")
        kept = [clients[0].session_id, clients[2].session_id]
        async with asyncio.timeout(SECONDS):
            while await service.sessions("ann") != kept:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert sorted(os.listdir(tmp_path / "sessions")) == sorted(kept)
        await clients[0].done(unread)
        async with asyncio.timeout(SECONDS):
            while await service.sessions("ann") != kept[1:]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await service.checkpoint("ann", path)).name == "a"
        assert len(await service.checkpoints("ann")) == 3
    async with small_service(tmp_path) as service:
        assert await service.sessions("ann") == kept[1:]


async def test_a_flood_of_an_owner_delays_each_call_of_another_by_one_call_at_most(
    tmp_path: Path,
) -> None:
    async with small_service(tmp_path) as service:
        flood = [await Client.create(service, owner="flood", seed=seed) for seed in range(1, 5)]
        mine = await Client.create(service, owner="ann", seed=99)
        waiting = [await client.train(datum(1)) for _ in range(40) for client in flood]
        requests = await asyncio.gather(*(mine.train(datum(1)) for _ in range(10)))
        for request in requests:
            await mine.done(request)
        for request in waiting:
            await flood[0].service.result("flood", request.request_id, SECONDS)
    calls = (tmp_path / CALLS).read_text().split()
    places = [place for place, seed in enumerate(calls) if seed == "99"]
    between = [later - earlier - 1 for earlier, later in itertools.pairwise(places)]
    assert len(places) == 10
    assert max(between) <= 1
    assert len(calls) == 170


async def test_clients_side_by_side_get_the_bits_that_each_gets_alone(tmp_path: Path) -> None:
    async def train(client: Client, tokens: int) -> list[float]:
        said = list[float]()
        for token in range(20):
            await client.train(datum(token, tokens))
            await client.step()
            said += await client.logprobs()
        return said

    async with small_service(tmp_path / "alone") as service:
        alone = [await train(await Client.create(service, seed=seed), seed) for seed in (1, 2)]
    async with small_service(tmp_path / "together") as service:
        first = await Client.create(service, owner="ann", seed=1)
        second = await Client.create(service, owner="bob", seed=2)
        assert await asyncio.gather(train(first, 1), train(second, 2)) == alone


async def test_a_silent_sessions_models_are_unloaded_and_come_back(tmp_path: Path) -> None:
    async with small_service(tmp_path, silent_seconds=0.1) as service:
        client = await Client.create(service)
        await client.train(datum(1))
        await client.done(await client.step())
        before = await client.logprobs()
        folder = tmp_path / "sessions" / client.session_id / "train.0"
        async with asyncio.timeout(SECONDS):
            while not any(name.startswith("state") for name in os.listdir(folder)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # its state is saved when it is unloaded
        assert await client.logprobs() == before
        await service.heartbeat("ann", client.session_id)
