"""Proves that the pipeline carries a request through both pools and, however it ends, leaves nothing in them."""

import asyncio
from typing import Any

import pytest

from common.errors import KVRelayError, NoWorker, RequestTimeout, TokenMismatch
from common.rpc.pb import types_pb2
from common.text.text_model import TextModel
from router.pipeline.generation import TokenText
from router.pipeline.pipeline import MAX_HANDOVERS
from tests.support.fake_cluster import PROMPT, Answered, FakeCluster, fake_cluster, letters
from tests.support.fake_turns import EOS, Turn, a_token, accepting, endless, first_then_no_decode, honest
from tests.support.redis_tools import eventually

STREAM_OF_4 = [40, 41, 42, 43]


def forks(submission: types_pb2.Submission) -> dict[int, list[int]]:
    return {fork.index: list(fork.output_ids) for fork in submission.forks}


async def test_a_request_goes_through_both_pools(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        answered = await cluster.answer([letters(text, "Paris")], cache_salt="salt")
        assert answered.error is None
        assert answered.texts == ["Paris"]
        assert answered.tokens == [letters(text, "Paris")]
        assert answered.ends == [("length", None)]
        [to_prefill], [to_decode] = cluster.prefill.submissions, cluster.decode.submissions
        assert forks(to_prefill) == {0: []}
        assert forks(to_decode) == {0: letters(text, "P")}
        assert to_prefill.key == to_decode.key
        assert to_decode.cache_salt == "salt"
        [turn] = cluster.decode.turns
        assert (turn.handle.key, turn.handle.num_tokens) == (to_prefill.key, len(PROMPT))
        assert cluster.prefill.aborts == cluster.decode.aborts == cluster.prefill.releases == []


async def test_the_report_is_what_the_workers_said(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        report = (await cluster.answer([STREAM_OF_4, STREAM_OF_4])).report
        assert (report.prompt_tokens, report.completion_tokens, report.cached_tokens) == (4, 8, 3)
        assert (report.attempts, report.prefill_worker, report.decode_worker) == (1, "prefill-0", "decode-0")
        assert (report.prefill_queue_s, report.prefill_s, report.decode_queue_s) == (0.25, 0.5, 0.5)
        assert (report.transport, report.handover_bytes, report.handover_s) == ("fake", 7, 0.125)
        assert report.decode_cached_tokens == 1
        assert 0 < report.first_token_s <= report.last_token_s


async def test_without_a_prefill_pool_the_decode_worker_computes_the_prompt(text: TextModel) -> None:
    async def computes(turn: Turn) -> None:
        turn.accepted()
        turn.tokens(*turn.next_tokens(), cached_tokens=2, queue_s=0.25, prefill_s=0.5)
        await honest(turn)

    async with fake_cluster(text, prefill=0) as cluster:
        cluster.decode.scripts = [computes]
        answered = await cluster.answer([STREAM_OF_4])
        assert answered.tokens == [STREAM_OF_4]
        [turn] = cluster.decode.turns
        assert turn.handle is None
        assert forks(turn.submission) == {0: []}
        report = answered.report
        assert (report.prefill_worker, report.decode_worker) == ("decode-0", "decode-0")
        assert (report.cached_tokens, report.prefill_queue_s, report.prefill_s) == (2, 0.25, 0.5)
        assert (report.transport, report.handover_bytes) == ("", 0)


async def test_computing_a_prompt_takes_longer_than_a_token(text: TextModel) -> None:
    async def slow(turn: Turn) -> None:
        turn.accepted()
        await asyncio.sleep(0.3)
        await honest(turn)

    async with fake_cluster(text, prefill=0, decode_token_s=0.1) as cluster:
        cluster.decode.scripts = [slow]
        answered = await cluster.answer([STREAM_OF_4])
        assert (answered.tokens, answered.report.attempts) == ([STREAM_OF_4], 1)


@pytest.mark.parametrize(
    ("answer", "params", "request_", "reason", "released"),
    [
        ([EOS], {"max_tokens": 9}, {}, "stop", 0),
        ([40], {"max_tokens": 1}, {}, "length", 0),
        ([40], {"max_tokens": 9, "stop_token_ids": (40,)}, {}, "stop", 0),
        ("a", {"max_tokens": 9}, {"stop": ("a",)}, "stop", 1),  # the worker can't know
        ("a", {"max_tokens": 1}, {"stop": ("a",)}, "stop", 0),
    ],
    ids=["EOS", "length", "stop token", "stop string", "stop string and length"],
)
@pytest.mark.parametrize("n", [1, 3])
async def test_decode_never_hears_of_what_token_0_finishes(
    text: TextModel, answer: Any, params: dict[str, Any], request_: dict[str, Any], reason: str, released: int, n: int
) -> None:
    async with fake_cluster(text) as cluster:
        ids = letters(text, answer) if isinstance(answer, str) else answer
        answered = await cluster.answer([ids] * n, params=params, **request_)
        assert answered.error is None
        assert [end for end, _ in answered.ends] == [reason] * n
        assert answered.report.completion_tokens == n
        assert cluster.decode.commands[1:] == []
        await eventually(lambda: len(cluster.prefill.releases) == released)


async def test_only_live_forks_go_on(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        a, b, c = ([EOS], letters(text, "x"), letters(text, "yes"))
        answered = await cluster.answer([a, b, c], params={"max_tokens": 3}, stop=("x",))
        assert answered.texts == ["", "", "yes"]
        assert answered.ends == [("stop", None), ("stop", "x"), ("length", None)]
        [turn] = cluster.decode.turns
        assert forks(turn.submission) == {2: c[:1]}
        assert cluster.prefill.releases == []  # the decode worker did
        assert answered.report.completion_tokens == 5


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_aborts_its_fork_only(text: TextModel, include: bool) -> None:
    async with fake_cluster(text) as cluster:
        answers = [letters(text, "one two three"), letters(text, "four five six")]
        answered = await cluster.answer(answers, stop=(" tw",), include_stop_str_in_output=include)
        assert answered.texts == ["one tw" if include else "one", "four five six"]
        assert answered.ends == [("stop", " tw"), ("length", None)]
        await eventually(lambda: [list(abort.forks) for abort in cluster.decode.aborts] == [[0]])
        assert answered.report.completion_tokens == 6 + len("four five six")


async def test_the_last_stop_string_ends_the_attempt(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        cluster.decode.always = endless
        answered = await cluster.answer([letters(text, "a;" + "b" * 500)], stop=(";",))
        assert answered.texts == ["a"]
        await eventually(lambda: [list(abort.forks) for abort in cluster.decode.aborts] == [[0]])


async def test_the_text_of_what_ends_an_answer_is_hidden_and_its_token_counts(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        stop = letters(text, "!")[0]
        answers = [[*letters(text, "ab"), EOS], [*letters(text, "ab"), stop]]
        answered = await cluster.answer(answers, params={"max_tokens": 9, "stop_token_ids": (stop,)})
        assert answered.texts == ["ab", "ab"]
        assert answered.ends == [("stop", None), ("stop", stop)]
        assert answered.tokens == answers
        assert answered.report.completion_tokens == 6


async def test_logprobs_come_with_their_tokens(text: TextModel) -> None:
    async def first(turn: Turn) -> None:
        logprobs = [types_pb2.Logprob(token_id=40, logprob=-0.5, rank=1)]
        turn.first_tokens([a_token(0, 0, 40, "length", logprobs=logprobs)])

    async with fake_cluster(text) as cluster:
        cluster.prefill.scripts = [first]
        [delta] = (await cluster.answer([[40]])).deltas
        [token] = delta.tokens
        assert isinstance(token, TokenText)
        assert [(one.token_id, one.logprob, one.rank) for one in token.logprobs] == [(40, -0.5, 1)]


def after(*tokens: types_pb2.Token) -> Any:
    """Token 1 of STREAM_OF_4, and then these."""

    async def script(turn: Turn) -> None:
        turn.accepted()
        turn.admitted()
        turn.say()
        turn.tokens(*tokens)
        await honest(turn)

    return script


@pytest.mark.parametrize(
    "tokens",
    [[a_token(0, 1, 41)], [a_token(0, 0, 40), a_token(0, 1, 41)], [a_token(0, 0, 40)] * 50],
    ids=["the last", "all", "the first, often"],
)
async def test_the_same_token_again_is_ignored(text: TextModel, tokens: list[types_pb2.Token]) -> None:
    async with fake_cluster(text) as cluster:
        cluster.decode.scripts = [after(*tokens)]
        answered = await cluster.answer([STREAM_OF_4])
        assert (answered.tokens, answered.error) == ([STREAM_OF_4], None)
        assert answered.report.completion_tokens == 4


@pytest.mark.parametrize(
    "token",
    [a_token(0, 1, 99), a_token(0, 0, 99), a_token(0, 3, 43), a_token(1, 0, 40), a_token(0, 2, 42, "tired")],
    ids=["another", "another first", "a gap", "no such fork", "no such reason"],
)
async def test_a_token_that_cant_be_ends_the_request(text: TextModel, token: types_pb2.Token) -> None:
    async with fake_cluster(text) as cluster:
        cluster.decode.scripts = [after(token)]
        answered = await cluster.answer([STREAM_OF_4])
        assert type(answered.error) is (KVRelayError if token.finish_reason else TokenMismatch)
        assert answered.tokens == [STREAM_OF_4[:2]]
        assert answered.report.attempts == 1
        await eventually(lambda: len(cluster.decode.aborts) == 1)


@pytest.mark.parametrize("tokens", [[a_token(0, 1, 40)], [a_token(7, 0, 40)], [a_token(0, 0, 40), a_token(0, 0, 41)]])
async def test_kv_of_a_first_token_that_cant_be_is_released(text: TextModel, tokens: list[types_pb2.Token]) -> None:
    async def first(turn: Turn) -> None:
        turn.first_tokens(tokens)

    async with fake_cluster(text) as cluster:
        cluster.prefill.scripts = [first]
        answered = await cluster.answer([STREAM_OF_4])
        assert type(answered.error) is TokenMismatch
        await eventually(lambda: len(cluster.prefill.releases) == 1)
        assert cluster.decode.submissions == []


async def test_tokens_after_the_end_are_ignored(text: TextModel) -> None:
    async def goes_on(turn: Turn) -> None:
        turn.accepted()
        turn.admitted()
        turn.tokens(a_token(0, 1, letters(text, ";")[0]))
        for index in range(2, 20):
            turn.tokens(a_token(0, index, 99))
        turn.say(3)

    async with fake_cluster(text) as cluster:
        cluster.decode.scripts = [goes_on]
        answered = await cluster.answer([letters(text, "a;.."), letters(text, "long")], stop=(";",))
        assert (answered.texts, answered.error) == (["a", "long"], None)
        await eventually(lambda: [list(abort.forks) for abort in cluster.decode.aborts] == [[0]])


async def test_after_some_failed_handovers_the_decode_worker_computes_the_prompt(text: TextModel) -> None:
    async def forgets(turn: Turn) -> None:
        turn.first_tokens([a_token(0, len(turn.said[0]), 40)], handle=None)
        turn.worker.words.held.clear()

    async with fake_cluster(text) as cluster:
        cluster.prefill.always = forgets
        answered = await cluster.answer([[40] * 9])
        assert (answered.error, answered.tokens) == (None, [[40] * 9])
        assert len(cluster.prefill.submissions) == MAX_HANDOVERS
        assert [list(fork.output_ids) for fork in cluster.decode.submissions[0].forks] == [[40] * MAX_HANDOVERS]


async def run_until_late(cluster: FakeCluster) -> Answered:
    answered = await cluster.answer([[40] * 1000])
    assert type(answered.error) is RequestTimeout
    return answered


@pytest.mark.parametrize("where", ["queue", "prefill", "between", "hand-over", "decode"])
async def test_a_request_that_takes_too_long_ends_everywhere(text: TextModel, where: str) -> None:
    """The other deadlines are longer here."""
    async with fake_cluster(text, request_s=0.3) as cluster:
        if where == "queue":
            await cluster.lose(cluster.decode)
        elif where == "prefill":
            cluster.prefill.scripts = [accepting]
        elif where == "between":
            cluster.prefill.scripts = [first_then_no_decode]
        elif where == "hand-over":
            cluster.decode.scripts = [accepting]
        elif where == "decode":
            cluster.decode.scripts = [endless]
        answered = await run_until_late(cluster)
        assert bool(answered.deltas) == (where in ("between", "hand-over", "decode"))


@pytest.mark.parametrize("where", ["queue", "between"])
async def test_waiting_for_a_worker_has_an_end(text: TextModel, where: str) -> None:
    async with fake_cluster(text, router_queue_s=0.1) as cluster:
        if where == "queue":
            await cluster.lose(cluster.decode)
        cluster.prefill.scripts = [first_then_no_decode]
        answered = await cluster.answer([STREAM_OF_4])
        assert type(answered.error) is NoWorker
        assert len(answered.deltas) == (where == "between")
        assert len(cluster.prefill.submissions) == (where == "between")


async def test_many_requests_at_once(text: TextModel) -> None:
    async with fake_cluster(text, prefill=2, decode=3) as cluster:
        cluster.words.answers = []
        answers = [[40 + index] * 20 for index in range(4)]
        generation = [cluster.generation(answers) for _ in range(60)]
        results = await asyncio.gather(*map(cluster.run, generation))
        assert all(one.tokens == answers and one.error is None for one in results)
        for role in ("prefill", "decode"):
            turns = [len(fake.turns) for fake in cluster.fakes if fake.role == role]
            assert sum(turns) == 60
            assert max(turns) - min(turns) <= 4  # even, but for loads that are told a moment late


async def test_a_bug_of_ours_is_an_error_without_a_second_try(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_cluster(text) as cluster:
        monkeypatch.setattr(cluster.workers, "pick_prefill", lambda *_: 1 / 0)
        answered = await cluster.answer([STREAM_OF_4])
        assert (type(answered.error), str(answered.error)) == (KVRelayError, "internal error")
        assert "request failed" in caplog.messages
