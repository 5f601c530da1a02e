"""The shape of KV memory: a block is one contiguous piece [layer, K/V, kv head, token, head dim]."""

from dataclasses import dataclass

from common.block_hash import BLOCK_SIZE

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What two pools must agree on before they exchange a byte."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[layer, K/V, kv head, token, head dim] of one block."""
        return (self.num_layers, 2, self.num_kv_heads, BLOCK_SIZE, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * BLOCK_SIZE * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layout_id(self) -> str:
        """Order, packing, head range and version."""
        shape = "x".join(map(str, self.shape))
        return f"v1:layer,kv,head,token,dim:{shape}:{self.dtype}:heads0-{self.num_kv_heads}"
