"""kvrelay bench serve: a running server under load that comes when it comes, and how its users fare.

TTFT is taken by the client, from sending to the first text. What of it was queue and prefill is what the router says
in its report of each request; first_token_ms is the rest: the router's text and wire, and the client itself. TPOT is
a request's mean time per token after the first; gaps are the times between successive events of all answers. A
request is good if it meets both limits; goodput counts good requests a second.
"""

from collections.abc import Sequence
from typing import Any

from bench.options import ServeOptions, counts
from bench.report import ResultTable, Row, note
from bench.serve.completions_client import CompletionsClient, Outcome
from bench.serve.workload import TimedRequest, Workload, make, unique_prompts
from bench.stats import percentile, rounded, summary
from cluster.chat_client import ChatClient
from cluster.local_cluster import run_until_signal
from common.errors import ConfigError, Unavailable

PERCENTILES = (50, 90, 99)
COLUMNS = (
    *("seeds", "requests", "failed", "rate", "ttft_ms_p50", "ttft_ms_p99", "queue_ms_p50", "prefill_ms_p50"),
    *("first_token_ms_p50", "tpot_ms_p50", "tpot_ms_p99", "gap_ms_p50", "gap_ms_p99", "tokens_per_s", "goodput_per_s"),
)


def figures(outcomes: Sequence[Outcome], slo_ttft_ms: float, slo_tpot_ms: float) -> dict[str, float | None]:
    """All figures of one run. Failed requests count for nothing but the goodput they miss."""
    good = [outcome for outcome in outcomes if outcome.ok]
    queue_ms = [_report_ms(outcome, "router_queue_s", "prefill_queue_s") for outcome in good if outcome.report]
    prefill_ms = [_report_ms(outcome, "prefill_s") for outcome in good if outcome.report]
    samples: dict[str, Sequence[float]] = {
        "ttft_ms": [outcome.ttft_s * 1e3 for outcome in good],
        "queue_ms": queue_ms,
        "prefill_ms": prefill_ms,
        "first_token_ms": [
            outcome.ttft_s * 1e3 - _report_ms(outcome, "router_queue_s", "prefill_queue_s", "prefill_s")
            for outcome in good
            if outcome.report
        ],
        "tpot_ms": [outcome.tpot_s * 1e3 for outcome in good if outcome.tpot_s is not None],
        "gap_ms": [gap * 1e3 for outcome in good for gap in outcome.gaps_s],
        "e2e_ms": [(outcome.text_s[-1] - outcome.sent_s) * 1e3 for outcome in good],
    }
    row: dict[str, float | None] = {
        f"{name}_p{percent}": rounded(percentile(values, percent))
        for name, values in samples.items()
        for percent in PERCENTILES
    }
    duration_s = max(outcome.ended_s for outcome in outcomes) - min(outcome.sent_s for outcome in outcomes)
    met = sum(is_good(outcome, slo_ttft_ms, slo_tpot_ms) for outcome in good)
    tokens = sum(outcome.completion_tokens for outcome in good)
    prompts = sum(len(outcome.request.prompt_ids) for outcome in good)
    return row | {
        "duration_s": rounded(duration_s),
        "requests_per_s": rounded(len(good) / duration_s),
        "tokens_per_s": rounded(tokens / duration_s),
        "goodput_per_s": rounded(met / duration_s),
        "goodput_share": rounded(met / len(outcomes)),
        "cached_share": rounded(sum(outcome.cached_tokens for outcome in good) / prompts) if prompts else None,
        "tokens_per_event": rounded(tokens / events) if (events := sum(len(one.text_s) for one in good)) else None,
        "sent_late_ms_p99": rounded(percentile([(one.sent_s - one.due_s) * 1e3 for one in outcomes], 99)),
    }


def _report_ms(outcome: Outcome, *names: str) -> float:
    return sum(float(outcome.report[name]) for name in names) * 1e3


def is_good(outcome: Outcome, slo_ttft_ms: float, slo_tpot_ms: float) -> bool:
    """Whether a request met both limits; an answer of one token has no TPOT to miss."""
    tpot_s = outcome.tpot_s
    return outcome.ttft_s * 1e3 <= slo_ttft_ms and (tpot_s is None or tpot_s * 1e3 <= slo_tpot_ms)


def result(
    options: ServeOptions,
    workload: Workload,
    seeds: Sequence[int],
    runs: Sequence[dict[str, float | None]],
    failed: int,
) -> Row:
    """One row: a run's figures, or the medians of several runs'."""
    names = runs[0]
    head: dict[str, Any] = {
        "url": options.url,
        "arrivals": workload.arrivals,
        "rate": rounded(workload.rate),
        "length_scale": workload.length_scale,
        "time_scale": rounded(workload.time_scale),
        "seeds": list(seeds),
        "warmup": options.warmup,
        "requests": len(workload.requests) * len(runs),
        "failed": failed,
        "slo_ttft_ms": options.slo_ttft_ms,
        "slo_tpot_ms": options.slo_tpot_ms,
        "runs": len(runs),
    }
    return {**head, **summary({name: [run[name] for run in runs] for name in names})}


async def warm_up(client: CompletionsClient, options: ServeOptions, seed: int, like: TimedRequest) -> None:
    """Requests one after another, of a size that the run has, too. Raises Unavailable for a server that fails them."""
    prompts = unique_prompts(len(like.prompt_ids), f"{seed}/warm-up", options.vocab_size)
    for _ in range(options.warmup):
        outcome = await client.send(TimedRequest(0.0, next(prompts), like.output_tokens))
        if outcome.error:
            raise Unavailable(f"{options.url}: a request to warm up failed: {outcome.error}")


def check_context(workload: Workload, max_model_len: int | None) -> None:
    """Raises ConfigError for a workload that the server would refuse in part: its figures would be of the rest."""
    lengths = [len(request.prompt_ids) + request.output_tokens for request in workload.requests]
    beyond = sum(length > max_model_len for length in lengths) if max_model_len else 0
    if beyond:
        raise ConfigError(
            f"{beyond} of {len(lengths)} requests are longer than the server's context of {max_model_len} tokens; "
            f"the longest has {max(lengths)}",
            field="scale" if workload.length_scale != 1 else "prompt_tokens",
        )


async def measure(options: ServeOptions) -> int:
    seeds = counts(options.seeds, "seeds", least=0)
    workloads = {seed: make(options, seed) for seed in seeds}
    async with ChatClient(options.url) as chat:
        models = dict(await chat.models())
    model = options.served_model_name or next(iter(models))
    for workload in workloads.values():
        check_context(workload, models.get(model))
    report = ResultTable(COLUMNS, as_json=options.json)
    runs, failed = [], 0
    async with CompletionsClient(options.url, model, options.request_timeout) as client:
        for seed, workload in workloads.items():
            await warm_up(client, options, seed, workload.requests[0])
            note(f"seed {seed}: {len(workload.requests)} requests")
            outcomes = await client.open_loop(workload.requests)
            errors = [outcome.error for outcome in outcomes if outcome.error]
            if errors:
                note(f"seed {seed}: {len(errors)} of {len(outcomes)} requests failed, first: {errors[0]}")
            if len(errors) == len(outcomes):
                raise Unavailable(f"{options.url}: all requests failed: {errors[0]}")
            runs.append(figures(outcomes, options.slo_ttft_ms, options.slo_tpot_ms))
            failed += len(errors)
            report.row(result(options, workload, [seed], runs[-1:], len(errors)))
    if len(runs) > 1:
        report.row(result(options, workload, seeds, runs, failed))
    return 0


def run(options: ServeOptions) -> int:
    """A row for each seed and, of several, one with the medians."""
    return run_until_signal(measure(options))
