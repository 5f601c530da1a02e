"""What each benchmark can be told; imports nothing heavy, so that the command line is quick to explain itself."""

from dataclasses import dataclass

from common.errors import ConfigError
from common.settings import POSITIVE, Bytes, setting

MODEL = "model directory, GGUF file or owner/name on the hub (default: the demo model, fetched once)"
JSON = "one JSON object a row instead of a table"
TRACE = "a Mooncake .jsonl or an Azure .csv with arrivals and lengths"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Times of the engine's own steps."""

    model: str | None = setting(None, MODEL)
    dtype: str = setting("auto", "of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    attention_backend: str = setting("auto", "as of a worker", choices=("auto", "native", "torch"))
    cores: str = setting("1,2", "core counts, comma-separated; each is measured in a process bound to as many")
    prefill: str = setting("512,2048", "prompt lengths, tokens")
    batches: str = setting("1,8,32", "batch sizes of decode")
    contexts: str = setting("128,1024", "tokens that each sequence has in the cache, of decode")
    rounds: int = setting(3, "times that all is measured, each in a new process", within=POSITIVE)
    prefill_steps: int = setting(3, "prompts in a round and row", within=POSITIVE)
    decode_steps: int = setting(15, "steps in a round and row", within=POSITIVE)
    max_num_batched_tokens: int = setting(512, "tokens of a prompt that one step may compute", within=POSITIVE)
    peer: str | None = setting(
        None,
        "a command to run in turn with each round, {model} and {cores} filled in; it prints JSON rows with the keys "
        "phase, ms, and tokens (prefill) or batch and context (decode)",
    )
    json: bool = setting(False, JSON)


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """Moving KV between two processes of this machine."""

    model: str | None = setting(None, MODEL)
    dtype: str = setting("auto", "of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    tokens: int = setting(1000, "of the prompt whose KV moves", within=POSITIVE)
    batch: int = setting(8, "sequences that the reader's engine decodes meanwhile (0: it is idle)", within=(0, None))
    context: int = setting(128, "tokens that each of them has in the cache", within=POSITIVE)
    threads: int = setting(1, "of the reader's engine", within=POSITIVE)
    runs: int = setting(20, "hand-overs of each kind", within=POSITIVE)
    transport: str = setting("auto", "ways to move KV, best first, comma-separated")
    json: bool = setting(False, JSON)


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Requests and when they come: a trace, or lengths and a rate."""

    trace: str | None = setting(None, TRACE)
    scale: float = setting(
        1.0, "factor on a trace's lengths, and on its time unless --rate is given", within=(1e-6, 1e3)
    )
    rate: float | None = setting(None, "requests a second (default: the trace's, or 1)", within=(1e-6, 1e6))
    arrivals: str = setting("poisson", "without a trace: how requests come", choices=("poisson", "constant"))
    requests: int = setting(64, "measured; of a trace the first ones", within=POSITIVE)
    prompt_tokens: int = setting(512, "of each request, without a trace", within=POSITIVE)
    output_tokens: int = setting(64, "of each request, without a trace", within=POSITIVE)
    vocab_size: int = setting(8192, "prompts are random token ids from 256 to this", within=(257, 2**31))


@dataclass(frozen=True, slots=True)
class ServeOptions(TrafficOptions):
    """A running server of the API, under load."""

    url: str = setting("http://127.0.0.1:8000", "of the router, or of any server of the completions API")
    served_model_name: str | None = setting(None, "name in the API (default: the server's first)")
    seeds: str = setting("0", "comma-separated; one run each, with other prompts and arrivals")
    warmup: int = setting(4, "requests before each run, one after another, which don't count", within=(0, None))
    slo_ttft_ms: float = setting(1000.0, "time to first token of a good request", within=(0, None))
    slo_tpot_ms: float = setting(100.0, "time per output token of a good request", within=(0, None))
    request_timeout: float = setting(600.0, "seconds that one request may take", within=(1e-3, None))
    json: bool = setting(False, JSON)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What router and wire cost: the same requests over HTTP and in-process."""

    model: str | None = setting(None, MODEL)
    dtype: str = setting("auto", "of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    prefill: int = setting(0, "prefill workers; with any, the hand-over is part of what is added", within=(0, None))
    threads: int = setting(1, "of each engine", within=POSITIVE)
    streams: str = setting("1,32", "answers at a time, comma-separated")
    prompt_tokens: int = setting(64, "of each request", within=POSITIVE)
    output_tokens: int = setting(64, "of each request", within=POSITIVE)
    requests: int = setting(16, "at least, for each number of streams and run", within=POSITIVE)
    runs: int = setting(3, "of each kind, in turn", within=POSITIVE)
    vocab_size: int = setting(8192, "prompts are random token ids from 256 to this", within=(257, 2**31))
    profile: bool = setting(False, "run the router under cProfile and tell the functions that take most; slower")
    json: bool = setting(False, JSON)


@dataclass(frozen=True, slots=True)
class BatchingOptions:
    """Continuous against static batching, and paged against preallocated memory."""

    model: str | None = setting(None, MODEL)
    dtype: str = setting("auto", "of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    trace: str | None = setting(None, TRACE + " (default: a log-normal distribution)")
    scale: float = setting(1.0, "factor on a trace's lengths", within=(1e-6, 1e3))
    requests: int = setting(64, "in each run", within=POSITIVE)
    max_num_seqs: int = setting(8, "sequences at once", within=POSITIVE)
    max_model_len: int | None = setting(
        None, "tokens that are set aside for each sequence without paging (default: the longest one's)", within=POSITIVE
    )
    threads: int = setting(1, "of the engine", within=POSITIVE)
    runs: int = setting(3, "of each kind, in turn, with a seed each", within=POSITIVE)
    seed: int = setting(0, "of the first run", within=(0, None))
    vocab_size: int = setting(8192, "prompts are random token ids from 256 to this", within=(257, 2**31))
    json: bool = setting(False, JSON)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """A cluster of a measurement's own, in float32, where an answer never depends on its company."""

    model: str | None = setting(None, MODEL)
    prefill: int = setting(2, "prefill workers", within=(0, None))
    decode: int = setting(2, "decode workers", within=POSITIVE)
    max_model_len: int = setting(2048, "longest prompt plus output, tokens", within=(256, None))
    kv_cache_memory: Bytes | None = setting(None, "size of each KV pool, such as 16Mi (default: as of `kvrelay up`)")
    deadline_scale: float = setting(1.0, "factor on the cluster's time-outs", within=(1e-3, 1e3))
    request_timeout: float = setting(120.0, "seconds after which a request counts as hung", within=(1e-3, None))


@dataclass(frozen=True, slots=True)
class SoakOptions(ClusterOptions):
    """Requests of all kinds for a long time, with aborts and faults; each answer is compared."""

    seconds: float = setting(120.0, "for which requests are sent", within=(1, None))
    faults: bool = setting(False, "kill, freeze or drain a worker, or Redis, every few seconds")
    fault_every: float = setting(4.0, "seconds between two of them, on average", within=(0.1, None))
    seed: int = setting(0, "of the requests, their order and the faults", within=(0, None))
    templates: int = setting(40, "different requests", within=POSITIVE)
    concurrency: int = setting(16, "requests at a time", within=POSITIVE)
    max_num_seqs: int = setting(12, "sequences at once on each worker", within=POSITIVE)
    aborts: float = setting(0.15, "share of requests whose client leaves", within=(0, 1))
    rss_slope: float = setting(2.0, "most that the router may grow, MB for 1,000 requests", within=(0, None))
    json: bool = setting(False, JSON + " before the last line, which is one anyhow")


@dataclass(frozen=True, slots=True)
class BurstOptions(ClusterOptions):
    """Many times more requests at once than the cluster has room for."""

    prefill: int = setting(1, "prefill workers", within=(0, None))
    decode: int = setting(1, "decode workers", within=POSITIVE)
    max_num_seqs: int = setting(8, "sequences at once on each worker: the capacity", within=POSITIVE)
    times: int = setting(10, "requests of the burst, in capacities", within=POSITIVE)
    max_queued_requests: int = setting(1024, "requests that may wait in the router", within=(0, None))
    prompt_tokens: int = setting(64, "of each request", within=POSITIVE)
    output_tokens: int = setting(64, "of each request", within=POSITIVE)
    runs: int = setting(3, "undisturbed, burst, undisturbed again", within=POSITIVE)
    vocab_size: int = setting(8192, "prompts are random token ids from 256 to this", within=(257, 2**31))
    json: bool = setting(False, JSON)


@dataclass(frozen=True, slots=True)
class StreamsOptions(ClusterOptions):
    """What the router takes for many streams at a time."""

    prefill: int = setting(0, "prefill workers", within=(0, None))
    decode: int = setting(1, "decode workers", within=POSITIVE)
    streams: str = setting("250,500,1000", "answers at a time, comma-separated, in this order")
    rounds: int = setting(2, "times that all is measured, on one router", within=POSITIVE)
    prompt_tokens: int = setting(16, "of each request", within=POSITIVE)
    output_tokens: int = setting(128, "of each request", within=POSITIVE)
    vocab_size: int = setting(8192, "prompts are random token ids from 256 to this", within=(257, 2**31))
    json: bool = setting(False, JSON)


@dataclass(frozen=True, slots=True)
class StallsOptions(ClusterOptions):
    """How long hostile requests keep the router from others."""

    prefill: int = setting(0, "prefill workers", within=(0, None))
    decode: int = setting(1, "decode workers", within=POSITIVE)
    output_tokens: int = setting(64, "of each of 16 answers with log-probabilities", within=POSITIVE)
    rounds: int = setting(3, "times that each request is sent", within=POSITIVE)
    most_ms: float = setting(50.0, "that another client may have to wait", within=(0.0, None))
    json: bool = setting(False, JSON)


def counts(text: str, flag: str, *, least: int = 1) -> tuple[int, ...]:
    """A comma-separated list of whole numbers, each once, in its order. Raises ConfigError that names the flag."""
    try:
        values = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(
            f"--{flag} must be whole numbers with commas between them, got {text!r}", field=flag
        ) from error
    if any(value < least for value in values):
        raise ConfigError(f"--{flag} must be {least} or more, got {text!r}", field=flag)
    return values
