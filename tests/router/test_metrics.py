"""Proves, over requests that end in every way there is, that each counter and histogram of the router is exact."""

import asyncio
from contextlib import aclosing

from common.errors import EngineFailure, InvalidRequest
from common.text.text_model import TextModel
from router.metrics import RouterMetrics
from tests.support.fake_cluster import fake_cluster, letters
from tests.support.fake_turns import EOS, Turn, endless, honest, silent
from tests.support.redis_tools import eventually

ENDS = "request_success_total"


def counts(metrics: RouterMetrics) -> dict[str, float]:
    """All counters and the numbers of observations but zeros, by name and own label."""
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in ("model_name", "role")]
            if sample.name.startswith("kvrelay:") and sample.name.endswith(("_total", "_count")) and sample.value:
                found[" ".join((sample.name.removeprefix("kvrelay:"), *labels))] = sample.value
    return found


def complete(first: int = 1, gaps: int = 0, **ends: int) -> dict[str, float]:
    """Of requests with so many first tokens and tokens after them, of which all are complete."""
    phases = ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time")
    found: dict[str, float] = {f"{name}_seconds_count": first for name in (*phases, "time_to_first_token")}
    if gaps:
        found |= {"inter_token_latency_seconds_count": gaps, "request_time_per_output_token_seconds_count": first}
    return found | {f"{ENDS} {reason}": count for reason, count in ends.items()}


async def test_eos_length_and_a_stop_string_are_each_an_answer_that_ended(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        await cluster.answer([[*letters(text, "ab"), EOS]], params={"max_tokens": 9})
        assert counts(cluster.metrics) == complete(gaps=2, stop=1)
        await cluster.answer([letters(text, "ab")])
        assert counts(cluster.metrics) == complete(2, gaps=3, stop=1, length=1)
        await cluster.answer([letters(text, "abcdef")], stop=("b",))
        assert counts(cluster.metrics) == complete(3, gaps=4, stop=2, length=1)


async def test_a_stop_string_in_token_0_has_no_gap(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        await cluster.answer([letters(text, "abc")], stop=("a",))
        assert counts(cluster.metrics) == complete(stop=1)


async def test_several_answers_have_one_first_token_and_an_end_each(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        await cluster.answer([letters(text, "abcd"), [*letters(text, "xy"), EOS], letters(text, "abcd")], stop=("x",))
        assert counts(cluster.metrics) == complete(gaps=6, length=2, stop=1)


async def test_the_first_token_is_observed_when_it_comes_and_who_leaves_is_an_abort(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        cluster.decode.scripts = [endless]
        generation = cluster.generation([letters(text, "abcdef")], params={"max_tokens": 100})
        async with aclosing(cluster.pipeline.generate(generation)) as deltas:
            await anext(deltas)
            assert counts(cluster.metrics)["time_to_first_token_seconds_count"] == 1
        told = counts(cluster.metrics)
        told.pop("inter_token_latency_seconds_count", None)  # as many as came before it was closed
        assert told == {"time_to_first_token_seconds_count": 1, f"{ENDS} abort": 1}


async def test_an_error_before_the_first_token_is_no_first_token(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:

        async def fails(turn: Turn) -> None:
            turn.failed(InvalidRequest("no"))

        cluster.prefill.scripts = [fails]
        answered = await cluster.answer([letters(text, "ab")])
        assert isinstance(answered.error, InvalidRequest)
        assert counts(cluster.metrics) == {f"{ENDS} refused": 1}


async def test_a_resume_counts_its_reason_and_the_request_once(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:

        async def fails_later(turn: Turn) -> None:
            turn.accepted()
            turn.failed(EngineFailure("gone"))

        cluster.decode.scripts = [fails_later]
        answered = await cluster.answer([letters(text, "abcd")])
        assert answered.error is None
        assert counts(cluster.metrics) == complete(gaps=3, length=1) | {"request_resumes_total engine_failure": 1}


async def test_a_request_that_fails_for_good_is_an_error(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:

        async def fails(turn: Turn) -> None:
            turn.failed(EngineFailure("gone"))

        cluster.prefill.always = fails
        answered = await cluster.answer([letters(text, "ab"), letters(text, "cd")])
        cluster.prefill.always = honest
        assert isinstance(answered.error, EngineFailure)
        assert counts(cluster.metrics) == {f"{ENDS} error": 2, "request_resumes_total engine_failure": 5}


async def test_who_leaves_before_the_first_token_is_an_abort(text: TextModel) -> None:
    async with fake_cluster(text) as cluster:
        cluster.prefill.scripts = [silent]
        task = asyncio.create_task(cluster.answer([letters(text, "ab")]))
        await eventually(lambda: bool(cluster.prefill.turns))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert counts(cluster.metrics) == {f"{ENDS} abort": 1}
