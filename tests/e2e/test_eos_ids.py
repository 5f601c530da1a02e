"""Every EOS id that generation_config.json lists ends an answer, and its recommendations are the defaults."""

import json
from pathlib import Path

from common.sampling import SamplingParams
from common.text.text_model import TextModel
from tests.support.checkpoints import make_random_checkpoint
from tests.support.http_over import NAME, http_over
from tests.support.in_process_cluster import local_cluster
from tests.support.recompute import Recompute, prompt
from tests.support.redis_process import RedisServer

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [prompt(20, seed=seed) for seed in range(4)]


async def test_any_listed_id_ends_an_answer_and_what_is_recommended_is_the_default(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    model = make_random_checkpoint(tmp_path / "model")
    answers = [Recompute(model, "float32")(ids, GREEDY) for ids in PROMPTS]
    ends = [answers[0][4], answers[1][0], answers[2][7]]  # of one in the middle, one at token 0, one later
    recommended = {"eos_token_id": ends, "temperature": 0.0}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    text = TextModel.load(model)
    wanted = []
    for answer in answers:
        stops = text.generation.eos_token_ids  # the tokenizer's own end is one, too
        place = next((place for place, token in enumerate(answer) if token in stops), None)
        wanted.append((len(answer), "length") if place is None else (place + 1, "stop"))
    assert [reason for _, reason in wanted[:3]] == ["stop"] * 3
    async with (
        local_cluster(model, redis_server.url) as cluster,
        http_over(cluster.pipeline, text, max_model_len=256) as over,
    ):
        for ids, (count, reason) in zip(PROMPTS, wanted, strict=True):
            body = {"model": NAME, "prompt": ids, "max_tokens": 12}  # greedy, as recommended
            _, reply = await over.ask("/v1/completions", body)
            assert reply["usage"]["completion_tokens"] == count
            assert (reply["choices"][0]["finish_reason"], reply["choices"][0]["stop_reason"]) == (reason, None)
            _, reply = await over.ask("/v1/completions", {**body, "ignore_eos": True})
            assert reply["usage"]["completion_tokens"] == 12
        await cluster.assert_all_free()
