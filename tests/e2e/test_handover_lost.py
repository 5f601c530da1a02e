"""Proves with real workers that a holder lost at any point, or replaced, costs a resume and nothing more."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.deadlines import Deadlines
from common.errors import HandoverError
from common.sampling import SamplingParams
from kvtransfer.claim import Claim, PullStats
from kvtransfer.handle import KVHandle
from kvtransfer.holder_client import HolderClient
from kvtransfer.lease import ROUTER, LeaseTable
from kvtransfer.reader import KVReader
from router.fleet.hashed_tokens import HashedTokens
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import LocalCluster, LocalWorker, local_cluster
from tests.support.recompute import Recompute, prompt
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import eventually

PROMPT = prompt(70)
SEEDED = SamplingParams(max_tokens=8, temperature=1.5, seed=21, ignore_eos=True, repetition_penalty=1.1)
DEADLINES = Deadlines(heartbeat_s=0.05, drain_s=0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


class Deaths:
    """The holder's server ends at the given point of the first hand-over; later ones are left alone."""

    def __init__(self) -> None:
        self.cluster: LocalCluster | None = None
        self.dead: LocalWorker | None = None

    async def die(self, address: str) -> None:
        if self.dead is None:
            assert self.cluster is not None
            [self.dead] = [one for one in self.cluster.local if one.worker.info.address == address]
            await self.dead.worker.server.stop()


def before_claim(monkeypatch: pytest.MonkeyPatch, deaths: Deaths) -> None:
    claimed = KVReader.claimed

    @asynccontextmanager
    async def late(reader: KVReader, handle: Any) -> AsyncIterator[Claim]:
        await deaths.die(handle.address)
        async with claimed(reader, handle) as claim:
            yield claim

    monkeypatch.setattr(KVReader, "claimed", late)


def before_pull(monkeypatch: pytest.MonkeyPatch, deaths: Deaths) -> None:
    pull = Claim.pull

    async def late(claim: Claim, pairs: Any) -> PullStats:
        await deaths.die(claim.handle.address)
        return await pull(claim, pairs)

    monkeypatch.setattr(Claim, "pull", late)


def before_release(monkeypatch: pytest.MonkeyPatch, deaths: Deaths) -> None:
    confirm = Claim.confirm

    async def late(claim: Claim) -> None:
        await deaths.die(claim.handle.address)
        await confirm(claim)

    monkeypatch.setattr(Claim, "confirm", late)


def before_the_answer_to_release(monkeypatch: pytest.MonkeyPatch, deaths: Deaths) -> None:
    """The holder has freed the blocks, and nobody hears of it."""
    release = HolderClient.release

    async def unheard(client: HolderClient, handle_id: bytes, epoch: int, reader_id: int) -> bool:
        if deaths.dead is None and reader_id != ROUTER:
            assert await release(client, handle_id, epoch, reader_id)
            await deaths.die(client._address)
        return await release(client, handle_id, epoch, reader_id)

    monkeypatch.setattr(HolderClient, "release", unheard)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("point", [before_claim, before_pull, before_release, before_the_answer_to_release])
async def test_a_holder_that_dies_under_its_handle_costs_a_resume(
    model: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, point: Any, count: int
) -> None:
    """With another prefill worker that one is asked, else the decode worker computes the prompt."""
    recompute = Recompute.of(model, "float32")
    deaths = Deaths()
    point(monkeypatch, deaths)
    async with local_cluster(model, redis_server.url, prefill=count, deadlines=DEADLINES) as cluster:
        deaths.cluster = cluster
        answered = await cluster.answer(PROMPT, SEEDED, n=2)
        assert deaths.dead is not None
        assert answered.tokens == [recompute(PROMPT, SEEDED, fork) for fork in range(2)]
        assert answered.report.attempts == 3  # token 0 was out: each fork resumes by itself
        dead = deaths.dead.worker.info.worker_id
        assert answered.report.prefill_worker == (f"prefill-{1 - int(dead[-1])}" if count == 2 else "decode-0")
        await cluster.stop(deaths.dead)
        await cluster.assert_all_free()
        assert (await cluster.answer(PROMPT, SEEDED)).report.attempts == 1


def taken(leases: LeaseTable, handle: KVHandle) -> KVHandle:
    leases.renew(handle.id, handle.epoch, reader_id=99)
    return handle


def released(leases: LeaseTable, handle: KVHandle) -> KVHandle:
    leases.release(handle.id, handle.epoch, ROUTER)
    return handle


def of_an_earlier_life(leases: LeaseTable, handle: KVHandle) -> KVHandle:
    return replace(handle, epoch=handle.epoch - 1)


def on_other_blocks(leases: LeaseTable, handle: KVHandle) -> KVHandle:
    return replace(handle, block_ids=tuple(block + 1 for block in handle.block_ids))


def of_another_model(leases: LeaseTable, handle: KVHandle) -> KVHandle:
    return replace(handle, fingerprint="another")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (taken, "handle_taken"),
        (released, "kv_expired"),
        (of_an_earlier_life, "epoch_mismatch"),
        (on_other_blocks, "handover_failed"),
        (of_another_model, "fingerprint_mismatch"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_a_handle_that_is_refused_costs_a_resume_and_no_byte(
    model: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, spoil: Any, code: str
) -> None:
    """Leases last half a minute: what is free in a moment was released, by whoever had the right."""
    recompute = Recompute.of(model, "float32")
    claimed, pull = KVReader.claimed, Claim.pull
    refused: list[str] = []
    pulls: list[int] = []

    @asynccontextmanager
    async def spoiled(reader: KVReader, handle: KVHandle) -> AsyncIterator[Claim]:
        wanted = handle if refused else spoil(cluster.prefill[0].leases, handle)
        try:
            async with claimed(reader, wanted) as claim:
                yield claim
        except HandoverError as error:
            refused.append(error.code)
            raise

    async def counted(claim: Claim, pairs: Any) -> PullStats:
        pulls.append(len(refused))
        return await pull(claim, pairs)

    monkeypatch.setattr(KVReader, "claimed", spoiled)
    monkeypatch.setattr(Claim, "pull", counted)
    async with local_cluster(model, redis_server.url, deadlines=DEADLINES) as cluster:
        answered = await cluster.answer(PROMPT, SEEDED)
        assert refused == [code]
        assert pulls == [1]
        assert answered.tokens == [recompute(PROMPT, SEEDED)]
        assert answered.report.attempts == 2
        await cluster.assert_all_free()


async def test_a_new_life_at_the_address_serves_at_once_and_the_old_one_is_forgotten(
    model: Path, redis_server: RedisServer
) -> None:
    """The old one's connection is dropped, and what it had cached is not expected of the new one."""
    recompute = Recompute.of(model, "float32")
    async with local_cluster(model, redis_server.url, deadlines=DEADLINES) as cluster:
        old = cluster.local[0]
        await cluster.answer(PROMPT, SEEDED)
        reader = cluster.decode[0]._reader
        assert list(reader._connections._current) == [(old.worker.info.address, old.worker.info.epoch)]
        context, index = HashedTokens(PROMPT), cluster.workers._index

        def known() -> int:
            return index.prefix_blocks("prefill-0", context.hashes(old.worker.info.model_revision))

        await eventually(lambda: known() == 4)
        await cluster.stop(old)
        new = await cluster.start("prefill", "prefill-0", port=old.worker.server.port)
        assert new.worker.info.address == old.worker.info.address
        assert new.worker.info.epoch != old.worker.info.epoch
        clients = cluster.workers._clients
        await eventually(
            lambda: (
                "prefill-0" in clients
                and clients["prefill-0"].record.epoch == new.worker.info.epoch
                and clients["prefill-0"].connected
            )
        )
        assert known() == 0
        cluster.forget_prefixes("decode")
        answered = await cluster.answer(PROMPT, SEEDED)
        assert answered.tokens == [recompute(PROMPT, SEEDED)]
        assert answered.report.attempts == 1
        assert answered.report.prefill_worker == "prefill-0"
        assert answered.report.cached_tokens == 0
        assert answered.report.handover_bytes > 0
        assert list(reader._connections._current) == [(new.worker.info.address, new.worker.info.epoch)]
        await eventually(lambda: known() == 4)
        await cluster.assert_all_free()
