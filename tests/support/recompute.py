"""The reference: every token from a forward pass over the whole sequence, alone, on an empty pool."""

import functools
from collections.abc import Sequence as Sequenced
from pathlib import Path

import torch

from common.block_hash import BLOCK_SIZE
from common.engine.batch import Batch, Sample, ScheduledChunk
from common.engine.build import BuiltEngine, build_engine
from common.engine.config import EngineConfig
from common.engine.sampler import Sampler
from common.engine.sequence import Sequence
from common.sampling import SamplingParams
from common.settings import Bytes


class Recompute:
    """Knows no KV cache, no chunks and no end but max_tokens."""

    @classmethod
    @functools.cache
    def of(cls, model: Path, dtype: str) -> "Recompute":
        return cls(model, dtype)

    def __init__(self, model: Path, dtype: str) -> None:
        settings = EngineConfig(model=str(model), dtype=dtype, max_model_len=512, kv_cache_memory=Bytes(2**22))
        self.built: BuiltEngine = build_engine(
            settings, max_num_batched_tokens=512, shared_pool=False, clock=lambda: 0.0
        )
        self.runner = self.built.engine._runner
        self.sampler = Sampler(self.built.engine.config.eos_token_ids)

    def __call__(self, prompt_ids: Sequenced[int], params: SamplingParams, fork: int = 0) -> list[int]:
        return [sample.token_id for sample in self.samples(prompt_ids, params, fork)]

    def samples(self, prompt_ids: Sequenced[int], params: SamplingParams, fork: int = 0) -> list[Sample]:
        """max_tokens tokens with their logprobs."""
        sequence = Sequence("reference", list(prompt_ids), len(prompt_ids), params, (fork,))
        samples = []
        for _ in range(params.max_tokens):
            blocks = tuple(range(-(-sequence.num_tokens // BLOCK_SIZE)))
            batch = Batch(
                (
                    ScheduledChunk(
                        sequence,
                        0,
                        tuple(sequence.token_ids),
                        blocks,
                        range(len(sequence.token_ids) - 1, len(sequence.token_ids)),
                    ),
                )
            )
            [[sample]] = self.sampler(self.runner.forward(batch), batch)
            sequence.token_ids.append(sample.token_id)
            samples.append(sample)
        return samples


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids of the random model's vocabulary; a shorter prompt is a prefix of a longer one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (1024,), generator=generator)[:length].tolist()
