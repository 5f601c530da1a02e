"""What the router counts."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from common.metrics import MetricMaker, new_registry

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class RouterMetrics:
    """What the router counts; seconds are from a request's arrival unless they are of a phase."""

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else new_registry()
        make = MetricMaker(self.registry, {"model_name": model_name, "role": "router"})
        self._running = make.gauge("num_requests_running", "Requests on their way.")
        self._waiting = make.gauge("num_requests_waiting", "Requests waiting for a worker.")
        self._e2e_s = make.histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_S)
        self._first_token_s = make.histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S)
        self._per_token_s = make.histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, of one request.", TOKEN_S
        )
        self._gap_s = make.histogram("inter_token_latency_seconds", "Time from one token to the next.", TOKEN_S)
        self._queue_s = make.histogram("request_queue_time_seconds", "Waiting, here and at the workers.", REQUEST_S)
        self._prefill_s = make.histogram("request_prefill_time_seconds", "Computing the prompt.", REQUEST_S)
        self._decode_s = make.histogram("request_decode_time_seconds", "First token to last.", REQUEST_S)
        self._answers = make.counters(
            "request_success", "Answers by how they ended; abort: the client left.", "finished_reason"
        )
        self._http = make.counters("http_requests", "Answered HTTP requests.", "endpoint", "status")
        self._resumes = make.counters("request_resumes", "Requests submitted again with what was sent.", "reason")
        self._unsplit = make.counters("requests_unsplit", "Prompts given to decode workers to compute.", "reason")
        self._workers = make.gauges("workers", "Workers known.", "worker_role", "state")
        self._index_blocks = make.gauge("prefix_index_blocks", "Block hashes in the local prefix index.")
        self._seen_workers: set[tuple[str, str]] = set()

    def on_load(self, running: int, waiting: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)

    def on_http(self, endpoint: str, status: int) -> None:
        """`endpoint` is a route, never a path that a client made up."""
        self._http(endpoint=endpoint, status=str(status)).inc()

    def on_first_token(self, seconds: float) -> None:
        self._first_token_s.observe(seconds)

    def on_answer(self, reason: str, answers: int = 1) -> None:
        """`reason` is stop, length, abort, error or refused."""
        if answers:
            self._answers(finished_reason=reason).inc(answers)

    def on_token(self, gap_s: float) -> None:
        """A token of an answer after its first."""
        self._gap_s.observe(gap_s)

    def on_finish(
        self, *, first_token_s: float, last_token_s: float, queue_s: float, prefill_s: float, tokens: int
    ) -> None:
        """A request that ended well; `tokens` are its longest answer's."""
        self._e2e_s.observe(last_token_s)
        self._queue_s.observe(queue_s)
        self._prefill_s.observe(prefill_s)
        self._decode_s.observe(last_token_s - first_token_s)
        if tokens > 1:
            self._per_token_s.observe((last_token_s - first_token_s) / (tokens - 1))

    def on_resume(self, reason: str) -> None:
        """`reason` is the code of the error that made it necessary."""
        self._resumes(reason=reason).inc()

    def on_unsplit(self, reason: str) -> None:
        """A decode worker was given a prompt to compute."""
        self._unsplit(reason=reason).inc()

    def on_workers(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Workers by (role, state) now; what is absent is 0."""
        for role, state in self._seen_workers | counts.keys():
            self._workers(worker_role=role, state=state).set(counts.get((role, state), 0))
        self._seen_workers |= counts.keys()

    def on_index(self, blocks: int) -> None:
        self._index_blocks.set(blocks)
