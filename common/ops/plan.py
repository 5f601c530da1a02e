"""What the reference's rotary embedding and attention need in every layer of a step, worked out once a step."""

import functools
from dataclasses import dataclass

import torch

from common.block_hash import BLOCK_SIZE
from common.model.config import ModelConfig
from common.ops.table import StepInput

ROWS = 16  # a float32 matrix product takes multiples of it: a smaller rest, on any thread, adds up in another order
KEY_CHUNK = 128  # keys; a multiple of BLOCK_SIZE. Another size gives other bits.
QUERY_TILE = 128  # of a prompt's tokens taken at once, so that their scores stay in the L2 cache
GROUP_BYTES = 2 * 2**20  # of float32 keys gathered at once in a decode step: few calls, and still in a cache


@dataclass(frozen=True, slots=True)
class Tile:
    """Successive queries of one prompt, and the key chunks that they see."""

    first_row: int
    last_row: int  # exclusive
    masks: tuple[torch.Tensor | None, ...]  # a chunk's: 0 or -inf, [tokens, 1, KEY_CHUNK]; None where all see all


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A chunk of several tokens of one sequence."""

    blocks: torch.Tensor  # [key chunks * kv heads * blocks a chunk], rows of a pool: see block_rows
    num_key_chunks: int
    context: int  # tokens
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """All chunks of one token. A pair is a sequence and one of its key chunks; pairs are ordered by key chunk.

    Sequences are ordered from long to short, so those that have a key chunk c are the first counts[c].
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
class Plan:
    """What all layers of a step share."""

    config: ModelConfig
    cos: torch.Tensor  # [T, 1, head dim]
    sin: torch.Tensor  # [T, 1, head dim], its first half negated
    token_rows: torch.Tensor  # [T * kv heads], where a pool keeps a token's keys: see block_rows
    prefills: tuple[PrefillPlan, ...]
    decode: DecodePlan | None


def block_rows(blocks: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Block ids [...] to rows [..., kv heads] of a pool seen as [block * layer * K/V * kv head, 16 * head dim].

    The rows are those of layer 0's keys; a layer's keys and values are further on by a constant.
    """
    rows_a_block = config.num_layers * 2 * config.num_kv_heads
    return blocks[..., None] * rows_a_block + torch.arange(config.num_kv_heads)


def prepare(step: StepInput, config: ModelConfig, dtype: torch.dtype) -> Plan:
    cos, sin = _rotary(step.positions, config)
    token_rows = block_rows(step.token_blocks, config) * BLOCK_SIZE + step.positions[:, None] % BLOCK_SIZE
    lengths = [end - start for start, end in zip(step.row_starts, step.row_starts[1:], strict=False)]
    decodes = [i for i, length in enumerate(lengths) if length == 1]
    return Plan(
        config=config,
        cos=cos.to(dtype),
        sin=sin.to(dtype),
        token_rows=token_rows.view(-1),
        prefills=tuple(_prefill(step, config, i) for i, length in enumerate(lengths) if length > 1),
        decode=_decode(step, config, decodes) if decodes else None,
    )


@functools.cache
def _frequencies(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)


def _rotary(positions: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None, None].float() * _frequencies(config.rope_theta, config.head_dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def _chunk_blocks(tables: torch.Tensor, num_key_chunks: int) -> torch.Tensor:
    """Block tables [n, blocks] as [n, key chunks, blocks a chunk]; a sequence's first block fills up."""
    wanted = num_key_chunks * (KEY_CHUNK // BLOCK_SIZE)
    tables = tables[:, :wanted]
    filling = tables[:, :1].expand(-1, wanted - tables.shape[1])
    return torch.cat([tables, filling], 1).view(len(tables), num_key_chunks, -1)


def _prefill(step: StepInput, config: ModelConfig, index: int) -> PrefillPlan:
    context, first, last = step.contexts[index], step.row_starts[index], step.row_starts[index + 1]
    num_key_chunks = -(-context // KEY_CHUNK)
    blocks = _chunk_blocks(step.block_tables[index : index + 1], num_key_chunks)[0]
    offset = context - last  # from a row to its position
    tiles = []
    for tile_first in range(first, last, QUERY_TILE):
        tile_last = min(tile_first + QUERY_TILE, last)
        positions = torch.arange(tile_first, tile_last) + offset
        masks: list[torch.Tensor | None] = []
        for key_first in range(0, tile_last + offset, KEY_CHUNK):
            all_seen = key_first + KEY_CHUNK - 1 <= tile_first + offset
            keys = torch.arange(key_first, key_first + KEY_CHUNK)
            masks.append(None if all_seen else _mask(keys > positions[:, None, None]))
        tiles.append(Tile(tile_first, tile_last, tuple(masks)))
    rows = block_rows(blocks, config).transpose(1, 2).reshape(-1)
    return PrefillPlan(rows, num_key_chunks, context, tuple(tiles))


def _decode(step: StepInput, config: ModelConfig, indices: list[int]) -> DecodePlan:
    order = sorted(indices, key=lambda i: -step.contexts[i])
    contexts = torch.tensor([step.contexts[i] for i in order])
    num_key_chunks = -(-contexts // KEY_CHUNK)
    counts = tuple(int((num_key_chunks > chunk).sum()) for chunk in range(int(num_key_chunks[0])))
    owners = torch.cat([torch.arange(count) for count in counts])
    chunks = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    blocks = _chunk_blocks(step.block_tables[order], len(counts))[owners, chunks]  # [pairs, blocks a chunk]
    keys = chunks[:, None] * KEY_CHUNK + torch.arange(KEY_CHUNK)
    kv_heads, head_dim, heads_each = config.num_kv_heads, config.head_dim, config.num_heads // config.num_kv_heads
    group = min(len(owners), max(1, GROUP_BYTES // (kv_heads * KEY_CHUNK * head_dim * 4)))
    return DecodePlan(
        rows=torch.tensor([step.row_starts[i] for i in order]),
        owners=owners,
        blocks=block_rows(blocks, config).transpose(1, 2).flatten(1),
        masks=_mask(keys >= contexts[owners, None])[:, None, None],
        counts=counts,
        group=group,
        queries=torch.zeros(group, kv_heads, -(-heads_each // ROWS) * ROWS, head_dim),
        top=torch.empty(len(owners), kv_heads, heads_each, 1),
        sums=torch.empty(len(owners), kv_heads, heads_each, head_dim + 1),
    )


def _mask(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
