"""Proves that workers come by their records, leave for good reasons only, and that even requests load them evenly."""

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from common.awake_clock import AwakeClock
from common.block_hash import BLOCK_SIZE
from common.deadlines import Deadlines
from common.discovery.redis_client import connect
from common.discovery.registry import Registry, WorkerRecord
from common.errors import ContextLengthExceeded, HandoverError, NoWorker
from common.rpc.pb import types_pb2
from common.tasks import end
from common.text.text_model import TextModel
from router.__main__ import stranger
from router.fleet.hashed_tokens import HashedTokens
from router.fleet.prefix_index import PrefixIndex
from router.fleet.room import Room
from router.fleet.workers import Workers
from router.metrics import RouterMetrics
from tests.support.fake_cluster import PROMPT, QUICK, FakeCluster, fake_cluster
from tests.support.fake_turns import Turn, Words, accepting, honest
from tests.support.fake_workers import FakeWorker
from tests.support.redis_process import RedisServer
from tests.support.redis_tools import a_record, eventually

ANSWER = [40, 41, 42, 43]
LONG = tuple(range(10, 10 + 3 * BLOCK_SIZE))


def names(cluster: FakeCluster, role: str) -> set[str]:
    return {client.record.worker_id for client in cluster.workers.usable(role)}


async def test_records_introduce_workers(text: TextModel) -> None:
    async with fake_cluster(text, prefill=2, decode=1, listed=False) as cluster:
        assert names(cluster, "prefill") == names(cluster, "decode") == set()
        await cluster.show(*cluster.fakes)
        assert names(cluster, "prefill") == {"prefill-0", "prefill-1"}
        assert names(cluster, "decode") == {"decode-0"}


async def test_readiness_says_what_is_missing(text: TextModel) -> None:
    async with fake_cluster(text, listed=False) as cluster:
        prefill, decode = cluster.fakes
        assert cluster.workers.ready() == (False, "no decode worker")
        await cluster.show(prefill)
        assert cluster.workers.ready() == (False, "no decode worker")
        await cluster.show(prefill, decode)
        assert cluster.workers.ready() == (True, "ready")
        await prefill.stop()
        alone = (True, "no prefill worker is reachable: decode workers serve alone")
        await eventually(lambda: cluster.workers.ready() == alone)
        assert (await cluster.answer([ANSWER])).tokens == [ANSWER]
        cluster.registry.show(decode.record)  # nobody says any more that there should be one
        assert cluster.workers.ready() == (True, "ready")
        cluster.registry.show(replace(decode.record, leaving=True))
        assert cluster.workers.ready() == (False, "no decode worker")


async def test_workers_of_another_model_are_ignored_and_told_once(
    text: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Two models in one namespace: each router takes its own, and a record that changes its mind comes in."""

    def other(record: WorkerRecord) -> str:
        return "" if record.served_model_name == "model" else f"it serves {record.served_model_name!r}"

    caplog.set_level(logging.WARNING, "kvrelay")
    async with fake_cluster(text, decode=2, listed=False, stranger=other) as cluster:
        ours, theirs = [fake for fake in cluster.fakes if fake.role == "decode"]
        prefill = next(fake.record for fake in cluster.fakes if fake.role == "prefill")
        mine = replace(ours.record, served_model_name="model")
        strange = replace(theirs.record, served_model_name="another")
        for _ in range(3):
            cluster.registry.show(replace(prefill, served_model_name="another"), strange)
        assert cluster.workers.ready() == (False, "no decode worker (2 workers of other models are ignored)")
        told = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
        assert len(told) == 2
        cluster.registry.show(replace(prefill, served_model_name="model"), mine, strange)
        await eventually(lambda: names(cluster, "prefill") == {"prefill-0"})
        await eventually(lambda: names(cluster, "decode") == {ours.record.worker_id})
        assert (await cluster.answer([ANSWER])).tokens == [ANSWER]
        assert not theirs.turns


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"tokenizer": ""}, ""),  # an older worker doesn't tell
        ({"model_revision": "another"}, ""),  # a rolling update
        ({"served_model_name": "b"}, ""),
        ({"served_model_name": "c"}, "it serves 'c', this router ['a', 'b']"),
        ({"tokenizer": "other"}, "it has another tokenizer than this router"),
    ],
)
def test_a_routers_workers_have_its_name_and_its_tokenizer(changes: dict[str, str], reason: str) -> None:
    one = replace(a_record(served_model_name="a", tokenizer="words"), **changes)
    assert stranger(one, {"a", "b"}, "words") == reason


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leaving_worker_ends_what_it_has_and_gets_nothing_new(text: TextModel, role: str) -> None:
    async with fake_cluster(text, prefill=2, decode=2) as cluster:
        begun, go = asyncio.Event(), asyncio.Event()

        async def waits(turn: Turn) -> None:
            begun.set()
            await go.wait()
            await honest(turn)

        leaving, staying = [fake for fake in cluster.fakes if fake.role == role]
        leaving.scripts = staying.scripts = [waits]
        running = asyncio.create_task(cluster.answer([ANSWER]))
        await begun.wait()
        if staying.turns:
            leaving, staying = staying, leaving
        staying.scripts = []
        records = [replace(fake.record, leaving=fake is leaving) for fake in cluster.fakes]
        cluster.registry.show(*records)
        for _ in range(4):
            assert (await cluster.answer([ANSWER])).tokens == [ANSWER]
        cluster.registry.show(*(record for record in records if not record.leaving))  # it isn't listed any more
        go.set()
        answered = await running
        assert (answered.tokens, answered.report.attempts) == ([ANSWER], 1)
        assert (len(leaving.turns), len(staying.turns)) == (1, 4)


async def test_a_goodbye_stays_said(text: TextModel) -> None:
    """A record written before it may be read after it."""
    async with fake_cluster(text) as cluster:
        records = [fake.record for fake in cluster.fakes]
        cluster.registry.show(*(replace(record, leaving=True) for record in records))
        cluster.registry.show(*records)
        assert names(cluster, "prefill") == names(cluster, "decode") == set()


async def test_a_worker_that_left_before_it_was_known_is_not_taken_up(text: TextModel) -> None:
    async with fake_cluster(text, listed=False) as cluster:
        cluster.registry.show(*(replace(fake.record, leaving=True) for fake in cluster.fakes))
        assert cluster.workers._clients == {}


@pytest.mark.parametrize("same", ["address", "id", "both"])
async def test_a_new_epoch_replaces_the_old_one(text: TextModel, same: str) -> None:
    async with fake_cluster(text) as cluster:
        old, decode = cluster.fakes
        await old.stop()
        cluster.fakes.remove(old)
        name = "prefill-0" if same != "address" else "prefill-new"
        address = old.record.address if same != "id" else "127.0.0.1:0"
        new = await cluster.add("prefill", name, epoch=8, address=address)
        await cluster.show(new, decode)
        assert [(c.record.worker_id, c.record.epoch) for c in cluster.workers.usable("prefill")] == [(name, 8)]
        assert (await cluster.answer([ANSWER])).tokens == [ANSWER]
        assert len(new.turns) == 1


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("new_epoch", [6, 8])
async def test_an_old_record_does_not_drive_out_the_worker_that_is_there(
    text: TextModel, order: int, new_epoch: int
) -> None:
    """Until the old life's record has expired both are listed, in any order."""
    async with fake_cluster(text) as cluster:
        old, decode = cluster.fakes
        await old.stop()
        cluster.fakes.remove(old)
        new = await cluster.add("prefill", "prefill-0", epoch=new_epoch, address=old.record.address)
        records = [new.record, old.record][::order]
        await eventually(lambda: not cluster.client(old).connected)
        for _ in range(100):
            cluster.registry.show(*records, decode.record)
            client = cluster.client(new)
            if client.record.epoch == new_epoch and client.connected:
                break
            await asyncio.sleep(0.02)
        for _ in range(3):
            cluster.registry.show(*records, decode.record)
            assert cluster.client(new) is client
        assert client.connected


async def test_two_workers_of_one_name_are_one(text: TextModel) -> None:
    """A mistake in somebody's flags; neither is driven out, and the first one works."""
    async with fake_cluster(text) as cluster:
        first, decode = cluster.fakes
        client = cluster.client(first)
        second = await cluster.add("prefill", "prefill-0", epoch=8)
        for records in ([first.record, second.record], [second.record, first.record]):
            cluster.registry.show(*records, decode.record)
            assert cluster.client(first) is client
        cluster.registry.show(second.record, decode.record)
        await eventually(lambda: names(cluster, "prefill") == {"prefill-0"})
        assert cluster.client(second).record.epoch == 8


async def test_an_empty_list_removes_nobody_who_can_be_reached(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        cluster.registry.show()
        assert (await cluster.answer([ANSWER])).tokens == [ANSWER]


async def test_who_is_gone_and_not_listed_is_dropped(text: TextModel) -> None:
    async with fake_cluster(text, prefill=2) as cluster:
        gone, *others = cluster.fakes
        await gone.stop()
        await eventually(lambda: not cluster.client(gone).connected)
        cluster.registry.show(*(fake.record for fake in cluster.fakes))
        assert "prefill-0" in cluster.workers._clients  # it may come back
        cluster.registry.show(*(fake.record for fake in others))
        assert "prefill-0" not in cluster.workers._clients
        assert "prefill-0" not in cluster.index._views


async def test_a_worker_that_is_not_the_recorded_one_is_left_alone(text: TextModel) -> None:
    """Until the record of the one that is there comes."""
    async with fake_cluster(text, listed=False) as cluster:
        prefill, decode = cluster.fakes
        wrong = replace(prefill.record, worker_id="wrong", fingerprint="other")
        for _ in range(3):
            cluster.registry.show(decode.record, wrong)
            await eventually(lambda: cluster.workers._clients["wrong"].obsolete)
        assert prefill.num_streams == 1
        cluster.registry.show(decode.record, wrong, prefill.record)
        await eventually(lambda: names(cluster, "prefill") == {"prefill-0"})
        assert "wrong" not in cluster.workers._clients


async def test_after_a_stall_of_our_own_nobody_counts_as_silent(text: TextModel) -> None:
    """What came meanwhile is still to be read: time-outs go on from when we can hear again."""
    clock = AwakeClock()
    async with fake_cluster(text, hearing=clock, suspect_s=0.3, dead_s=0.5) as cluster:
        ticking = asyncio.create_task(clock.run())
        await asyncio.sleep(0)
        time.sleep(0.8)  # noqa: ASYNC251  (this is the stall)
        assert names(cluster, "prefill") == {"prefill-0"}
        assert names(cluster, "decode") == {"decode-0"}
        answered = await cluster.answer([ANSWER])
        assert (answered.tokens, answered.report.attempts) == ([ANSWER], 1)
        assert all(client.connected for client in cluster.workers._clients.values())
        await end(ticking)


async def test_settling_waits_for_those_that_are_listed(text: TextModel) -> None:
    async with fake_cluster(text, listed=False) as cluster:
        settling = asyncio.create_task(cluster.workers.settle())
        await asyncio.sleep(0.02)
        assert not settling.done()
        cluster.registry.show(*(fake.record for fake in cluster.fakes))
        await settling
        assert cluster.workers.ready() == (True, "ready")


async def test_settling_ends_without_those_that_do_not_answer(text: TextModel) -> None:
    async with fake_cluster(text, listed=False, connect_s=0.1) as cluster:
        prefill, decode = cluster.fakes
        await prefill.stop()
        cluster.registry.show(prefill.record, decode.record)
        await cluster.workers.settle()
        assert cluster.workers.ready() == (True, "no prefill worker is reachable: decode workers serve alone")


async def test_settling_does_not_wait_for_a_life_that_is_over(text: TextModel) -> None:
    async with fake_cluster(text, listed=False, connect_s=1000.0) as cluster:
        prefill, decode = cluster.fakes
        settling = asyncio.create_task(cluster.workers.settle())
        cluster.registry.show(replace(prefill.record, epoch=6), decode.record)
        await settling
        assert cluster.workers.ready() == (True, "no prefill worker is reachable: decode workers serve alone")


async def test_settling_with_nobody_listed_ends_at_once(text: TextModel) -> None:
    async with fake_cluster(text, prefill=0, decode=0, connect_s=1000.0) as cluster:
        await cluster.workers.settle()


async def test_waiting_for_a_decode_worker_ends_with_one_or_with_the_deadline(text: TextModel) -> None:
    async with fake_cluster(text, listed=False, router_queue_s=0.1) as cluster:
        with pytest.raises(NoWorker):
            await cluster.workers.decode_worker(HashedTokens(PROMPT), None)
    async with fake_cluster(text, listed=False) as cluster:
        waiting = [asyncio.create_task(cluster.workers.decode_worker(HashedTokens(PROMPT), None)) for _ in range(20)]
        await asyncio.sleep(0.02)
        await cluster.show(*cluster.fakes)
        clients = await asyncio.gather(*waiting)
        assert {client.record.worker_id for client in clients} == {"decode-0"}
    async with fake_cluster(text, router_queue_s=0.1) as cluster:
        with pytest.raises(NoWorker):
            await cluster.workers.decode_worker(HashedTokens(PROMPT), "another fingerprint")
    async with fake_cluster(text, dead_s=0.3, heartbeat_s=0.1) as cluster:
        with pytest.raises(HandoverError, match="fingerprint is left"):
            await cluster.workers.decode_worker(HashedTokens(PROMPT), "another fingerprint")


async def test_a_decode_pool_that_is_gone_may_come_back_until_the_queue_deadline(text: TextModel) -> None:
    async with fake_cluster(text, listed=False) as cluster:
        assert cluster.workers.capacity() == Room()  # the registry has not been read
        cluster.registry.show()
        assert cluster.workers.capacity() is None  # never seen
        cluster.registry.show(replace(cluster.decode.record, epoch=6))
        assert cluster.workers.capacity() == Room()  # announced, not reached yet
        await cluster.show(*cluster.fakes)
        assert cluster.workers.capacity().seats > 0
        await cluster.lose(cluster.decode)
        assert cluster.workers.capacity() == Room()
        cluster.registry.show(cluster.prefill.record)
        assert names(cluster, "decode") == set()
        assert cluster.workers.capacity() == Room()
        cluster.workers._clock = lambda: time.monotonic() + QUICK.router_queue_s
        assert cluster.workers.capacity() is None


def name_numerics(cluster: FakeCluster, **numerics: str) -> None:
    """By worker ids, whose - is a _ here."""
    for fake in cluster.fakes:
        fake.record = replace(fake.record, numerics=numerics[fake.record.worker_id.replace("-", "_")])


async def test_pairs_that_round_alike_are_preferred(text: TextModel) -> None:
    async with fake_cluster(text, prefill=2, decode=2, listed=False) as cluster:
        name_numerics(cluster, prefill_0="a", prefill_1="x", decode_0="a", decode_1="b")
        await cluster.show(*cluster.fakes)
        context, workers = HashedTokens(LONG), cluster.workers
        for numerics, wanted in [("a", "decode-0"), ("b", "decode-1")] * 4:
            assert (await workers.decode_worker(context, None, numerics=numerics)).record.worker_id == wanted
        assert {(await workers.decode_worker(context, None)).record.worker_id for _ in range(32)} == names(
            cluster, "decode"
        )
        assert await workers.decode_worker(context, None, numerics="unheard of")
        for _ in range(8):
            client, expectation = workers.pick_prefill(context, workers.usable("decode")[0])
            expectation.answered()
            assert client.record.worker_id == "prefill-0"
        assert (await cluster.answer([ANSWER], prompt=LONG)).tokens == [ANSWER]


async def test_strict_numerics_pair_nobody_else(text: TextModel) -> None:
    quick = {"dead_s": 0.3, "heartbeat_s": 0.1}
    async with fake_cluster(text, prefill=1, decode=2, listed=False, strict_numerics=True, **quick) as cluster:
        name_numerics(cluster, prefill_0="x", decode_0="a", decode_1="b")
        await cluster.show(*cluster.fakes)
        context, workers = HashedTokens(LONG), cluster.workers
        assert workers.pick_prefill(context, workers.usable("decode")[0]) == "alone"
        assert (await workers.decode_worker(context, None, numerics="b")).record.worker_id == "decode-1"
        with pytest.raises(HandoverError):
            await workers.decode_worker(context, None, numerics="x")
        answered = await cluster.answer([ANSWER], prompt=LONG)
        assert (answered.tokens, answered.report.unsplit) == ([ANSWER], "alone")


async def test_a_prompt_beyond_every_workers_context_is_refused_at_once(text: TextModel) -> None:
    async with fake_cluster(text, listed=False) as cluster:
        records = [replace(fake.record, max_model_len=len(PROMPT)) for fake in cluster.fakes]
        for fake, record in zip(cluster.fakes, records, strict=True):
            fake.record = record
        await cluster.show(*cluster.fakes)
        with pytest.raises(ContextLengthExceeded, match=f"has {len(PROMPT)} tokens"):
            await cluster.workers.decode_worker(HashedTokens(PROMPT), None)
        assert await cluster.workers.decode_worker(HashedTokens(PROMPT[:-1]), None)


@pytest.mark.parametrize(("most_tokens", "reason"), [(0, ""), (len(PROMPT) - 1, ""), (len(PROMPT), "quicker")])
async def test_a_short_prompt_skips_the_hop_where_that_is_quicker(
    text: TextModel, most_tokens: int, reason: str
) -> None:
    async with fake_cluster(text) as cluster:
        cluster.workers._max_unsplit_tokens = most_tokens
        for fake in cluster.fakes:
            fake.load = types_pb2.Load(total_blocks=1000, free_blocks=1000, token_s=0.001, step_s=0.02)
        await eventually(lambda: all(cluster.client(fake).load.token_s for fake in cluster.fakes))
        answered = await cluster.answer([ANSWER])
        assert answered.tokens == [ANSWER]
        assert answered.report.unsplit == reason
        assert bool(cluster.prefill.turns) is not bool(reason)
        labels = {"model_name": "test", "role": "router", "reason": "quicker"}
        counted = cluster.metrics.registry.get_sample_value("kvrelay:requests_unsplit_total", labels)
        assert counted == (1 if reason else None)


async def test_kv_that_nobody_can_take_any_more_is_made_again_for_those_who_are_there(text: TextModel) -> None:
    """The last decode worker of an older kind leaves between prefill and hand-over."""
    async with fake_cluster(text, prefill=0, decode=0, dead_s=0.3, heartbeat_s=0.1) as cluster:
        for role, kind in (("prefill", "old"), ("decode", "old"), ("prefill", "new"), ("decode", "new")):
            fake = await cluster.add(role)
            fake.record = replace(fake.record, fingerprint=kind)
        old_prefill, old_decode, new_prefill, new_decode = cluster.fakes

        async def goes_with_its_pool(turn: Turn) -> None:
            await old_decode.stop()
            await honest(turn)

        await cluster.show(old_prefill, old_decode)
        old_prefill.always = goes_with_its_pool
        answering = asyncio.create_task(cluster.answer([ANSWER]))
        await eventually(lambda: bool(old_prefill.turns))
        await cluster.show(old_prefill, new_prefill, new_decode)
        assert (await answering).tokens == [ANSWER]
        assert {turn.handle.fingerprint for turn in new_decode.turns} == {"new"}


async def test_only_equal_fingerprints_are_paired(text: TextModel) -> None:
    """As in a rolling update: KV goes to a worker of the same kind, and is made only where there is one."""
    async with fake_cluster(text, prefill=0, decode=0) as cluster:
        for role, kind in (("prefill", "a"), ("prefill", "b"), ("prefill", "c"), ("decode", "a"), ("decode", "b")):
            fake = await cluster.add(role)
            fake.record = replace(fake.record, fingerprint=kind)
        await cluster.show(*cluster.fakes)
        for _ in range(20):
            assert (await cluster.answer([ANSWER])).tokens == [ANSWER]
        *prefill, decode_a, decode_b = cluster.fakes
        assert [bool(fake.turns) for fake in prefill] == [True, True, False]
        assert {turn.handle.fingerprint for turn in decode_a.turns} == {"a"}
        assert {turn.handle.fingerprint for turn in decode_b.turns} == {"b"}


async def test_a_requests_own_forks_are_no_other_routers_requests(text: TextModel) -> None:
    async with fake_cluster(text, listed=False) as cluster:
        fake = cluster.decode
        fake.record = replace(fake.record, max_num_seqs=8)
        await cluster.show(*cluster.fakes)
        assert cluster.workers.capacity().seats == 8
        fake.load, fake.always = types_pb2.Load(total_blocks=1000, free_blocks=1000, running=4), accepting
        await eventually(lambda: cluster.workers.capacity().seats == 4)
        asked = asyncio.create_task(cluster.answer([ANSWER] * 4))
        await eventually(lambda: len(fake.turns) == 1)
        assert cluster.workers.capacity().seats == 8
        await end(asked)
        assert cluster.workers.capacity().seats == 4


async def test_a_pool_full_of_other_routers_requests_lets_everybody_in_by_turns(text: TextModel) -> None:
    """One place a worker, so that a router which came late waits for what it asks, and is not shut out."""
    async with fake_cluster(text, decode=2, listed=False) as cluster:
        for fake in cluster.fakes:
            fake.record = replace(fake.record, max_num_seqs=8)
            fake.load = types_pb2.Load(total_blocks=1000, free_blocks=1000, running=8, waiting=3)
        await cluster.show(*cluster.fakes)
        await eventually(lambda: all(cluster.client(fake).load.running for fake in cluster.fakes))
        assert cluster.workers.capacity().seats == 2
        assert (await cluster.answer([ANSWER])).tokens == [ANSWER]


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_even_requests_load_evenly(text: TextModel, count: int) -> None:
    async with fake_cluster(text, prefill=count, decode=count) as cluster:
        for fake in cluster.fakes:
            fake.always = accepting
        generations = [cluster.generation([ANSWER], prompt=[index] * 40) for index in range(12)]
        prefills = [asyncio.create_task(cluster.run(one)) for one in generations]
        await eventually(lambda: sum(len(fake.turns) for fake in cluster.fakes) == 12)
        assert {len(fake.turns) for fake in cluster.fakes if fake.role == "prefill"} == {12 // count}
        await end(*prefills)
        for fake in cluster.fakes:
            if fake.role == "prefill":
                fake.always = honest
        decodes = [asyncio.create_task(cluster.run(one)) for one in generations]
        await eventually(lambda: sum(len(fake.turns) for fake in cluster.fakes if fake.role == "decode") == 12)
        assert {len(fake.turns) for fake in cluster.fakes if fake.role == "decode"} == {12 // count}
        await end(*decodes)


@pytest.mark.parametrize("count", [2, 3])
async def test_idle_workers_all_get_something(text: TextModel, count: int) -> None:
    """One request at a time: all workers are equal whenever one is asked for."""
    async with fake_cluster(text, prefill=count, decode=count) as cluster:
        for _ in range(12 * count):
            await cluster.answer([ANSWER])
        assert min(len(fake.turns) for fake in cluster.fakes) >= 4


async def test_a_busy_worker_gets_less(text: TextModel) -> None:
    async with fake_cluster(text, prefill=2) as cluster:
        busy, idle = [fake for fake in cluster.fakes if fake.role == "prefill"]
        busy.load = types_pb2.Load(total_blocks=1000, free_blocks=1000, waiting_tokens=500)
        await eventually(lambda: cluster.client(busy).load.waiting_tokens == 500)
        for _ in range(4):
            await cluster.answer([ANSWER])
        assert (len(busy.turns), len(idle.turns)) == (0, 4)


async def test_a_prompt_is_expected_where_it_was_sent_and_no_longer_than_that(text: TextModel) -> None:
    async with fake_cluster(text, prefill=2) as cluster:
        client, expectation = cluster.workers.pick_prefill(HashedTokens(LONG, "salt"), cluster.client(cluster.decode))
        worker_id = client.record.worker_id
        hashes = HashedTokens(LONG, "salt").hashes(client.record.model_revision)
        assert cluster.index.prefix_blocks(worker_id, hashes) == 3
        for _ in range(4):  # its prefix draws the same prompt
            again, other = cluster.workers.pick_prefill(HashedTokens(LONG, "salt"), cluster.client(cluster.decode))
            assert again is client
            other.answered()
        assert (
            cluster.index.prefix_blocks(worker_id, HashedTokens(LONG, "other").hashes(client.record.model_revision))
            == 0
        )
        expectation.answered()
        assert cluster.index.prefix_blocks(worker_id, hashes) == 3
        cluster.clock.skipped_s += QUICK.cache_linger_s
        assert cluster.index.prefix_blocks(worker_id, hashes) == 0


@pytest.mark.parametrize("ends", ["answer", "error", "leaving"])
async def test_expectations_are_withdrawn_however_the_prefill_ends(text: TextModel, ends: str) -> None:
    async with fake_cluster(text) as cluster:
        if ends == "leaving":
            cluster.prefill.scripts = [accepting]
        if ends == "error":
            cluster.prefill.always = fails
        running = asyncio.create_task(cluster.run(cluster.generation([ANSWER], prompt=LONG)))
        await eventually(lambda: cluster.prefill.turns)
        if ends == "leaving":
            assert len(cluster.index._open) == 1
            running.cancel()
        await asyncio.wait({running})
        assert not cluster.index._open
        cluster.clock.skipped_s += QUICK.cache_linger_s
        assert (
            cluster.workers._index.prefix_blocks(
                "prefill-0", HashedTokens(LONG).hashes(cluster.prefill.record.model_revision)
            )
            == 0
        )


async def fails(turn: Turn) -> None:
    raise NoWorker("no")


async def test_metrics_count_workers_by_role_and_state(text: TextModel) -> None:
    async with fake_cluster(text, prefill=2) as cluster:
        first, second, decode = cluster.fakes
        await second.stop()
        await eventually(lambda: not cluster.client(second).connected)
        cluster.registry.show(replace(decode.record, leaving=True), first.record, second.record)

        def count(role: str, state: str) -> float | None:
            labels = {"model_name": "test", "role": "router", "worker_role": role, "state": state}
            return cluster.metrics.registry.get_sample_value("kvrelay:workers", labels)

        assert (count("prefill", "ready"), count("prefill", "unreachable"), count("decode", "draining")) == (1, 1, 1)
        cluster.registry.show(first.record)
        assert (count("prefill", "ready"), count("prefill", "unreachable")) == (1, 0)


@asynccontextmanager
async def with_redis(
    server: RedisServer, deadlines: Deadlines = QUICK
) -> AsyncIterator[tuple[Workers, FakeWorker, Redis]]:
    """A router's workers and one decode worker that announces itself, over a real Redis."""
    namespace = f"test-{secrets.token_hex(4)}"
    redis = await connect(server.url, deadlines)
    metrics = RouterMetrics("test")
    index = PrefixIndex(redis, namespace, deadlines)
    workers = Workers(Registry(redis, namespace, deadlines), index, "router-0", deadlines, time.monotonic, metrics)
    fake = FakeWorker("decode", "decode-0", Words(), deadlines)
    await fake.start()
    announcing = Registry(redis, namespace, deadlines)
    tasks = [asyncio.create_task(one) for one in (workers.run(), index.run(), announcing.keep_announced(fake.record))]
    fake.goodbye = lambda: announcing.goodbye(fake.record)
    try:
        await eventually(lambda: workers.usable("decode"))
        yield workers, fake, redis
    finally:
        await end(*tasks)
        await workers.close()
        await fake.stop()
        await redis.aclose()


async def test_redis_introduces_a_worker_and_brings_its_goodbye(redis_server: RedisServer) -> None:
    async with with_redis(redis_server) as (workers, fake, _):
        assert workers.ready() == (True, "ready")
        await fake.goodbye()
        await eventually(lambda: not workers.usable("decode"))
        [client] = workers._clients.values()
        assert client.connected


@pytest.mark.parametrize("outage", ["empty", "frozen", "gone"])
async def test_redis_takes_nobody_away(own_redis_server: RedisServer, outage: str) -> None:
    async with with_redis(own_redis_server, replace(QUICK, rpc_s=0.2)) as (workers, _, redis):
        [client] = workers._clients.values()
        if outage == "empty":
            await redis.flushall()
        elif outage == "frozen":
            os.kill(own_redis_server.pid, signal.SIGSTOP)
        else:
            own_redis_server.stop()
        for _ in range(20):
            await asyncio.sleep(QUICK.heartbeat_s / 2)
            assert workers.usable("decode") == [client]
        if outage != "empty":
            await eventually(lambda: workers.ready()[1].startswith("ready; redis is gone ("))
            assert workers.ready()[0]
        if outage == "frozen":
            os.kill(own_redis_server.pid, signal.SIGCONT)
