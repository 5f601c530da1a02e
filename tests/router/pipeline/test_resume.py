"""Proves that a request goes on after whatever died: with all it has, nothing lost or repeated, and not forever."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from common.errors import (
    BY_CODE,
    EngineFailure,
    InvalidRequest,
    KVExpired,
    KVRelayError,
    Overloaded,
    PullStalled,
    Timeout,
    WorkerLost,
)
from common.rpc.pb import types_pb2
from common.text.text_model import TextModel
from router.pipeline.pipeline import MAX_ATTEMPTS
from tests.support.fake_cluster import FakeCluster, fake_cluster
from tests.support.fake_turns import EOS, Turn, accepting, honest, silent
from tests.support.redis_tools import eventually

ANSWER = [40, 41, 42, 43, 44, 45]
OTHER = [50, 51, 52, 53, 54, 55]
RESUMABLE = sorted(code for code, error in BY_CODE.items() if error.resumable)
FINAL = sorted(code for code, error in BY_CODE.items() if not error.resumable)
Script = Callable[[Turn], Awaitable[None]]


def says(*words: str, then: KVRelayError | str = "hang up") -> Script:
    """Says these things (methods of Turn), then fails, or hangs up, or is silent."""

    async def script(turn: Turn) -> None:
        for word in words:
            getattr(turn, word)()
        if isinstance(then, KVRelayError):
            raise then
        if then == "hang up":
            turn.hang_up()
        await silent(turn)

    return script


def an_error(code: str) -> KVRelayError:
    return BY_CODE[code](f"because of {code}")


def outputs(submission: types_pb2.Submission) -> dict[int, list[int]]:
    return {fork.index: list(fork.output_ids) for fork in submission.forks}


def again(cluster: FakeCluster) -> types_pb2.Submission:
    """The second attempt's first submission; without a prefill worker in reach, that is a decode worker's."""
    prefill, decode = ([one for one in fake.submissions if one.key.attempt == 2] for fake in cluster.fakes)
    return (prefill or decode)[0]


async def answers_whole(cluster: FakeCluster, **asked: Any) -> Any:
    answered = await cluster.answer([ANSWER], **asked)
    assert answered.error is None
    assert answered.tokens == [ANSWER]
    assert answered.ends == [("length", None)]
    assert answered.report.completion_tokens == len(ANSWER)
    return answered


@pytest.mark.parametrize(
    "said", [(), ("accepted",), ("accepted", "progress")], ids=["submitted", "accepted", "progressing"]
)
@pytest.mark.parametrize("then", ["hang up", EngineFailure("broken"), "silence"])
@pytest.mark.parametrize("count", [1, 2])
async def test_prefill_dies(text: TextModel, said: tuple[str, ...], then: Any, count: int) -> None:
    async with fake_cluster(text, prefill=count, prefill_s=0.05) as cluster:
        for fake in cluster.fakes[:count]:
            fake.scripts = [says(*said, then=then)] if fake is cluster.prefill else []
        answered = await answers_whole(cluster)
        assert answered.report.attempts in ((1, 2) if count == 2 else (2,))  # any may be asked first
        keys = [submission.key for fake in cluster.fakes for submission in fake.submissions]
        assert {key.request_id for key in keys} == {keys[0].request_id}


async def test_prefill_dies_after_its_first_tokens(text: TextModel) -> None:
    """Token 0 is out; its KV is gone."""
    async with fake_cluster(text) as cluster:

        async def expired(turn: Turn) -> None:
            await eventually(lambda: not cluster.client(cluster.prefill).connected)
            raise KVExpired("gone")

        cluster.prefill.scripts = [says("accepted", "first_tokens")]
        cluster.decode.scripts = [expired]
        answered = await answers_whole(cluster)
        assert answered.report.attempts == 2
        assert outputs(again(cluster)) == {0: ANSWER[:1]}
        await eventually(lambda: len(cluster.prefill.releases) == 1)


async def test_a_prefill_worker_that_is_replaced_under_a_held_handle(text: TextModel) -> None:
    """Its KV and its connection are gone for good, and the request waits for a decode worker."""
    async with fake_cluster(text, lease_s=0.03) as cluster:

        async def first_and_last(turn: Turn) -> None:
            await cluster.decode.stop()
            await eventually(lambda: not cluster.client(cluster.decode).connected)
            turn.first_tokens()

        old, decode = cluster.prefill, cluster.decode
        old.scripts = [first_and_last]
        decode.scripts = [says("accepted", then=WorkerLost("no holder"))]
        running = asyncio.create_task(answers_whole(cluster))
        await eventually(lambda: old.renewals)
        await old.stop()
        cluster.words.held.clear()
        cluster.fakes.remove(old)
        new = await cluster.add("prefill", epoch=8, address=old.record.address)
        cluster.registry.show(new.record, decode.record)
        await eventually(lambda: cluster.client(new).connected)
        await asyncio.sleep(0.05)  # the old connection is asked to renew
        await decode.start(decode.record.address)
        answered = await running
        assert answered.report.attempts == 2
        assert len(new.submissions) == 1


@pytest.mark.parametrize("spoken", range(5))
@pytest.mark.parametrize("then", ["hang up", EngineFailure("broken"), "silence"])
async def test_decode_dies_after_some_tokens(text: TextModel, spoken: int, then: Any) -> None:
    async with fake_cluster(text, decode_token_s=0.1) as cluster:
        cluster.decode.scripts = [says("accepted", "admitted", *["say"] * spoken, then=then)]
        answered = await answers_whole(cluster)
        known = 1 + spoken
        assert answered.report.attempts == 2
        assert [outputs(one) for one in cluster.prefill.submissions] == [{0: []}, {0: ANSWER[:known]}]
        later = cluster.decode.submissions[1:]
        assert [outputs(one) for one in later] == ([{0: ANSWER[: known + 1]}] if known + 1 < len(ANSWER) else [])
        first, second = cluster.prefill.submissions
        assert (first.key.attempt, second.key.attempt) == (1, 2)
        for name in ("prompt_ids", "params", "epoch", "fingerprint", "cache_salt"):
            assert getattr(first, name) == getattr(second, name)


@pytest.mark.parametrize("said", [(), ("accepted",)], ids=["submitted", "accepted"])
@pytest.mark.parametrize("then", ["hang up", "silence"])
async def test_decode_dies_before_it_has_the_kv(text: TextModel, said: tuple[str, ...], then: str) -> None:
    async with fake_cluster(text, decode_token_s=0.1) as cluster:
        cluster.decode.scripts = [says(*said, then=then)]
        answered = await answers_whole(cluster)
        assert answered.report.attempts == 2
        await eventually(lambda: len(cluster.prefill.releases) == 1)


async def test_decode_alone_resumes_where_it_was(text: TextModel) -> None:
    async with fake_cluster(text, prefill=0) as cluster:
        cluster.decode.scripts = [says("accepted", "say", "say"), says("accepted", "say")]
        answered = await answers_whole(cluster)
        assert answered.report.attempts == 3
        assert [outputs(one) for one in cluster.decode.submissions] == [{0: []}, {0: ANSWER[:2]}, {0: ANSWER[:3]}]


@pytest.mark.parametrize("code", RESUMABLE)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_resumable_error_is_resumed(text: TextModel, code: str, role: str) -> None:
    async with fake_cluster(text) as cluster:
        fake = cluster.prefill if role == "prefill" else cluster.decode
        fake.scripts = [says("accepted", then=an_error(code))]
        answered = await answers_whole(cluster)
        assert answered.report.attempts == 2
        labels = {"model_name": "test", "role": "router", "reason": code}
        assert cluster.metrics.registry.get_sample_value("kvrelay:request_resumes_total", labels) == 1
        assert fake.aborts == []


async def test_a_worker_that_has_no_room_now_is_asked_again_a_little_later(text: TextModel) -> None:
    """As often as it takes: nothing was begun, so these are no failed tries."""
    async with fake_cluster(text) as cluster:
        cluster.prefill.scripts = [says(then=Overloaded("full"))] * (2 * MAX_ATTEMPTS)
        answered = await answers_whole(cluster)
        assert answered.report.attempts == 2 * MAX_ATTEMPTS + 1


async def test_a_worker_that_never_has_room_ends_the_request_with_429(text: TextModel) -> None:
    async with fake_cluster(text, router_queue_s=0.2) as cluster:
        cluster.prefill.always = says(then=Overloaded("full"))
        answered = await cluster.answer([ANSWER])
        assert type(answered.error) is Overloaded
        assert answered.error.http_status == 429
        assert cluster.decode.submissions == []


@pytest.mark.parametrize("code", FINAL)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_any_other_error_ends_the_request(text: TextModel, code: str, role: str) -> None:
    async with fake_cluster(text) as cluster:
        fake = cluster.prefill if role == "prefill" else cluster.decode
        fake.scripts = [says("accepted", then=an_error(code))]
        answered = await cluster.answer([ANSWER])
        assert type(answered.error) is BY_CODE[code]
        assert str(answered.error) == f"because of {code}"
        assert answered.tokens == [ANSWER[:1] if role == "decode" else []]
        assert answered.report.attempts == 1


async def test_the_last_error_is_the_requests(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        errors = [EngineFailure(f"failure {number}") for number in range(1, MAX_ATTEMPTS + 1)]
        cluster.decode.scripts = [says("accepted", "admitted", "say", then=error) for error in errors]
        answered = await cluster.answer([[40 + index for index in range(30)]])
        assert type(answered.error) is EngineFailure
        assert str(answered.error) == f"failure {MAX_ATTEMPTS}"
        assert answered.report.attempts == MAX_ATTEMPTS
        numbers = [submission.key.attempt for submission in cluster.prefill.submissions]
        assert numbers == list(range(1, MAX_ATTEMPTS + 1))
        assert answered.tokens == [[40 + index for index in range(2 * MAX_ATTEMPTS)]]  # a prefix, without repeats


async def test_nobody_is_asked_again_once_all_is_said(text: TextModel) -> None:
    """A failure after the last token."""
    async with fake_cluster(text) as cluster:

        async def fails_late(turn: Turn) -> None:
            await honest(turn)
            raise EngineFailure("too late")

        cluster.prefill.scripts = [fails_late]
        cluster.decode.scripts = [fails_late]
        answered = await answers_whole(cluster)
        assert answered.report.attempts == 1


def together(count: int) -> Script:
    """Honest, but goes on only when `count` turns are being served."""
    serving = 0
    all_there = asyncio.Event()

    async def script(turn: Turn) -> None:
        nonlocal serving
        serving += 1
        if serving == count:
            all_there.set()
        await all_there.wait()
        await honest(turn)

    return script


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_forks_go_on_side_by_side_each_with_its_own_output(text: TextModel, role: str) -> None:
    async with fake_cluster(text, decode_token_s=1.0, prefill_s=1.0) as cluster:
        cluster.decode.scripts = [says("accepted", "admitted", "say", "say")]
        (cluster.prefill if role == "prefill" else cluster.decode).always = honest
        answers = [ANSWER, OTHER, [60, 61, EOS], ANSWER[::-1]]
        if role == "prefill":
            cluster.prefill.scripts = [honest, *[together(3)] * 3]
        else:
            cluster.decode.scripts += [together(3)] * 3
        answered = await cluster.answer(answers)
        assert answered.error is None
        assert answered.tokens == answers
        assert answered.ends == [("length", None), ("length", None), ("stop", None), ("length", None)]
        assert answered.report.attempts == 4
        first, *later = cluster.prefill.submissions
        assert outputs(first) == {0: [], 1: [], 2: [], 3: []}
        known = [outputs(one) for one in later]
        assert sorted(known, key=list) == [{0: ANSWER[:3]}, {1: OTHER[:3]}, {3: ANSWER[:2:-1]}]
        numbers = sorted(one.key.attempt for one in cluster.prefill.submissions)
        assert numbers == [1, 2, 3, 4]


async def test_forks_without_output_go_on_together(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        cluster.prefill.scripts = [says("accepted")]
        answered = await cluster.answer([ANSWER, OTHER])
        assert answered.tokens == [ANSWER, OTHER]
        assert outputs(again(cluster)) == {0: [], 1: []}
        assert answered.report.attempts == 2


async def test_one_forks_last_error_ends_them_all(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:

        async def second(turn: Turn) -> None:
            turn.accepted()
            turn.admitted()
            if 1 in turn.said:
                raise InvalidRequest("no")
            await silent(turn)

        cluster.decode.scripts = [says("accepted", "admitted")]
        cluster.decode.always = second
        answered = await cluster.answer([ANSWER, OTHER])
        assert type(answered.error) is InvalidRequest
        await eventually(lambda: len(cluster.decode.aborts) == 1)


async def test_resumed_forks_share_no_tries(text: TextModel) -> None:
    """Each has what is left after the attempts that it shared."""
    async with fake_cluster(text) as cluster:
        failing = says("accepted", then=Timeout("slow"))
        cluster.decode.always = failing
        answered = await cluster.answer([[40] * 20, [50] * 20])
        assert type(answered.error) is Timeout
        assert MAX_ATTEMPTS < answered.report.attempts <= 2 * MAX_ATTEMPTS - 1


async def test_what_an_old_attempt_still_says_is_ignored(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        old: list[Turn] = []

        async def fails(turn: Turn) -> None:
            old.append(turn)
            await says("accepted", "admitted", "say", then=EngineFailure("broken"))(turn)

        async def later(turn: Turn) -> None:
            turn.accepted()
            for _ in range(3):
                old[0].say()  # tokens that the new attempt has not reached
                old[0].failed(EngineFailure("still broken"))
            await honest(turn)

        cluster.decode.scripts = [fails, later]
        answered = await answers_whole(cluster)
        assert answered.report.attempts == 2


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_another_worker_takes_over(text: TextModel, victim: str) -> None:
    """The dead one does not come back."""
    async with fake_cluster(text, prefill=2, decode=2) as cluster:
        loser: list[Any] = []

        async def dies(turn: Turn) -> None:
            if not loser:
                loser.append(asyncio.create_task(turn.worker.stop()))
                await silent(turn)
            await honest(turn)

        for fake in cluster.fakes:
            if fake.role == victim:
                fake.always = dies
        answered = await answers_whole(cluster)
        assert answered.report.attempts == 2
        await loser[0]


async def test_a_worker_that_is_silent_is_given_up_for_another(text: TextModel) -> None:
    """Frozen, as by SIGSTOP: nothing comes and nothing breaks."""
    async with fake_cluster(text, decode=2, suspect_s=0.15, dead_s=0.3) as cluster:
        frozen: list[Any] = []

        async def freezes(turn: Turn) -> None:
            if not frozen:
                frozen.append(turn.worker)
                turn.worker.flowing.clear()
                await accepting(turn)
            await honest(turn)

        for fake in cluster.fakes:
            if fake.role == "decode":
                fake.always = freezes
        answered = await answers_whole(cluster)
        assert answered.report.decode_worker != frozen[0].record.worker_id
        frozen[0].flowing.set()


@pytest.mark.parametrize("sick", ["prefill", "decode", "holder"])
async def test_a_sick_worker_costs_a_request_one_try(text: TextModel, sick: str) -> None:
    """It is idle, and has the prompt's blocks by all expectations, so it looks like the best one."""
    async with fake_cluster(text, prefill=2, decode=2) as cluster:
        chosen = cluster.decode if sick == "decode" else cluster.prefill
        if sick != "holder":
            chosen.always = says("accepted", then=EngineFailure("sick"))

        async def reads(turn: Turn) -> None:
            if turn.handle is not None and turn.handle.address == chosen.record.address:
                raise PullStalled("no progress")
            await honest(turn)

        for fake in cluster.fakes:
            if fake.role == "decode" and sick == "holder":
                fake.always = reads
        attempts = {(await answers_whole(cluster, prompt=range(1, 50))).report.attempts for _ in range(10)}
        assert attempts == {1, 2}


async def test_a_worker_that_failed_is_asked_again_when_there_is_no_other(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        cluster.decode.scripts = [says("accepted", then=EngineFailure("once"))] * 2
        answered = await answers_whole(cluster)
        assert answered.report.attempts == 3
