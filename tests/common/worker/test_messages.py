"""A submission becomes the right sequences, or is refused, naming its field; what came of it goes out as it was."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

import tests.support.builders as builders
from common.block_hash import root_hash
from common.engine.batch import EngineLoad, PromptScores, Sample, TokenOutput
from common.engine.sequence import Sequence
from common.errors import InvalidRequest
from common.rpc.convert import finish_reason_from_proto, logprob_from_proto, scores_from_proto
from common.rpc.pb import types_pb2
from common.sampling import FinishReason, Logprob, SamplingParams
from common.worker.messages import load_to_proto, scores_to_proto, sequences_of, token_to_proto
from tests.support.checkpoints import make_random_checkpoint
from tests.support.in_process_cluster import LocalCluster, LocalWorker, local_cluster
from tests.support.redis_process import RedisServer
from tests.support.worker_stream import GREEDY, stream_to, submission

VOCAB = 288  # of the random checkpoint
CONTEXT = 64  # tokens
PLACES = 8


def sequences(message: types_pb2.Submission) -> list[Sequence]:
    engine = builders.engine(builders.scheduler(32, max_model_len=CONTEXT, max_num_seqs=PLACES))
    return sequences_of(message, key="k", engine=engine, model_revision="model", vocab_size=VOCAB)


def test_forks_with_equal_output_are_one_sequence() -> None:
    forks = [(0, [7]), (1, [8, 9]), (5, [7]), (2, ())]
    made = sequences(submission([3, 4], forks=forks, cache_salt="salt"))
    assert [(one.token_ids, one.num_prompt_tokens, one.forks) for one in made] == [
        ([3, 4, 7], 2, (0, 5)),
        ([3, 4, 8, 9], 2, (1,)),
        ([3, 4], 2, (2,)),
    ]
    assert {one.key for one in made} == {"k"}
    assert {one.root for one in made} == {root_hash("model", cache_salt="salt")}


def test_parameters_arrive_as_they_were_sent() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.5, seed=2**64 - 1, logprobs=0, stop_token_ids=(VOCAB - 1,))
    assert [one.params for one in sequences(submission(params=params))] == [params]


@pytest.mark.parametrize(
    ("prompt", "output"), [(1, 0), (CONTEXT - 1, 0), (1, CONTEXT - 2), (CONTEXT - 3, 2), (CONTEXT - 2, 1)]
)
def test_whatever_leaves_room_for_one_token_is_taken(prompt: int, output: int) -> None:
    params = replace(GREEDY, max_tokens=CONTEXT)
    [made] = sequences(submission([0] * prompt, forks=[(0, [VOCAB - 1] * output)], params=params))
    assert made.num_tokens == prompt + output


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no fork": ({"forks": []}, "forks"),
    "a fork twice": ({"forks": [(0, ()), (1, ()), (0, ())]}, "forks"),
    "a fork twice with different output": ({"forks": [(0, [5]), (0, [6])]}, "forks"),
    "more forks than places": ({"forks": [(i, ()) for i in range(PLACES + 1)]}, "n"),
    "empty prompt": ({"prompt_ids": []}, "prompt_ids"),
    "empty prompt with output": ({"prompt_ids": [], "forks": [(0, [5])]}, "prompt_ids"),
    "token beyond the vocabulary": ({"prompt_ids": [5, VOCAB]}, "prompt_ids"),
    "token far beyond": ({"prompt_ids": [2**32 - 1, 5]}, "prompt_ids"),
    "output beyond the vocabulary": ({"forks": [(0, [5]), (1, [VOCAB])]}, "forks"),
    "prompt as long as the context": ({"prompt_ids": [5] * CONTEXT}, "prompt_ids"),
    "prompt longer than the context": ({"prompt_ids": [5] * (CONTEXT + 1)}, "prompt_ids"),
    "prompt and output as long as the context": (
        {"prompt_ids": [5] * (CONTEXT - 2), "forks": [(0, [5, 6])]},
        "prompt_ids",
    ),
    "all tokens there already": ({"forks": [(0, [5] * GREEDY.max_tokens)]}, "forks"),
    "one of two has all its tokens": ({"forks": [(0, ()), (1, [5] * GREEDY.max_tokens)]}, "forks"),
}
BAD_PARAMS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 0},
    "min_tokens": {"min_tokens": GREEDY.max_tokens + 1},
    "temperature": {"temperature": float("nan")},
    "top_p": {"top_p": 0.0},
    "top_k": {"top_k": -1},
    "min_p": {"min_p": 1.5},
    "presence_penalty": {"presence_penalty": 2.5},
    "frequency_penalty": {"frequency_penalty": float("-inf")},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "logprobs": {"logprobs": 21},
    "logit_bias": {"logit_bias": ((VOCAB, 1.0),)},
    "stop_token_ids": {"stop_token_ids": (VOCAB,)},
}
BAD |= {f"params: {name}": ({"params": replace(GREEDY, **changes)}, name) for name, changes in BAD_PARAMS.items()}


@pytest.mark.parametrize(("fields", "field"), BAD.values(), ids=BAD)
def test_a_bad_submission_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sequences(submission(**fields))
    assert refused.value.field == field


uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
logprobs = st.builds(Logprob, token_id=uint32, logprob=st.floats(width=32, allow_nan=False), rank=uint32)
SEQUENCE = Sequence("s", [1, 2], 2, SamplingParams())


def token_from_proto(message, sequence):
    stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
    reason = finish_reason_from_proto(message)
    return TokenOutput(sequence, message.fork, message.index, sample_from_proto(message), reason, stop_token_id)


def sample_from_proto(message):
    return Sample(message.token_id, tuple(logprob_from_proto(logprob) for logprob in message.logprobs))


def load_from_proto(message):
    return EngineLoad(
        running=message.running,
        waiting=message.waiting,
        waiting_tokens=message.waiting_tokens,
        total_blocks=message.total_blocks,
        free_blocks=message.free_blocks,
        reserved_blocks=message.reserved_blocks,
        steps=message.progress,
    )


def wired(message):
    """The message as it arrives."""
    return type(message).FromString(message.SerializeToString())


@given(uint32, st.lists(st.lists(logprobs, max_size=3).map(tuple), max_size=3).map(tuple))
def test_scores_come_out_as_they_went_in(first, sent):
    key = types_pb2.AttemptKey(request_id="r", attempt=2)
    message = wired(scores_to_proto(PromptScores(SEQUENCE, first, sent), key))
    assert (message.key, message.first, scores_from_proto(message)) == (key, first, list(sent))


@given(
    st.builds(
        TokenOutput,
        sequence=st.just(SEQUENCE),
        fork=uint32,
        index=uint32,
        sample=st.builds(Sample, token_id=uint32, logprobs=st.lists(logprobs, max_size=3).map(tuple)),
        finish_reason=st.none() | st.sampled_from(FinishReason),
        stop_token_id=st.none() | uint32,
    )
)
def test_tokens_come_out_as_they_went_in(sent):
    message = wired(token_to_proto(sent))
    assert token_from_proto(message, SEQUENCE) == sent
    assert sample_from_proto(message) == sent.sample
    assert finish_reason_from_proto(message) is sent.finish_reason


@given(
    st.builds(
        EngineLoad,
        running=uint32,
        waiting=uint32,
        waiting_tokens=uint64,
        total_blocks=uint32,
        free_blocks=uint32,
        reserved_blocks=uint32,
    ),
    uint32,
)
def test_a_load_comes_out_as_it_went_in(sent, held):
    message = wired(load_to_proto(sent, held_blocks=held))
    assert load_from_proto(message) == sent
    assert (message.held_blocks, message.reserved_blocks) == (held, sent.reserved_blocks)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, redis_server: RedisServer) -> AsyncIterator[LocalCluster]:
    async with local_cluster(model, redis_server.url, max_model_len=CONTEXT, max_num_seqs=PLACES) as cluster:
        yield cluster


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("index", [0, 1], ids=["prefill", "decode"])
async def test_a_worker_refuses_a_bad_submission_before_anything_runs(cluster: LocalCluster, index: int) -> None:
    """Also what comes after it on the same stream is served."""
    one: LocalWorker = cluster.local[index]
    tokens: list[int] = []
    one.worker.metrics.on_step = lambda output: tokens.append(output.num_batched_tokens)  # type: ignore[method-assign]
    async with stream_to(one) as stream:
        for name, (fields, field) in BAD.items():
            await stream.submit(request=name, **fields)
            code = "context_length_exceeded" if "context" in name else "invalid_request"
            assert await stream.failure(name) == (code, field)
            assert [kind for kind, _ in stream.of(name)] == ["failed"]
        assert tokens == []
        await stream.submit([3, 4, 5], params=replace(GREEDY, max_tokens=1))
        [token] = (await stream.answer())[0]
        assert token.finish_reason == types_pb2.FINISH_REASON_LENGTH
    await cluster.assert_all_free()
