"""From settings to an engine that is ready to step: model, KV pool, scheduler, runner, sampler."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import EngineConfig
from common.engine.batch import Batch, ScheduledChunk
from common.engine.block_pool import BlockPool
from common.engine.engine import Engine
from common.engine.kv_cache import KVPool
from common.engine.limits import SchedulerConfig
from common.engine.runner import Runner
from common.engine.sampler import Sampler
from common.engine.scheduler import Scheduler
from common.engine.sequence import SamplingParams, Sequence
from common.errors import ConfigError
from common.layout import KVLayout
from common.model.config import ModelConfig, load_config, load_generation, model_name
from common.model.decoder import Decoder
from common.model.fingerprint import fingerprint, model_fingerprint
from common.model.weights import load_weights
from common.ops import choose_ops

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what the rest of a worker has to know of it."""

    engine: Engine
    pool: KVPool
    model: ModelConfig
    layout: KVLayout
    name: str
    model_revision: str
    fingerprint: str


def build_engine(
    settings: EngineConfig,
    *,
    max_num_batched_tokens: int,
    shared_pool: bool,
    clock: Callable[[], float],
    progress: Progress = lambda done, total: None,
) -> BuiltEngine:
    """Loads the model, takes the pool's memory and runs one real step. Raises StartupError."""
    directory = Path(settings.model)
    model, generation = load_config(directory), load_generation(directory)
    dtype = model.resolve_dtype(settings.dtype)
    layout = model.kv_layout(dtype)
    config = SchedulerConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens or max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=min(settings.max_model_len or model.max_position_embeddings, model.max_position_embeddings),
        eos_token_ids=generation.eos_token_ids,
    )
    num_blocks = settings.kv_cache_memory // layout.block_bytes
    check_limits(settings, model, config.max_model_len, layout, num_blocks)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    revision = model_fingerprint(directory)
    decoder = Decoder(model, load_weights(directory, model, dtype, progress=progress), choose_ops())
    warm_up(decoder, layout, min(config.max_num_batched_tokens, config.max_model_len))
    pool = KVPool(layout, num_blocks, shared=shared_pool)
    blocks = BlockPool(num_blocks, enable_caching=settings.enable_prefix_caching)
    engine = Engine(Scheduler(config, blocks), Runner(decoder, pool), Sampler(generation.eos_token_ids), clock)
    return BuiltEngine(
        engine=engine,
        pool=pool,
        model=model,
        layout=layout,
        name=model_name(directory),
        model_revision=revision,
        fingerprint=fingerprint(revision, dtype=dtype, kv_dtype=layout.dtype, layout_id=layout.layout_id),
    )


def warm_up(decoder: Decoder, layout: KVLayout, num_tokens: int) -> None:
    """One real step of the largest size, on blocks of its own: the first request should not pay for it."""
    blocks = tuple(range(-(-num_tokens // layout.block_size)))
    pool = KVPool(layout, len(blocks), shared=False)
    tokens = [0] * num_tokens
    sequence = Sequence("warm-up", tokens, num_tokens, SamplingParams())
    Runner(decoder, pool).forward(Batch((ScheduledChunk(sequence, 0, tuple(tokens), blocks, samples=True),)))
    pool.close()


def check_limits(
    settings: EngineConfig, model: ModelConfig, max_model_len: int, layout: KVLayout, num_blocks: int
) -> None:
    """Raises ConfigError for settings that could never serve one sequence of the longest kind."""
    if settings.max_model_len and settings.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {settings.max_model_len}, the model was made for {model.max_position_embeddings}",
            field="max_model_len",
        )
    needed = -(-max_model_len // layout.block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"kv_cache_memory ({settings.kv_cache_memory} bytes) has room for {num_blocks * layout.block_size} tokens; "
            f"one sequence of {max_model_len} takes {needed * layout.block_bytes} bytes: "
            "raise kv_cache_memory or lower max_model_len",
            field="kv_cache_memory",
        )
