"""A burst is answered or refused, and what it did to those accepted is told against the undisturbed."""

import json

import pytest

from bench.options import BurstOptions
from bench.router.burst import measure, tokens_per_s, tpot_ms
from bench.serve.completions_client import Outcome
from bench.serve.workload import TimedRequest
from common.settings import Bytes
from tests.support.checkpoints import make_random_checkpoint
from tests.support.process_tools import linux


def outcome(sent_s, *token_s):
    return Outcome(
        TimedRequest(0.0, (300,), len(token_s)),
        sent_s=sent_s,
        text_s=list(token_s),
        ended_s=token_s[-1],
        completion_tokens=len(token_s),
    )


def test_tpot_is_the_median_of_answers_with_a_second_token():
    some = [outcome(0.0, 1.0, 1.1), outcome(0.0, 1.0, 1.2, 1.4), outcome(0.0, 1.0, 1.5), outcome(0.0, 9.0)]
    assert tpot_ms(some) == pytest.approx(200.0)


def test_throughput_is_from_the_first_request_to_the_last_answer():
    assert tokens_per_s([outcome(1.0, 2.0, 3.0), outcome(2.0, 5.0)]) == pytest.approx(3 / 4)


@linux
async def test_a_whole_burst(tmp_path, capsys):
    model = make_random_checkpoint(tmp_path / "tiny")
    options = BurstOptions(
        model=str(model), max_num_seqs=2, times=10, max_queued_requests=4, prompt_tokens=8, output_tokens=8, runs=1,
        vocab_size=288, kv_cache_memory=Bytes(4 * 2**20), json=True,
    )  # fmt: skip
    assert await measure(options) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["capacity"], row["requests"], row["hung"], row["failed"]) == (2, 20, 0, 0)
    assert row["answered"] + row["refused"] == 20
    assert row["refused"] > 0
    assert row["tpot_ms_burst"] > 0
