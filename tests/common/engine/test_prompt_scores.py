"""The engine scores every prompt token once, within the bound of a step, also when it is preempted on the way."""

import pytest
import torch

from common.engine.sampler import take_scores
from common.engine.sequence import Sequence
from tests.support.builders import Stepper, alone, answers, assert_all_free, kv_of, logits_of, scheduler, sequence


def run(stepper: Stepper, bound: int) -> tuple[dict[str, dict[int, float]], dict[tuple[str, int], list[int]]]:
    """Log-probabilities by key and position, and the answers."""
    scored: dict[str, dict[int, float]] = {}
    outputs = []
    while stepper.scheduler.running or stepper.scheduler.waiting:
        assert len(outputs) < 300, "starved"
        batch = stepper.scheduler.schedule()
        assert sum(len(chunk.scored) for chunk in batch.chunks) <= bound
        logits, scores = take_scores(stepper.runner.forward(batch), batch)
        outputs.append(stepper.scheduler.update(batch, stepper.sampler(logits, batch), scores))
        for score in outputs[-1].scores:
            known = scored.setdefault(score.sequence.key, {})
            for position, logprobs in enumerate(score.logprobs, score.first):
                assert position not in known
                assert len(logprobs) == 1 + (score.sequence.params.prompt_logprobs or 0)
                known[position] = logprobs[0].logprob
    return scored, answers(outputs)


def wanted(one: Sequence) -> dict[int, float]:
    ids = one.prompt_ids
    rows = [logits_of(kv_of(tuple(ids[:position]))).log_softmax(0) for position in range(1, len(ids))]
    return {position: float(row[ids[position]]) for position, row in enumerate(rows, 1)}


@pytest.mark.parametrize("bound", [1, 3, 128])
@pytest.mark.parametrize("blocks", [8, 9, 12, 40], ids="blocks {}".format)
@pytest.mark.parametrize("prefill_only", [False, True])
def test_every_prompt_token_once(bound: int, blocks: int, prefill_only: bool) -> None:
    sched = scheduler(blocks, max_scored_tokens=bound)
    stepper = Stepper(sched)
    asked = [sequence(size, key=f"s{size}", prompt_logprobs=size % 3, max_tokens=8) for size in (1, 2, 9, 17)]
    plain = [sequence(size, key=f"p{size}", max_tokens=8) for size in (3, 13)]
    for one in (*asked, *plain):
        one.prefill_only = prefill_only and one in asked
        sched.add(one)
    prompts = {one.key: (wanted(one), alone(one)) for one in (*asked, *plain)}
    update = sched.update

    def freeing(*arguments):
        output = update(*arguments)
        for _, parked in output.parked:
            sched.pool.free(parked)
        return output

    sched.update = freeing
    scored, given = run(stepper, bound)
    for one in asked:
        assert scored.get(one.key, {}) == pytest.approx(prompts[one.key][0])
    assert scored.keys() <= {one.key for one in asked}
    for (key, _), tokens in given.items():
        assert tokens == prompts[key][1][: len(tokens)]
    assert sched.num_preemptions or blocks > 8 or prefill_only
    assert_all_free(sched)


def test_rows_without_scores_pass_as_they_are() -> None:
    sched = scheduler(8)
    sched.add(sequence(4))
    logits = torch.ones(1, 64)
    assert take_scores(logits, sched.schedule()) == (logits, ())
