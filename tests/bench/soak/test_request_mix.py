"""A soak's requests are the same for the same seed, of many kinds, and within the context."""

import random

import pytest

from bench.soak.request_mix import SAMPLING, Template, draw, make_templates, with_stop


def prompt_of(template: Template) -> str:
    return template.body["messages"][0]["content"] if template.chat else template.body["prompt"]


def test_a_seed_makes_the_same_requests_and_another_one_others():
    assert make_templates(20, 1, 2048) == make_templates(20, 1, 2048)
    assert make_templates(20, 1, 2048) != make_templates(20, 2, 2048)


def test_every_answer_is_determined_and_all_kinds_come():
    templates = make_templates(200, 0, 2048)
    for template in templates:
        assert template.body["temperature"] == 0 or "seed" in template.body
    assert {template.chat for template in templates} == {True, False}
    assert {template.n for template in templates} == {1, 2, 3}
    for key in ("ignore_eos", "stop_token_ids", "min_tokens", "logprobs", *{k for kind in SAMPLING for k in kind}):
        assert any(key in template.body for template in templates), key
    starts = [prompt_of(template)[:32] for template in templates if len(prompt_of(template)) > 32]
    assert len(set(starts)) < len(starts)  # shared prefixes
    assert {bool(template.body["max_tokens"] == 1) for template in templates} == {True, False}


@pytest.mark.parametrize("max_model_len", [256, 512, 2048])
def test_prompts_and_answers_fit_even_at_a_token_a_character(max_model_len):
    for template in make_templates(200, 0, max_model_len):
        assert len(prompt_of(template)) > 0
        assert len(prompt_of(template)) + template.body["max_tokens"] + 100 <= max_model_len


def test_a_stop_string_is_out_of_the_middle_of_the_answer():
    template = Template("t0", False, {"prompt": "x"})
    stopping = with_stop(template, "one two three four")
    assert stopping is not None
    assert stopping.body["stop"][0] in "one two three four"[6:]
    assert stopping.name != template.name
    assert with_stop(template, "\ufffd \n") is None


def test_clients_leave_in_every_way_at_the_asked_share():
    numbers, templates = random.Random(0), make_templates(5, 0, 2048)
    plans = [draw(templates, numbers, 0.25) for _ in range(2000)]
    queued = [plan for plan in plans if plan.leave_after_s is not None]
    reading = [plan for plan in plans if plan.leave_after_events is not None]
    assert 0.2 < (len(queued) + len(reading)) / len(plans) < 0.3
    assert {plan.stream for plan in queued} == {True, False}
    assert all(plan.stream for plan in reading)
    assert 1 in {plan.leave_after_events for plan in reading}
    assert not any(
        plan.leave_after_s or plan.leave_after_events for plan in [draw(templates, numbers, 0) for _ in plans]
    )
