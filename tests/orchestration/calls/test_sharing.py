"""What clients share: public checkpoints, numbers of a sampler's copies, and losses of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestration.calls.interface import NotThere
from stages.calls.custom import GRAPH
from stages.calls.interface import CallRefused
from tests.orchestration.calls.services import Client, datum, prompt, small_service

LOSS: dict[str, Any] = {
    "inputs": [{"name": "logprobs", "rank": 1}, {"name": "mask", "rank": 1}],
    "nodes": [
        {"op": "placeholder", "name": "p", "target": "logprobs", "args": [], "kwargs": {}},
        {"op": "output", "name": "output", "target": "output", "args": [], "kwargs": {}},
    ],
}


async def test_a_public_checkpoint_is_read_by_all_and_changed_by_its_owner(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        ann = await Client.create(service, seed=3)
        await ann.train(datum(1))
        await ann.done(await ann.step(learning_rate=0.1))
        path = (await ann.done(await ann.save("a")))["path"]
        session = await service.open_session("bob", tags=[], metadata={})
        bob = Client(service, session, 0, "bob")

        def begin(number: int) -> Any:
            return service.create_model_from(
                "bob", session, number, path, optimizer=True, metadata={}
            )

        with pytest.raises(NotThere):
            await begin(0)
        await service.publish_checkpoint("ann", path, public=True)
    async with small_service(tmp_path) as service:  # it is recorded
        bob.service = ann.service = service
        await bob.done(await begin(0))
        assert await bob.logprobs() == await ann.logprobs()
        assert (await service.checkpoint("bob", path)).public
        assert await service.checkpoints("bob") == [], "it is not one of his"
        sampler = await service.open_sampler("bob", session, 0, base=None, path=path)
        asked = await service.sample("bob", sampler.sampler_id, 0, prompt(max_tokens=2))
        assert (await bob.done(asked)).sequences[0].versions == ((1, 2),)
        options: dict[str, Any] = {"session_id": None, "number": 0, "ttl": None, "key": ""}
        copied = await service.copy_checkpoint("bob", path, **options)
        assert not copied.public
        assert [each.path for each in await service.checkpoints("bob")] == [copied.path]
        assert (await service.archive("bob", path)).endswith(".tar")
        for change in (
            service.publish_checkpoint("bob", path, public=False),
            service.expire_checkpoint("bob", path, 1.0),
            service.delete_checkpoint("bob", path),
        ):
            with pytest.raises(NotThere, match="is another owner's; copy it"):
                await change
        with pytest.raises(NotThere):
            await service.checkpoint("ann", copied.path)
        await service.publish_checkpoint("ann", path, public=False)
        with pytest.raises(NotThere):
            await begin(1)
        await bob.done(await bob.load(copied.path))


async def test_a_model_begins_with_its_checkpoints_base_alone(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        path = (await client.done(await client.save("a")))["path"]
        options: dict[str, Any] = {"optimizer": False, "metadata": {}}
        for number, base in ((1, None), (2, "small")):
            created = await service.create_model_from(
                "ann", client.session_id, number, path, base=base, **options
            )
            await client.done(created)
        with pytest.raises(CallRefused, match='base_model = "larger": is not that of'):
            await service.create_model_from(
                "ann", client.session_id, 3, path, base="larger", **options
            )


async def test_copies_of_a_sampler_have_numbers_of_their_own(tmp_path: Path) -> None:
    """Also after a restart, and after the journal was written again."""
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        for number in (0, 1):
            await service.open_sampler("ann", client.session_id, number, base="small", path=None)
        first, second = (f"{client.session_id}:sample:{number}" for number in (0, 1))
        joined = await asyncio.gather(*(service.join_sampler("ann", first) for _ in range(5)))
        assert sorted(joined) == [1, 2, 3, 4, 5]
        assert await service.join_sampler("ann", second) == 1
        with pytest.raises(NotThere):
            await service.join_sampler("bob", first)
    async with small_service(tmp_path) as service:
        assert await service.join_sampler("ann", first) == 6
        session, _ = service._sessions.sampler("ann", first)
        await session._journal.rewrite(session._live)
    async with small_service(tmp_path) as service:
        assert await service.join_sampler("ann", first) == 7
        assert await service.join_sampler("ann", second) == 2


async def test_a_loss_is_kept_and_goes_with_each_call_that_names_it(tmp_path: Path) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        created = await service.create_loss("ann", client.session_id, 0, LOSS)
        again = await service.create_loss("ann", client.session_id, 0, LOSS)
        assert created == again
        loss_id = (await client.done(created))["loss_id"]
        other = {**LOSS, "inputs": LOSS["inputs"][:1]}
        with pytest.raises(CallRefused, match="custom_loss_seq_id 0 is another loss's"):
            await service.create_loss("ann", client.session_id, 0, other)
        with pytest.raises(NotThere):
            await service.create_loss("bob", client.session_id, 1, LOSS)
        long = [{**node, "name": "n" * 40_000} for node in LOSS["nodes"]]
        with pytest.raises(CallRefused, match=r"graph: has \d+ bytes"):
            await service.create_loss("ann", client.session_id, 1, {**LOSS, "nodes": long})
    async with small_service(tmp_path) as service:
        options, names = service.with_loss("ann", {"loss_id": loss_id})
        assert '"mask"' in str(options[GRAPH])
        assert [*names] == ["logprobs", "mask"]
        assert service.with_loss("ann", {"beta": 1.0}) == ({"beta": 1.0}, ())
        strangers = ("bob", loss_id), ("ann", f"{loss_id}1"), ("ann", "x"), ("ann", "")
        for owner, name in strangers:
            with pytest.raises(CallRefused, match=r"loss_fn_config\.loss_id"):
                service.with_loss(owner, {"loss_id": name})
