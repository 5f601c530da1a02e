"""Metrics count each event once, under vLLM's names, and are served in a form that Prometheus reads."""

import re
import socket

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from common.engine.batch import EngineLoad, Sample, StepOutput, TokenOutput
from common.engine.sequence import Sequence
from common.errors import AddressInUse, EngineFailure
from common.metrics import new_registry
from common.sampling import FinishReason, SamplingParams
from common.worker.metrics import WorkerMetrics, serve_worker_http
from router.metrics import RouterMetrics


def worker() -> WorkerMetrics:
    return WorkerMetrics("tiny", "decode", CollectorRegistry())


def router() -> RouterMetrics:
    return RouterMetrics("tiny", CollectorRegistry())


def sequence(key: str = "a", prompt: int = 20, cached: int | None = 16, forks: tuple[int, ...] = (0,)) -> Sequence:
    return Sequence(key, [1] * prompt, prompt, SamplingParams(), forks=forks, num_cached_tokens=cached)


def token(of: Sequence, index: int = 0, fork: int = 0, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(of, fork, index, Sample(7), finish)


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample by its name without the prefix, and its own labels besides the constant ones."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "role")}
            name = sample.name.removeprefix("kvrelay:")
            found[name + ("" if not labels else str(sorted(labels.items())))] = sample.value
    return found


def test_metric_names_are_those_of_vllm_under_our_prefix():
    names = {f.name for f in text_string_to_metric_families(generate_latest(worker().registry).decode())}
    assert {
        "kvrelay:num_requests_running",
        "kvrelay:num_requests_waiting",
        "kvrelay:kv_cache_usage_perc",
        "kvrelay:prefix_cache_queries",
        "kvrelay:prefix_cache_hits",
        "kvrelay:prompt_tokens",
        "kvrelay:generation_tokens",
        "kvrelay:num_preemptions",
        "kvrelay:request_success",
        "kvrelay:iteration_tokens_total",
    } <= names
    names = {f.name for f in text_string_to_metric_families(generate_latest(router().registry).decode())}
    assert {
        "kvrelay:e2e_request_latency_seconds",
        "kvrelay:time_to_first_token_seconds",
        "kvrelay:request_time_per_output_token_seconds",
        "kvrelay:inter_token_latency_seconds",
        "kvrelay:request_queue_time_seconds",
        "kvrelay:request_prefill_time_seconds",
    } <= names


def test_every_sample_carries_model_and_role():
    metrics = worker()
    metrics.on_handover("shm", 1, 0.1)
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            assert (sample.labels["model_name"], sample.labels["role"]) == ("tiny", "decode")


def test_the_gauges_are_those_of_the_last_load():
    metrics = worker()
    metrics.on_load(EngineLoad(running=3, waiting=2, waiting_tokens=9, total_blocks=8, free_blocks=6), attempts=4)
    metrics.on_claims(1)
    seen = values(metrics.registry)
    assert (seen["num_requests_running"], seen["num_requests_waiting"], seen["num_waiting_tokens"]) == (3, 2, 9)
    assert (seen["kv_cache_usage_perc"], seen["num_attempts"], seen["kv_claims"]) == (0.25, 4, 1)
    assert seen["kv_used_blocks"] == 2
    metrics.on_load(EngineLoad(total_blocks=8, free_blocks=8), attempts=0)
    metrics.on_claims(0)
    seen = values(metrics.registry)
    assert not any(seen[name] for name in ("num_requests_running", "kv_cache_usage_perc", "num_attempts", "kv_claims"))


def test_a_step_counts_tokens_and_ends():
    metrics = worker()
    metrics.on_step(
        StepOutput(
            tokens=(
                token(sequence("a"), finish=FinishReason.STOP),
                token(sequence("b", prompt=5, cached=0), finish=FinishReason.LENGTH),
                token(sequence("c"), index=3),
            ),
            failed=((sequence("d"), EngineFailure("broken")),),
            num_batched_tokens=40,
            step_s=0.02,
        )
    )
    seen = values(metrics.registry)
    assert seen["generation_tokens_total"] == 3
    assert seen["prompt_tokens_total"] == 25
    assert seen["prefix_cache_queries_total"] == 25
    assert seen["prefix_cache_hits_total"] == 16
    assert {seen[f"request_success_total[('finished_reason', '{r}')]"] for r in ("stop", "length", "error")} == {1}
    assert seen["iteration_tokens_total_sum"] == 40
    assert seen["engine_step_seconds_sum"] == 0.02


def test_forks_share_one_prompt():
    metrics = worker()
    shared = sequence(prompt=20, forks=(0, 1))
    parts = [shared.split(0), shared.split(1)]
    metrics.on_step(StepOutput(tokens=tuple(token(part, fork=i) for i, part in enumerate(parts))))
    seen = values(metrics.registry)
    assert (seen["prompt_tokens_total"], seen["generation_tokens_total"]) == (20, 2)


def test_a_prompt_without_a_lookup_counts_no_query():
    metrics = worker()
    metrics.on_step(StepOutput(tokens=(token(sequence(cached=None)),)))
    seen = values(metrics.registry)
    assert (seen["prompt_tokens_total"], seen["prefix_cache_queries_total"]) == (20, 0)


def test_an_idle_step_of_an_empty_pool_counts_nothing():
    metrics = worker()
    before = values(metrics.registry)
    metrics.on_step(StepOutput())
    assert values(metrics.registry) == before


def test_handovers_leases_aborts_and_preemptions_are_counted():
    metrics = worker()
    metrics.on_handover("shm", 100, 0.002)
    metrics.on_handover("grpc", 50, 0.002)
    metrics.on_handover_failure("kv_expired")
    metrics.on_leases(2, 17)
    metrics.on_lease_expirations(1)
    metrics.on_abort(3)
    metrics.on_step(StepOutput(num_preemptions=1))
    seen = values(metrics.registry)
    assert seen["kv_handover_bytes_total[('transport', 'shm')]"] == 100
    assert seen["kv_handover_bytes_total[('transport', 'grpc')]"] == 50
    assert seen["kv_handover_seconds_count"] == 2
    assert seen["kv_handover_failures_total[('code', 'kv_expired')]"] == 1
    assert (seen["kv_leases"], seen["kv_held_blocks"], seen["kv_lease_expirations_total"]) == (2, 17, 1)
    assert seen["request_success_total[('finished_reason', 'abort')]"] == 3
    assert seen["num_preemptions_total"] == 1


@pytest.mark.parametrize(("tokens", "count", "total"), [(0, 0, 0), (1, 0, 0), (2, 1, 2.0), (5, 1, 0.5)])
def test_time_per_output_token_leaves_out_the_first(tokens, count, total):
    metrics = router()
    metrics.on_finish(first_token_s=1.0, last_token_s=3.0, queue_s=0.25, prefill_s=0.5, tokens=tokens)
    seen = values(metrics.registry)
    assert seen["request_time_per_output_token_seconds_count"] == count
    assert seen["request_time_per_output_token_seconds_sum"] == total
    assert seen["e2e_request_latency_seconds_sum"] == 3.0
    assert seen["request_decode_time_seconds_sum"] == 2.0
    assert seen["request_queue_time_seconds_sum"] == 0.25
    assert seen["request_prefill_time_seconds_sum"] == 0.5


def test_the_router_counts_requests_tokens_resumes_and_its_index():
    metrics = router()
    metrics.on_load(4, 1)
    metrics.on_http("/v1/completions", 200)
    metrics.on_http("/v1/completions", 429)
    metrics.on_first_token(0.3)
    metrics.on_token(0.05)
    metrics.on_resume("worker_lost")
    metrics.on_index(99)
    seen = values(metrics.registry)
    assert (seen["num_requests_running"], seen["num_requests_waiting"]) == (4, 1)
    assert seen["http_requests_total[('endpoint', '/v1/completions'), ('status', '429')]"] == 1
    assert seen["time_to_first_token_seconds_sum"] == 0.3
    assert seen["inter_token_latency_seconds_sum"] == 0.05
    assert seen["request_resumes_total[('reason', 'worker_lost')]"] == 1
    assert seen["prefix_index_blocks"] == 99


def test_a_state_without_workers_falls_to_zero():
    metrics = router()
    metrics.on_workers({("prefill", "live"): 2, ("decode", "suspect"): 1})
    metrics.on_workers({("prefill", "live"): 1})
    seen = values(metrics.registry)
    assert seen["workers[('state', 'live'), ('worker_role', 'prefill')]"] == 1
    assert seen["workers[('state', 'suspect'), ('worker_role', 'decode')]"] == 0


async def test_metrics_and_health_are_served():
    state, leases = (True, ""), 3
    metrics = WorkerMetrics("tiny", "prefill", new_registry())
    runner = await serve_worker_http(
        "127.0.0.1",
        0,
        metrics.registry,
        lambda: state,
        lambda: state,
        lambda: metrics.on_leases(leases, 2 * leases),
        shutdown_s=1.0,
    )
    try:
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            async with session.get("/metrics") as response:
                assert response.headers["Content-Type"].startswith("text/plain")
                text = await response.text()
            families = {f.name for f in text_string_to_metric_families(text)}
            assert {"kvrelay:kv_leases", "process_resident_memory_bytes"} <= families
            assert re.search(r"kv_held_blocks\{.*\} 6.0", text), "gauges are measured when they are read"
            assert not any(name.endswith("_created") for name in families)
            wanted = {"Accept": "application/openmetrics-text; version=1.0.0"}
            async with session.get("/metrics", headers=wanted) as response:
                assert "kvrelay:kv_leases" in {f.name for f in openmetrics_families(await response.text())}
            for path, name in (("/health", "healthy"), ("/ready", "ready")):
                state = (True, "")
                async with session.get(path) as response:
                    assert response.status == 200
                state = (False, "no step for 12 s")
                async with session.get(path) as response:
                    assert response.status == 503
                    assert await response.json() == {name: False, "reason": "no step for 12 s"}
    finally:
        await runner.cleanup()


async def test_an_occupied_port_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=str(port)):
            await serve_worker_http(
                "127.0.0.1", port, CollectorRegistry(), lambda: (True, ""), lambda: (True, ""), shutdown_s=1.0
            )
