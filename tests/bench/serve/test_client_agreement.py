"""Two clients are asked for the same requests, and their figures are set against each other as they printed them."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from bench.serve import client_agreement as agree

OPTIONS = argparse.Namespace(
    guidellm="guidellm", tokenizer="DIR", url="http://h:1", model="m", rate=0.5, requests=24, prompt_tokens=256,
    output_tokens=32,
)  # fmt: skip


def test_both_clients_send_the_same_requests_at_the_same_times() -> None:
    ours = " ".join(agree.kvrelay_command(OPTIONS, 7))
    theirs = " ".join(agree.guidellm_command(OPTIONS, 7, Path("out.json")))
    assert ours.startswith(sys.executable)
    for wanted in ("--arrivals constant", "--rate 0.5", "--requests 24", "--prompt-tokens 256", "--output-tokens 32"):
        assert wanted in ours
    for wanted in ("kind=constant,rate=0.5", "count=24", "prompt_tokens=256,output_tokens=32"):
        assert wanted in theirs


def test_figures_are_read_as_the_clients_print_them() -> None:
    rows = [{"requests": 24, "failed": 0, "ttft_ms_p50": 1.0}, {"requests": 24, "failed": 2, "ttft_ms_p50": 180.0}]
    output = "\n".join(json.dumps({"tpot_ms_p50": 25.0, **row}) for row in rows)
    assert agree.kvrelay_figures(output) == {"requests": 22, "ttft_ms_p50": 180.0, "tpot_ms_p50": 25.0}
    metrics = {
        "time_to_first_token_ms": {"successful": {"count": 23, "percentiles": {"p50": 178.21}}},
        "inter_token_latency_ms": {"successful": {"percentiles": {"p50": 25.031}}},
    }
    found = agree.guidellm_figures({"benchmarks": [{"metrics": metrics}]})
    assert found == {"requests": 23, "ttft_ms_p50": 178.2, "tpot_ms_p50": 25.03}


def test_the_ratio_is_of_the_medians_over_all_rounds() -> None:
    rounds = [
        {"kvrelay": {"ttft_ms_p50": ours, "tpot_ms_p50": 20.0}, "guidellm": {"ttft_ms_p50": 100.0, "tpot_ms_p50": 25.0}}
        for ours in (90.0, 99.0, 500.0)
    ]
    found = agree.agreement(rounds)
    assert found["rounds"] == 3
    assert found["ratio"] == {"ttft_ms_p50": pytest.approx(0.99), "tpot_ms_p50": pytest.approx(0.8)}
