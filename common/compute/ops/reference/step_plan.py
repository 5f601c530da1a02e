"""What the reference's rotary embedding and attention need in every layer of a step, worked out once a step."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from common.block_hash import BLOCK_SIZE
from common.compute.ops.rotary import Rotary, rotary
from common.compute.ops.table import StepInput
from common.model.config import ModelConfig

ROWS = 16  # a float32 matrix product takes multiples of it: a smaller rest, on any thread, adds up in another order
KEY_CHUNK = 128  # keys; a multiple of BLOCK_SIZE. Another size gives other bits.
QUERY_TILE = 128  # of a prompt's tokens taken at once, so that their scores stay in the L2 cache
GROUP_BYTES = 2 * 2**20  # of float32 keys gathered at once in a decode step: few calls, and still in a cache


@dataclass(frozen=True, slots=True)
class Tile:
    """Successive queries of one prompt, and the successive key chunks that they see."""

    first_row: int
    last_row: int  # exclusive
    first_chunk: int  # among the plan's
    masks: tuple[torch.Tensor | None, ...]  # a chunk's: 0 or -inf, [tokens, 1, KEY_CHUNK]; None where all see all


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A chunk of several tokens of one sequence. Its key chunks begin with the first that one of them sees."""

    blocks: torch.Tensor  # [key chunks * kv heads * blocks a chunk], rows of a pool: see block_rows
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """All chunks of one token. A pair is a sequence and one of the key chunks that it sees.

    A sequence's key chunks are counted from the first that it sees, and pairs are ordered by this number. Sequences
    are ordered from many key chunks to few, so those that have a key chunk c are the first counts[c].
    """

    rows: torch.Tensor  # [sequences], their rows in the step
    owners: torch.Tensor  # [pairs], the sequence's place in rows
    blocks: torch.Tensor  # [pairs, kv heads * blocks a chunk], rows of a pool: see block_rows
    masks: torch.Tensor  # 0 or -inf, [pairs, 1, 1, KEY_CHUNK]
    counts: tuple[int, ...]  # [key chunks]
    group: int  # pairs to take at once
    # Scratch memory, written anew in each layer; of queries, the rows behind a kv head's own stay zero.
    queries: torch.Tensor  # float32 [group, kv heads, heads a kv head or more, head dim]
    top: torch.Tensor  # float32 [pairs, kv heads, heads a kv head, 1]
    sums: torch.Tensor  # float32 [pairs, kv heads, heads a kv head, head dim + 1]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What layers with the same window share."""

    prefills: tuple[PrefillPlan, ...]
    decode: DecodePlan | None


@dataclass(frozen=True, slots=True)
class RotaryPlan:
    """What rotary embedding and the writing of KV share over the layers of a step."""

    config: ModelConfig
    token_rows: torch.Tensor  # [T * kv heads], where a pool keeps a token's keys: see block_rows
    rotary: tuple[Rotary | None, ...]  # of each layer; None: nothing is rotated


@dataclass(frozen=True, slots=True)
class StepPlan(RotaryPlan):
    """What all operations share; the tuples have an entry a layer, the same one for layers that are alike."""

    attention: tuple[AttentionPlan, ...]


def block_rows(blocks: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Block ids [...] to rows [..., kv heads] of a pool seen as [block * layer * K/V * kv head, 16 * head dim].

    The rows are those of layer 0's keys; a layer's keys and values are further on by a constant.
    """
    rows_a_block = config.num_layers * 2 * config.num_kv_heads
    return blocks[..., None] * rows_a_block + torch.arange(config.num_kv_heads)


def prepare(step: StepInput, config: ModelConfig, dtype: torch.dtype) -> StepPlan:
    """Sorts the chunks into prompts and single tokens, and finds all their rows."""
    base = prepare_rotary(step, config, dtype)
    attention = {window: _attention(step, config, window) for window in {layer.window for layer in config.layers}}
    return StepPlan(
        config, base.token_rows, base.rotary, attention=tuple(attention[layer.window] for layer in config.layers)
    )


def prepare_rotary(step: StepInput, config: ModelConfig, dtype: torch.dtype) -> RotaryPlan:
    """The part that other backends' attention shares."""
    token_rows = block_rows(step.token_blocks, config) * BLOCK_SIZE + step.positions[:, None] % BLOCK_SIZE
    ropes = {layer.rope for layer in config.layers}
    tables = {rope: None if rope is None else rotary(step.positions, rope, config.head_dim, dtype) for rope in ropes}
    return RotaryPlan(config, token_rows.view(-1), tuple(tables[layer.rope] for layer in config.layers))


def _attention(step: StepInput, config: ModelConfig, window: int | None) -> AttentionPlan:
    lengths = [end - start for start, end in pairwise(step.row_starts)]
    decodes = [i for i, length in enumerate(lengths) if length == 1]
    return AttentionPlan(
        prefills=tuple(_prefill(step, config, window, i) for i, length in enumerate(lengths) if length > 1),
        decode=_decode(step, config, window, decodes) if decodes else None,
    )


def _first_seen(position: int, window: int | None) -> int:
    """The first key chunk that a query sees."""
    return 0 if window is None else max(0, position - window + 1) // KEY_CHUNK


def _chunk_blocks(step: StepInput, indices: torch.Tensor, key_chunks: torch.Tensor) -> torch.Tensor:
    """Blocks of a key chunk each [n] of the step's chunks [n] or [1]: [n, blocks a chunk]; the first block fills up."""
    starts = torch.tensor(step.table_starts)
    first, end = starts[indices, None], starts[indices + 1, None]
    each = KEY_CHUNK // BLOCK_SIZE
    entries = first + key_chunks[:, None] * each + torch.arange(each)
    blocks: torch.Tensor = step.block_ids[torch.where(entries < end, entries, first)]
    return blocks


def _prefill(step: StepInput, config: ModelConfig, window: int | None, index: int) -> PrefillPlan:
    context, first, last = step.contexts[index], step.row_starts[index], step.row_starts[index + 1]
    offset = context - last  # from a row to its position
    first_chunk = _first_seen(first + offset, window)
    blocks = _chunk_blocks(step, torch.tensor([index]), torch.arange(first_chunk, -(-context // KEY_CHUNK)))
    tiles = []
    for tile_first in range(first, last, QUERY_TILE):
        tile_last = min(tile_first + QUERY_TILE, last)
        positions = torch.arange(tile_first, tile_last)[:, None, None] + offset
        begin = _first_seen(tile_first + offset, window)
        masks: list[torch.Tensor | None] = []
        for key_first in range(begin * KEY_CHUNK, tile_last + offset, KEY_CHUNK):
            before = key_first + KEY_CHUNK - 1 <= tile_first + offset
            if before and (window is None or key_first > tile_last - 1 + offset - window):
                masks.append(None)
                continue
            keys = torch.arange(key_first, key_first + KEY_CHUNK)
            hidden = keys > positions
            if window is not None:
                hidden |= keys <= positions - window
            masks.append(_mask(hidden))
        tiles.append(Tile(tile_first, tile_last, begin - first_chunk, tuple(masks)))
    rows = block_rows(blocks, config).transpose(1, 2).reshape(-1)
    return PrefillPlan(rows, tuple(tiles))


def _decode(step: StepInput, config: ModelConfig, window: int | None, indices: list[int]) -> DecodePlan:
    first_seen = {i: _first_seen(step.contexts[i] - 1, window) for i in indices}
    num_chunks = {i: -(-step.contexts[i] // KEY_CHUNK) - first_seen[i] for i in indices}
    order = sorted(indices, key=lambda i: -num_chunks[i])
    # Sequences less those with 0, 1, ... key chunks or fewer.
    counts = (len(order) - torch.bincount(torch.tensor([num_chunks[i] for i in order])).cumsum(0))[:-1]
    chunks = torch.repeat_interleave(torch.arange(len(counts)), counts)
    owners = torch.arange(len(chunks)) - (counts.cumsum(0) - counts)[chunks]
    chunks += torch.tensor([first_seen[i] for i in order])[owners]
    blocks = _chunk_blocks(step, torch.tensor(order)[owners], chunks)
    keys = chunks[:, None] * KEY_CHUNK + torch.arange(KEY_CHUNK)
    contexts = torch.tensor([step.contexts[i] for i in order])[owners, None]
    hidden = keys >= contexts
    if window is not None:
        hidden |= keys < contexts - window
    kv_heads, head_dim, heads_each = config.num_kv_heads, config.head_dim, config.num_heads // config.num_kv_heads
    group = min(len(owners), max(1, GROUP_BYTES // (kv_heads * KEY_CHUNK * head_dim * 4)))
    return DecodePlan(
        rows=torch.tensor([step.row_starts[i] for i in order]),
        owners=owners,
        blocks=block_rows(blocks, config).transpose(1, 2).flatten(1),
        masks=_mask(hidden)[:, None, None],
        counts=tuple(counts.tolist()),
        group=group,
        queries=torch.zeros(group, kv_heads, -(-heads_each // ROWS) * ROWS, head_dim),
        top=torch.empty(len(owners), kv_heads, heads_each, 1),
        sums=torch.empty(len(owners), kv_heads, heads_each, head_dim + 1),
    )


def _mask(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
