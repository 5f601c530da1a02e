"""Runs one batch through the model: tokens and blocks in, logits out."""

from itertools import accumulate, chain

import numpy as np
import torch

from common.block_hash import BLOCK_SIZE
from common.compute.decoder import Decoder
from common.compute.ops.choose import StepInput
from common.engine.batch import Batch, ScheduledChunk
from common.engine.kv_pool import KVPool


class ModelRunner:
    """A model over one pool. One step at a time, on the caller's thread."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self._decoder = decoder
        self._pool = pool

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Float32 logits [rows, vocab]: chunk by chunk its scored rows, then its sampled ones."""
        self._pool.copy_blocks(batch.copies)
        if not batch.chunks:
            return torch.empty(0, self._decoder.config.vocab_size)
        self._clear_fresh_blocks(batch)
        return self._decoder.forward(step_input(batch), self._pool.blocks)

    def where_not_finite(self, chunk: ScheduledChunk) -> str:
        """For the log: the layer that made a chunk's last token not finite, and the KV that it has this from.

        All layers of that token and one layer of all tokens are looked at, which is little beside what they cost.
        """
        blocks, last = self._pool.blocks, chunk.start + len(chunk.token_ids) - 1
        own = blocks[chunk.block_ids[last // BLOCK_SIZE], :, :, :, last % BLOCK_SIZE]  # [layer, K/V, kv head, dim]
        spoilt = (~own.isfinite()).flatten(1).any(1).tolist()
        layer = spoilt.index(True) if any(spoilt) else len(spoilt)
        if layer == 0:
            return f"layer 0: {_kind(own[0])} in the KV of position {last}"
        for index in range(last // BLOCK_SIZE + 1):
            read = blocks[chunk.block_ids[index], layer - 1]  # [K/V, kv head, 16, dim]
            if not read.isfinite().all():
                token = (~read.isfinite()).any(-1).flatten(0, 1).any(0).tolist().index(True)
                return f"layer {layer - 1}: {_kind(read)} in the KV of position {index * BLOCK_SIZE + token}"
        if layer < len(spoilt):
            return f"layer {layer - 1}: {_kind(own[layer])} made of finite KV"
        return f"layer {layer - 1} or the LM head: made of finite KV"

    def _clear_fresh_blocks(self, batch: Batch) -> None:
        """What lies behind a sequence's last token in a block must be finite: it meets a probability of 0.

        So a block that is begun and not filled loses what an earlier owner left.
        """
        for chunk in batch.chunks:
            end = chunk.start + len(chunk.token_ids)
            if end % BLOCK_SIZE and chunk.start <= end - end % BLOCK_SIZE:
                self._pool.blocks[chunk.block_ids[end // BLOCK_SIZE]] = 0


def _kind(values: torch.Tensor) -> str:
    return "nan" if values.isnan().any() else "inf"


def step_input(batch: Batch) -> StepInput:
    """A batch as tensors."""
    chunks = batch.chunks
    row_starts = tuple(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))
    positions = [position for chunk in chunks for position in range(chunk.start, chunk.start + len(chunk.token_ids))]
    token_blocks = [
        chunk.block_ids[(chunk.start + i) // BLOCK_SIZE] for chunk in chunks for i in range(len(chunk.token_ids))
    ]
    rows = [
        start + row for start, chunk in zip(row_starts, chunks, strict=False) for row in (*chunk.scored, *chunk.sampled)
    ]
    contexts = [chunk.start + len(chunk.token_ids) for chunk in chunks]
    tables = [chunk.block_ids[: -(-context // BLOCK_SIZE)] for chunk, context in zip(chunks, contexts, strict=True)]
    table_starts = tuple(accumulate(map(len, tables), initial=0))
    block_ids = np.fromiter(chain.from_iterable(tables), np.int64, table_starts[-1])  # far faster than torch.tensor
    return StepInput(
        token_ids=torch.tensor([token_id for chunk in chunks for token_id in chunk.token_ids]),
        positions=torch.tensor(positions),
        token_blocks=torch.tensor(token_blocks),
        row_starts=row_starts,
        contexts=tuple(contexts),
        block_ids=torch.from_numpy(block_ids),
        table_starts=table_starts,
        sample_rows=torch.tensor(rows, dtype=torch.int64),
    )
