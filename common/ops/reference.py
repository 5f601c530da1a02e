"""The reference operations in plain torch: the truth that every other backend is tested against.

A row's answer must not depend, bit for bit, on the rows beside it. Torch promises no such thing, so this holds to what
gives the same bits however many rows there are (the tests check it on the machine at hand): matrix products of at
least 16 rows (in bfloat16 of any number), torch.exp, and reductions along the last dimension. Not among them are
F.silu in float32, torch.exp2, and scaled_dot_product_attention.

Attention has one order for a decode step and for any part of a prompt. Keys are taken in chunks of KEY_CHUNK, counted
from position 0; the last is filled up and masked. Each chunk alone gives a query its largest score m,
l = sum(exp(score - m)) and o = sum(exp(score - m) * value). With M the largest m, the answer is
sum(exp(m - M) * o) / sum(exp(m - M) * l), added up in the order of the chunks (the split softmax of Flash-Decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A chunk that a query doesn't see adds exact zeros. Scores and
sums are float32; probabilities meet the values in the cache's dtype.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from common.block_hash import BLOCK_SIZE
from common.ops.plan import KEY_CHUNK, DecodePlan, Plan, PrefillPlan, prepare
from common.ops.table import Ops

MIN_ROWS = 16
LOWEST = torch.finfo(torch.float32).min


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., rows, columns] with zero rows up to MIN_ROWS; below, torch's float32 products have other bits."""
    missing = MIN_ROWS - x.shape[-2]
    return x if missing <= 0 or x.dtype == torch.bfloat16 else F.pad(x, (0, 0, 0, missing))


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(token_ids, weight)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(pad_rows(x), weight)[: x.shape[0]]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if gate.dtype == torch.bfloat16:
        return F.silu(gate) * up
    # F.silu has another exp for what is left over after whole vector registers: its bits depend on the place.
    return gate / (1 + torch.exp(-gate)) * up


def logits(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return linear(x, head).float()


def _pool_rows(cache: torch.Tensor, layer: int, part: int, width: int) -> torch.Tensor:
    """The pool as rows of `width` elements, from where a layer's keys (part 0) or values (1) of block 0 start."""
    kv_heads, head_dim = cache.shape[3], cache.shape[5]
    return cache.view(-1, width)[(2 * layer + part) * kv_heads * BLOCK_SIZE * head_dim // width :]


def rotary_and_store(qkv: torch.Tensor, cache: torch.Tensor, layer: int, plan: Plan) -> torch.Tensor:
    """Rotates q and k (halves, as Hugging Face's Llama), and writes k and v into their blocks."""
    heads, kv_heads, head_dim = plan.config.num_heads, plan.config.num_kv_heads, plan.config.head_dim
    qk, v = qkv.view(-1, heads + 2 * kv_heads, head_dim).split([heads + kv_heads, kv_heads], 1)
    low, high = qk.chunk(2, -1)
    rotated = qk * plan.cos + torch.cat([high, low], -1) * plan.sin
    for part, new in enumerate((rotated[:, heads:], v)):
        _pool_rows(cache, layer, part, head_dim).index_copy_(0, plan.token_rows, new.reshape(-1, head_dim))
    return rotated[:, :heads]


def attention(q: torch.Tensor, cache: torch.Tensor, layer: int, plan: Plan) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for prefill in plan.prefills:
        _attend_prompt(q, cache, layer, prefill, out)
    if plan.decode is not None:
        _attend_decode(q, cache, layer, plan.decode, out)
    return out.view(len(q), -1)


def _gather(cache: torch.Tensor, layer: int, part: int, blocks: torch.Tensor) -> torch.Tensor:
    """Keys (part 0) or values (1) of key chunks: [chunks * kv heads, KEY_CHUNK, head dim]."""
    head_dim = cache.shape[5]
    return _pool_rows(cache, layer, part, BLOCK_SIZE * head_dim).index_select(0, blocks).view(-1, KEY_CHUNK, head_dim)


def _attend_prompt(q: torch.Tensor, cache: torch.Tensor, layer: int, plan: PrefillPlan, out: torch.Tensor) -> None:
    kv_heads, head_dim = cache.shape[3], cache.shape[5]
    group = q.shape[1] // kv_heads
    keys = _gather(cache, layer, 0, plan.blocks).float().view(-1, kv_heads, KEY_CHUNK, head_dim)
    values = _gather(cache, layer, 1, plan.blocks).view(-1, kv_heads, KEY_CHUNK, head_dim)
    for tile in plan.tiles:
        rows = slice(tile.first_row, tile.last_row)
        shape = (kv_heads, tile.last_row - tile.first_row, group)
        queries = q[rows].unflatten(1, (kv_heads, group)).transpose(0, 1).reshape(kv_heads, -1, head_dim)
        queries = pad_rows(queries.float() * head_dim**-0.5)
        parts = [
            _attend_chunk(queries, keys[c], values[c], hidden, shape) for c, hidden in enumerate(tile.hidden)
        ]
        top, sums = (torch.stack(each) for each in zip(*parts, strict=True))
        joined = _join(top, sums, (1,) * len(parts), top.new_zeros(len(parts), dtype=torch.int64))
        out[rows].unflatten(1, (kv_heads, group)).copy_(joined.view(*shape, head_dim).transpose(0, 1))


def _attend_decode(q: torch.Tensor, cache: torch.Tensor, layer: int, plan: DecodePlan, out: torch.Tensor) -> None:
    kv_heads, head_dim = cache.shape[3], cache.shape[5]
    group = q.shape[1] // kv_heads
    queries = q.new_zeros((len(plan.rows), kv_heads, max(group, MIN_ROWS), head_dim), dtype=torch.float32)
    torch.mul(q[plan.rows].unflatten(1, (kv_heads, group)), head_dim**-0.5, out=queries[:, :, :group])
    parts = []
    for first in range(0, len(plan.sequences), plan.group):
        pairs = slice(first, first + plan.group)
        chosen = queries.index_select(0, plan.sequences[pairs])
        blocks = plan.blocks[pairs].view(-1)
        keys, values = _gather(cache, layer, 0, blocks).float(), _gather(cache, layer, 1, blocks)
        shape = (len(chosen), kv_heads, group)
        parts.append(_attend_chunk(chosen.flatten(0, 1), keys, values, plan.hidden[pairs], shape))
    top, sums = (torch.cat(each).view(-1, kv_heads, group, each[0].shape[-1]) for each in zip(*parts, strict=True))
    out[plan.rows] = _join(top, sums, plan.counts, plan.sequences).flatten(1, 2).to(out.dtype)


def _attend_chunk(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    shape: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One key chunk of each of b (sequences and) kv heads: its m [b, rows, 1], and its o and l as [b, rows, dim + 1].

    Scaled queries [b, rows and padding, dim], keys and values [b, KEY_CHUNK, dim]; shape splits b * rows as hidden wants.
    """
    rows, head_dim = shape[0] * shape[1] * shape[2] // len(queries), queries.shape[-1]
    scores = torch.bmm(queries, keys.transpose(1, 2))[:, :rows]
    if hidden is not None:
        scores.view(*shape, KEY_CHUNK).masked_fill_(hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp_(min=LOWEST)  # finite where a query sees none of the keys
    weights = (scores - top).exp_()
    sums = weights.new_empty(len(queries), rows, head_dim + 1)
    torch.sum(weights, -1, keepdim=True, out=sums[..., head_dim:])
    sums[..., :head_dim] = torch.bmm(pad_rows(weights.to(values.dtype)), values)[:, :rows]
    return top, sums


def _join(top: torch.Tensor, sums: torch.Tensor, counts: Sequence[int], owners: torch.Tensor) -> torch.Tensor:
    """Joins key chunks in their order: m [pairs, ..., 1], o and l [pairs, ..., dim + 1] to [counts[0], ..., dim].

    The first counts[0] pairs are key chunk 0's, then come counts[1] of key chunk 1's, and so on; in each, pair i is
    owner i's.
    """
    best = top[: counts[0]].clone()
    first = counts[0]
    for count in counts[1:]:
        torch.maximum(best[:count], top[first : first + count], out=best[:count])
        first += count
    sums *= (top - best.index_select(0, owners)).exp_()
    total = sums[: counts[0]]
    first = counts[0]
    for count in counts[1:]:
        total[:count] += sums[first : first + count]
        first += count
    return total[..., :-1] / total[..., -1:]


OPS = Ops(
    name="reference (torch)",
    embedding=embedding,
    linear=linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_and_mul=silu_and_mul,
    logits=logits,
    prepare=prepare,
    rotary_and_store=rotary_and_store,
    attention=attention,
)
