"""What a worker counts, and the HTTP port where that can be read."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from common.engine.batch import EngineLoad, StepOutput
from common.listening import listen
from common.metrics import MetricMaker, metrics_response, new_registry

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
HANDOVER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class WorkerMetrics:
    """What a prefill or decode worker counts. Every method is one event and may be called from any thread."""

    def __init__(self, model_name: str, role: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else new_registry()
        make = MetricMaker(self.registry, {"model_name": model_name, "role": role})
        self._running = make.gauge("num_requests_running", "Sequences in the running batch.")
        self._waiting = make.gauge("num_requests_waiting", "Sequences waiting for blocks or budget.")
        self._waiting_tokens = make.gauge("num_waiting_tokens", "Tokens not computed yet, running and waiting.")
        self._usage = make.gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all of them.")
        self._used_blocks = make.gauge("kv_used_blocks", "KV blocks in use.")
        self._queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt = make.counter("prompt_tokens", "Prompt tokens of sequences whose first token was made here.")
        self._generation = make.counter("generation_tokens", "Tokens sampled.")
        self._preemptions = make.counter("num_preemptions", "Sequences put back for want of blocks.")
        self._success = make.counters("request_success", "Answers that ended here.", "finished_reason")
        self._step_tokens = make.histogram("iteration_tokens_total", "Tokens computed by one step.", STEP_TOKENS)
        self._step_s = make.histogram("engine_step_seconds", "Length of one step.", STEP_S)
        self._handover_bytes = make.counters("kv_handover_bytes", "KV read from holders.", "transport")
        self._handover_s = make.histogram("kv_handover_seconds", "First byte to last of one hand-over.", HANDOVER_S)
        self._handover_failures = make.counters("kv_handover_failures", "Hand-overs that failed.", "code")
        self._leases = make.gauge("kv_leases", "Leases that hold KV for readers.")
        self._held_blocks = make.gauge("kv_held_blocks", "Blocks under these leases.")
        self._expirations = make.counter("kv_lease_expirations", "Leases that ran out before they were released.")
        self._claims = make.gauge("kv_claims", "Claims on other workers' KV.")
        self._attempts = make.gauge("num_attempts", "Attempts of routers that have not ended.")

    def on_step(self, output: StepOutput) -> None:
        """Counts what one engine step did. A sequence without a cache lookup of its own counts no prompt."""
        self._generation.inc(len(output.tokens))
        self._preemptions.inc(output.num_preemptions)
        prompts = {token.sequence.key: token.sequence for token in output.tokens if token.index == 0}
        for sequence in prompts.values():  # forks share one
            self._prompt.inc(sequence.num_prompt_tokens)
            if sequence.num_cached_tokens is not None:
                self._queries.inc(sequence.num_prompt_tokens)
                self._hits.inc(sequence.num_cached_tokens)
        for token in output.tokens:
            if token.finish_reason is not None:
                self._success(finished_reason=str(token.finish_reason)).inc()
        if output.failed:
            self._success(finished_reason="error").inc(len(output.failed))
        if output.num_batched_tokens:
            self._step_tokens.observe(output.num_batched_tokens)
            self._step_s.observe(output.step_s)

    def on_load(self, load: EngineLoad, attempts: int) -> None:
        """What the engine has to do now, and for how many attempts."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._waiting_tokens.set(load.waiting_tokens)
        self._used_blocks.set(load.total_blocks - load.free_blocks)
        self._usage.set(1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0)
        self._attempts.set(attempts)

    def on_stop_strings(self, answers: int) -> None:
        """The router has met one in so many answers."""
        self._success(finished_reason="stop").inc(answers)

    def on_abort(self, answers: int = 1) -> None:
        self._success(finished_reason="abort").inc(answers)

    def on_handover(self, transport: str, num_bytes: int, seconds: float) -> None:
        self._handover_bytes(transport=transport).inc(num_bytes)
        self._handover_s.observe(seconds)

    def on_handover_failure(self, code: str) -> None:
        """`code` is one of common/errors.py."""
        self._handover_failures(code=code).inc()

    def on_leases(self, leases: int, blocks: int) -> None:
        """Leases held now, and the blocks under them."""
        self._leases.set(leases)
        self._held_blocks.set(blocks)

    def on_lease_expirations(self, leases: int) -> None:
        """Leases that ran out since the last call."""
        self._expirations.inc(leases)

    def on_claims(self, claims: int) -> None:
        """Claims on holders' blocks now."""
        self._claims.set(claims)


async def serve_worker_http(
    host: str,
    port: int,
    registry: CollectorRegistry,
    live: Callable[[], tuple[bool, str]],
    ready: Callable[[], tuple[bool, str]],
    measure: Callable[[], None] = lambda: None,
    *,
    shutdown_s: float,
) -> web.AppRunner:
    """Serves /metrics, /health (`live`) and /ready until `runner.cleanup()`, which waits for requests no longer than
    `shutdown_s`. Raises AddressInUse.

    `runner.addresses[0]` is where. `measure` brings the gauges up to date before they are read.
    """

    async def get_metrics(request: web.Request) -> web.Response:
        measure()
        return metrics_response(registry, request.headers.get("Accept", ""))

    def probe(name: str, ask: Callable[[], tuple[bool, str]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            good, reason = ask()
            return web.json_response({name: good, "reason": reason}, status=200 if good else 503)

        return answer

    sockets = listen(host, port, flag="metrics-port")
    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", get_metrics),
            web.get("/health", probe("healthy", live)),
            web.get("/ready", probe("ready", ready)),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=shutdown_s)
    await runner.setup()
    for listening in sockets:
        await web.SockSite(runner, listening).start()
    return runner
