"""From settings to an engine that is ready to step: model, KV pool, scheduler, runner, sampler."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.block_hash import BLOCK_SIZE
from common.compute.decoder import Decoder
from common.compute.numerics import numerics
from common.compute.ops.choose import choose_ops
from common.compute.readers.open_tensors import open_tensors
from common.compute.weights import load_weights
from common.control_groups import usable_cores
from common.engine.batch import Batch, ScheduledChunk
from common.engine.block_pool import BlockPool
from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.engine.kv_pool import HostKVPool
from common.engine.limits import SchedulerConfig
from common.engine.memory import MemoryPlan, choose_num_blocks, peak_resident_bytes, reset_peak, resident_bytes
from common.engine.runner import ModelRunner
from common.engine.sampler import Sampler
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.layout import KVLayout
from common.model.config import ModelConfig, parse_config
from common.model.end_tokens import read_generation
from common.model.fingerprint import fingerprint
from common.model.open import open_model
from common.model.source import tokenizer_id
from common.progress_bar import Progress
from common.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what the rest of a worker has to know of it."""

    engine: Engine
    pool: HostKVPool
    model: ModelConfig
    layout: KVLayout
    name: str
    weights_bytes: int
    model_revision: str
    fingerprint: str
    tokenizer: str  # SHA-256 of its content
    numerics: str  # whose bits are equal
    token_s: float  # what a token took in the largest step


def build_engine(
    settings: EngineConfig,
    *,
    max_num_batched_tokens: int,
    shared_pool: bool,
    clock: Callable[[], float],
    progress: Progress = lambda done, total: None,
) -> BuiltEngine:
    """Loads the model, takes the pool's memory and runs one real step. Raises StartupError."""
    source = open_model(settings, weights=True)
    model = parse_config(source.config())
    generation = read_generation(source)
    dtype = model.resolve_dtype(settings.dtype)
    layout = model.kv_layout(dtype)
    config = SchedulerConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens or max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=model.context_length(settings.max_model_len),
        eos_token_ids=generation.eos_token_ids,
    )
    longest = -(-config.max_model_len // BLOCK_SIZE)
    if settings.kv_cache_memory is not None:  # what is wrong with it is said before the weights are read
        num_blocks = choose_num_blocks(
            settings.kv_cache_memory, block_bytes=layout.block_bytes, longest=longest, field="kv_cache_memory"
        )
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), usable_cores()))
    revision, reader = source.revision(), open_tensors(source)
    weights = load_weights(reader, model, dtype, progress=progress)
    ops = choose_ops(model, settings.attention_backend)
    decoder = Decoder(model, weights, ops)
    largest = min(config.max_num_batched_tokens, config.max_model_len)
    working, largest_s = warm_up(decoder, layout, largest, clock)
    if settings.kv_cache_memory is None:
        # The largest step had one row of logits; scored rows add theirs, in the model's dtype and in float32.
        working += 2 * 4 * config.max_scored_tokens * model.vocab_size
        plan = MemoryPlan.here(
            settings.gpu_memory_utilization,
            settings.workers_per_host,
            weights=weights.num_bytes,
            shared_weights=dtype == model.dtype and reader.shared,
            working=working,
        )
        num_blocks = choose_num_blocks(
            plan.pool_bytes(), block_bytes=layout.block_bytes, longest=longest, field="max_model_len"
        )
        num_blocks = min(num_blocks, longest * config.max_num_seqs)  # more would be of no use
    pool = HostKVPool(layout, num_blocks, shared=shared_pool)
    blocks = BlockPool(num_blocks, enable_caching=settings.enable_prefix_caching)
    engine = Engine(Scheduler(config, blocks), ModelRunner(decoder, pool), Sampler(generation.eos_token_ids), clock)
    return BuiltEngine(
        engine=engine,
        pool=pool,
        model=model,
        layout=layout,
        name=settings.names(source)[0],
        weights_bytes=weights.num_bytes,
        model_revision=revision,
        fingerprint=fingerprint(revision, dtype=dtype, kv_dtype=layout.dtype, layout_id=layout.layout_id),
        tokenizer=tokenizer_id(source),
        numerics=numerics(ops.name),
        token_s=largest_s / largest,
    )


def warm_up(decoder: Decoder, layout: KVLayout, num_tokens: int, clock: Callable[[], float]) -> tuple[int, float]:
    """Two real steps on blocks of their own, so that the first request need not pay for it: a small one, which
    brings the weights in, and the largest. Returns the memory (bytes) and the time (seconds) that the largest took.
    """
    blocks = tuple(range(-(-num_tokens // BLOCK_SIZE)))
    pool = HostKVPool(layout, len(blocks), shared=False)
    runner = ModelRunner(decoder, pool)

    def step(count: int) -> None:
        sequence = Sequence("warm-up", [0] * count, count, SamplingParams())
        runner.forward(Batch((ScheduledChunk(sequence, 0, (0,) * count, blocks, sampled=range(count - 1, count)),)))

    step(1)
    before = resident_bytes()
    reset_peak()
    begun = clock()
    step(num_tokens)
    took_s = clock() - begun
    pool.close()
    return max(0, peak_resident_bytes() - before), took_s
