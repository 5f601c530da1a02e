"""Proves that a run submits all that is known, counts each token once, and reports what the workers said."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.errors import EngineFailure, HandoverError, KVExpired, TokenMismatch
from common.log import request_id
from common.rpc.convert import params_from_proto
from common.rpc.pb import decode_pb2, prefill_pb2
from common.sampling import SamplingParams
from common.text.text_model import TextModel
from router.fleet.worker_client import WorkerClient
from router.metrics import RouterMetrics
from router.pipeline.generation import Generation, GenerationRequest, Report
from router.pipeline.request_run import RequestRun
from tests.support.fake_cluster import letters
from tests.support.fake_turns import a_token
from tests.support.redis_tools import a_record

PARAMS = SamplingParams(
    max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.75, top_k=4, min_p=0.25, presence_penalty=0.5,
    frequency_penalty=-0.5, repetition_penalty=1.25, seed=2**64 - 1, logit_bias=((3, -1.5),), logprobs=2,
    stop_token_ids=(8, 9), ignore_eos=True,
)  # fmt: skip
WORKER = cast(WorkerClient, SimpleNamespace(record=a_record(epoch=2**63 + 5, fingerprint="print")))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def a_run(text: TextModel, *, n: int = 1, clock: Clock | None = None, **request: Any) -> RequestRun:
    asked = GenerationRequest("request", (5, 6, 7), PARAMS, n, cache_salt="salt", **request)
    return RequestRun(Generation(asked), text, RouterMetrics("test"), clock or Clock())


def test_a_submission_carries_all_there_is_to_know(text: TextModel) -> None:
    run = a_run(text, n=3)
    for token in (a_token(0, 0, 40), a_token(2, 0, 41), a_token(2, 1, 42)):
        run.accept(token)
    submission = run.submission(run.answers, WORKER, run.next_attempt(run.answers))
    assert (submission.key.request_id, submission.key.attempt) == ("request", 1)
    assert (submission.epoch, submission.fingerprint, submission.cache_salt) == (2**63 + 5, "print", "salt")
    assert list(submission.prompt_ids) == [5, 6, 7]
    assert [(fork.index, list(fork.output_ids)) for fork in submission.forks] == [(0, [40]), (1, []), (2, [41, 42])]
    assert params_from_proto(submission.params) == PARAMS


def test_attempts_are_numbered_upward_and_a_fork_alone_has_its_own_name(text: TextModel) -> None:
    """A newer attempt of a name ends the older one at a worker, and forks run side by side."""
    run = a_run(text, n=2)
    keys = [run.next_attempt(answers) for answers in (run.answers, run.answers[:1], run.answers[1:])]
    assert [key.attempt for key in keys] == [1, 2, 3]
    assert len({key.request_id for key in keys}) == 3
    assert run.report.attempts == 3
    alone = a_run(text)
    assert alone.next_attempt(alone.answers).request_id == "request"


def test_each_new_token_counts_once_and_goes_out_once(text: TextModel) -> None:
    run = a_run(text, n=2)
    ids = letters(text, "ab")
    for fork in (0, 1):
        for index in (0, 1, 1, 0):
            run.accept(a_token(fork, index, ids[index]))
    assert run.report.completion_tokens == 4
    assert run.report.prompt_tokens == 3
    deltas = [run.outbox.get_nowait() for _ in range(run.outbox.qsize())]
    assert [(delta.index, delta.text) for delta in deltas] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


@pytest.mark.parametrize("fork", [2, 2**32 - 1])
def test_a_token_for_nobody_is_an_error(text: TextModel, fork: int) -> None:
    run = a_run(text, n=2)
    with pytest.raises(TokenMismatch, match=f"fork {fork}"):
        run.accept(a_token(fork, 0, 40))


def test_who_fails_is_remembered(text: TextModel) -> None:
    run = a_run(text)
    with pytest.raises(ValueError), run.blaming(WORKER):  # a bug of ours
        raise ValueError
    with pytest.raises(EngineFailure), run.blaming(WORKER, HandoverError):
        raise EngineFailure("not that")
    assert run.failed == set()
    with pytest.raises(KVExpired), run.blaming(WORKER, HandoverError):
        raise KVExpired("that")
    assert run.failed == {"worker-1"}


def test_times_are_those_of_the_first_and_the_last_token(text: TextModel) -> None:
    clock = Clock()
    run = a_run(text, n=2, clock=clock)
    for now, token in ((101.0, a_token(1, 0, 40)), (102.0, a_token(0, 0, 40)), (105.0, a_token(1, 1, 41))):
        clock.now = now
        run.accept(token)
    clock.now = 109.0
    run.accept(a_token(1, 1, 41))
    assert (run.report.first_token_s, run.report.last_token_s) == (1.0, 5.0)
    assert run.elapsed_s() == 9.0


def test_the_report_adds_up_attempts(text: TextModel) -> None:
    run = a_run(text)
    for cached in (16, 32):
        run.next_attempt(run.answers)
        run.note_prefill(prefill_pb2.FirstTokens(cached_tokens=cached, queue_s=0.25, prefill_s=0.5), "p")
        admitted = decode_pb2.Admitted(cached_tokens=cached, bytes=100, handover_s=0.125, queue_s=1.0, transport="shm")
        run.note_handover(admitted)
    assert run.report == Report(
        prompt_tokens=3, cached_tokens=16, attempts=2, prefill_worker="p", prefill_queue_s=0.5, prefill_s=1.0,
        handover_s=0.25, handover_bytes=200, transport="shm", decode_queue_s=2.0, decode_cached_tokens=32,
    )  # fmt: skip


def test_workers_know_a_request_by_the_clients_name_and_its_own(text: TextModel) -> None:
    """Two live requests of one client's name are two to a worker."""
    token = request_id.set("client-7")
    try:
        run = a_run(text, n=2)
    finally:
        request_id.reset(token)
    assert run.next_attempt(run.answers).request_id == "client-7:request"
    assert run.next_attempt(run.answers[1:]).request_id == "client-7:request.1"
