"""An engine in-process answers every request of every stream, one after another within each."""

import pytest

from bench.engines import build, settings
from bench.router.inprocess import Driver, InprocessStreams
from common.errors import EngineFailure
from tests.support.checkpoints import make_random_checkpoint

PROMPTS = (((300, 301), (302, 303)), ((304, 305), (306, 307)))


@pytest.fixture
def engine(tmp_path):
    model = str(make_random_checkpoint(tmp_path / "model", vocab_size=512))
    built = build(settings(model, "auto", threads=1, max_model_len=16, max_num_seqs=2))
    yield built.engine
    load = built.engine.load()
    built.pool.close()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.total_blocks)


def test_every_request_gets_its_tokens_and_streams_do_not_overtake_themselves(engine):
    answers = Driver(engine, InprocessStreams("m", "auto", 1, 3, PROMPTS)).run()
    assert [len(answer.token_s) for answer in answers] == [3] * 4
    for first, second in (answers[:2], answers[2:]):
        assert first.sent_s <= first.token_s[0] <= first.token_s[-1] <= second.sent_s <= second.token_s[0]


def test_a_step_that_fails_ends_the_run(engine, monkeypatch):
    def fail(batch):
        raise RuntimeError("broken kernel")

    monkeypatch.setattr(engine._runner, "forward", fail)
    with pytest.raises(EngineFailure, match="broken kernel"):
        Driver(engine, InprocessStreams("m", "auto", 1, 3, PROMPTS)).run()
