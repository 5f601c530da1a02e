"""A model over a pool, and chunks of sequences for it, without a scheduler."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from common.block_hash import BLOCK_SIZE
from common.compute.decoder import Decoder
from common.compute.ops.choose import choose_ops
from common.compute.readers.safetensors_reader import SafetensorsReader
from common.compute.weights import load_weights
from common.engine import sequence
from common.engine.batch import Batch, ScheduledChunk
from common.engine.kv_pool import HostKVPool
from common.engine.runner import ModelRunner
from tests.support.model_files import load_config


def make_runner(
    directory: Path,
    dtype: str = "float32",
    num_blocks: int = 64,
    fill: float = torch.nan,
    backend: str = "torch",
) -> ModelRunner:
    """A runner whose pool is full of what no answer may depend on."""
    config = load_config(directory)
    pool = HostKVPool(config.kv_layout(dtype), num_blocks, shared=False)
    pool.blocks.fill_(fill)
    weights = load_weights(SafetensorsReader(directory), config, dtype)
    return ModelRunner(Decoder(config, weights, choose_ops(config, backend)), pool)


def random_ids(count: int, seed: int = 0, vocab_size: int = 288) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunk(
    token_ids: Sequence[int], start: int, length: int, *, first_block: int = 0, sampled: bool = True
) -> ScheduledChunk:
    """`length` tokens of a sequence from `start` on; its blocks follow each other from `first_block`."""
    end = start + length
    owner = sequence.Sequence("test", list(token_ids), len(token_ids), sequence.SamplingParams())
    blocks = tuple(range(first_block, first_block - (-end // BLOCK_SIZE)))
    return ScheduledChunk(
        owner, start, tuple(token_ids[start:end]), blocks, range(length - 1, length) if sampled else range(0)
    )


def logits_by_chunks(
    runner: ModelRunner, token_ids: Sequence[int], lengths: Sequence[int], **options: int
) -> torch.Tensor:
    """[len(lengths), vocab]: those of each chunk's last token, one chunk a step."""
    start, rows = 0, []
    for length in lengths:
        rows.append(runner.forward(Batch((chunk(token_ids, start, length, **options),))))
        start += length
    return torch.cat(rows)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
