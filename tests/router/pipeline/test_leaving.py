"""Proves that a request whose client leaves, at any moment, is gone from the router and from both pools."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from common.errors import HandoverError
from common.text.text_model import TextModel
from router.pipeline.generation import Generation
from tests.support.fake_cluster import FakeCluster, cancelled_at_turn, fake_cluster, letters
from tests.support.fake_turns import Turn, accepting, endless, first_then_no_decode, silent
from tests.support.redis_tools import eventually

STREAM_OF_4 = [40, 41, 42, 43]


async def begin(cluster: FakeCluster, generation: Generation, deltas: int = 0) -> tuple[Any, Any]:
    """The generator after so many deltas, and a task that waits for the next."""
    generator = cluster.pipeline.generate(generation)
    for _ in range(deltas):
        await anext(generator)
    waiting = asyncio.create_task(anext(generator))
    return generator, waiting


async def leave(generator: Any, waiting: asyncio.Task[Any]) -> None:
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    await generator.aclose()


async def test_leaving_before_prefill(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        await cluster.lose(cluster.decode)
        generator, waiting = await begin(cluster, cluster.generation([STREAM_OF_4]))
        await eventually(lambda: cluster.pipeline._gate.num_waiting == 1)
        assert cluster.pipeline._running == 1
        await leave(generator, waiting)
        assert cluster.prefill.submissions == []


@pytest.mark.parametrize("script", [silent, accepting])
async def test_leaving_during_prefill(text: TextModel, script: Any) -> None:
    async with fake_cluster(text) as cluster:
        cluster.prefill.scripts = [script]
        generator, waiting = await begin(cluster, cluster.generation([STREAM_OF_4]))
        await eventually(lambda: cluster.prefill.turns)
        await leave(generator, waiting)
        await eventually(lambda: len(cluster.prefill.aborts) == 1)
        assert cluster.decode.submissions == []


async def test_leaving_between_the_pools_releases_the_kv(text: TextModel) -> None:
    """Until then it is renewed."""
    async with fake_cluster(text, lease_s=0.06) as cluster:
        cluster.prefill.scripts = [first_then_no_decode]
        generator, waiting = await begin(cluster, cluster.generation([STREAM_OF_4]), deltas=1)
        await eventually(lambda: len(cluster.prefill.renewals) >= 3)
        assert cluster.prefill.releases == []
        await leave(generator, waiting)
        await eventually(lambda: len(cluster.prefill.releases) == 1)
        renewals = len(cluster.prefill.renewals)
        await asyncio.sleep(0.1)
        assert len(cluster.prefill.renewals) == renewals


async def test_the_kv_waits_for_a_decode_worker(text: TextModel) -> None:
    async with fake_cluster(text, lease_s=0.06) as cluster:
        cluster.prefill.scripts = [first_then_no_decode]
        running = asyncio.create_task(cluster.answer([STREAM_OF_4]))
        await eventually(lambda: len(cluster.prefill.renewals) >= 2)
        await cluster.decode.start(cluster.decode.record.address)
        answered = await running
        assert (answered.tokens, answered.report.attempts) == ([STREAM_OF_4], 1)
        assert cluster.prefill.releases == []


@pytest.mark.parametrize("script", [silent, accepting])
async def test_leaving_before_the_hand_over_aborts_and_releases(text: TextModel, script: Any) -> None:
    async with fake_cluster(text) as cluster:
        cluster.decode.scripts = [script]
        generator, waiting = await begin(cluster, cluster.generation([STREAM_OF_4]), deltas=1)
        await eventually(lambda: cluster.decode.turns)
        await leave(generator, waiting)
        await eventually(lambda: len(cluster.decode.aborts) == len(cluster.prefill.releases) == 1)


@pytest.mark.parametrize("deltas", [2, 5])
async def test_leaving_during_decode_aborts(text: TextModel, deltas: int) -> None:
    async with fake_cluster(text) as cluster:
        cluster.decode.scripts = [endless]
        generator, waiting = await begin(cluster, cluster.generation([[40] * 1000] * 2), deltas)
        await eventually(lambda: waiting.done())
        await generator.aclose()
        await eventually(lambda: [list(abort.forks) for abort in cluster.decode.aborts] == [[]])
        assert cluster.prefill.releases == []


async def test_a_generator_that_never_began_did_nothing(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        await cluster.pipeline.generate(cluster.generation([STREAM_OF_4])).aclose()
        await asyncio.sleep(0.02)
        assert cluster.prefill.submissions == []


@pytest.mark.parametrize(("prefill", "n"), [(1, 1), (0, 1), (1, 3)])
async def test_cancelled_at_any_turn_nothing_is_left(text: TextModel, prefill: int, n: int) -> None:
    """In every turn of the event loop, from the first one to the answer's end."""

    async def read(cluster: FakeCluster) -> None:
        generation = cluster.generation(
            [letters(text, "ab;"), letters(text, "abc"), letters(text, ";")][:n], stop=(";",)
        )
        async with aclosing(cluster.pipeline.generate(generation)) as deltas:
            async for _ in deltas:
                pass

    async with fake_cluster(text, prefill=prefill) as cluster:
        turn, ended = 0, False
        while not ended:
            ended = await cancelled_at_turn(read(cluster), turn)
            turn += 1
            await eventually(lambda: not cluster.leftovers())
        assert turn > 5


async def test_cancelled_at_any_turn_of_a_resume_nothing_is_left(text: TextModel) -> None:
    async def dies(turn: Turn) -> None:
        turn.accepted()
        turn.admitted()
        turn.say(1)
        turn.failed(HandoverError("again"))

    async def read(cluster: FakeCluster) -> None:
        cluster.decode.scripts = [dies]
        async with aclosing(cluster.pipeline.generate(cluster.generation([STREAM_OF_4] * 2))) as deltas:
            async for _ in deltas:
                pass

    async with fake_cluster(text) as cluster:
        turn, ended = 0, False
        while not ended:
            ended = await cancelled_at_turn(read(cluster), turn)
            turn += 1
            await eventually(lambda: not cluster.leftovers())
        assert turn > 5
