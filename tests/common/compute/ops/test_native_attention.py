"""Native attention computes what the reference does, for every shape it takes; and what it can't take, it refuses."""

from pathlib import Path

import pytest
import torch

from common.compute import native_build as builder
from common.compute.native_build import NativeUnavailable
from common.compute.ops.choose import choose_ops
from common.compute.ops.cpu import native_attention as native
from common.compute.ops.cpu.native_attention import DIMS, load_ops
from common.compute.ops.reference.reference_ops import OPS
from common.compute.ops.table import Ops
from common.errors import ConfigError
from common.model.config import LayerConfig, ModelConfig
from tests.common.compute.ops.test_reference_ops import CHUNKS, ROPE, make_cache, make_config, make_step, random

LARGE = [(0, 600), (500, 100)]  # worth more threads than one
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def attend(ops: Ops, config: ModelConfig, chunks: list[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
    """Layer 1's attention of random queries over a random cache."""
    step = make_step(*chunks)
    cache = make_cache(config, dtype, 40 * len(chunks)).copy_(
        torch.randn(40 * len(chunks), *config.kv_layout("float32").shape, generator=torch.Generator().manual_seed(1))
    )
    q = random(len(step.token_ids), config.num_heads, config.head_dim, dtype=dtype)
    return ops.attention(q, cache, 1, ops.prepare(step, config, dtype))


def check(config: ModelConfig, chunks: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> None:
    ours, wanted = (attend(ops, config, chunks, dtype).float() for ops in (load_ops(config), OPS))
    torch.testing.assert_close(ours, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_it_equals_the_reference(chunks: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check(make_config(), chunks, dtype)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (48, 1), (8, 8)])
@pytest.mark.parametrize("head_dim", DIMS)
def test_every_shape_it_takes_equals_the_reference(head_dim: int, heads: tuple[int, int]) -> None:
    layers = (LayerConfig(None),) * 2
    check(make_config(*heads, head_dim, layers=layers), CHUNKS[-1])


@pytest.mark.parametrize("window", [1, 15, 16, 17, 127, 128, 129, 300])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_windows_and_caps_equal_the_reference(window: int, softcap: float | None) -> None:
    config = make_config(layers=(LayerConfig(ROPE), LayerConfig(ROPE, window)), softcap=softcap)
    for chunks in CHUNKS:
        check(config, chunks)


def test_threads_change_no_bit() -> None:
    config, before = make_config(), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results += [attend(load_ops(config), config, chunks, torch.float32) for chunks in (*CHUNKS, LARGE)]
    finally:
        torch.set_num_threads(before)
    count = len(CHUNKS) + 1
    for i in range(count):
        assert torch.equal(results[i], results[i + count])
        assert torch.equal(results[i], results[i + 2 * count])


@pytest.mark.parametrize("config", [make_config(head_dim=24), make_config(98, 2)])
def test_a_shape_it_lacks_is_left_to_torch_or_refused(config: ModelConfig) -> None:
    assert choose_ops(config) is OPS
    with pytest.raises(ConfigError) as caught:
        choose_ops(config, "native")
    assert caught.value.field == "attention_backend"


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(builder, "COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        builder.build(native.SOURCE, library=True, environ={"KVRELAY_CACHE": str(tmp_path)})
    assert choose_ops(make_config()) is OPS


def test_code_that_does_not_compile_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    with pytest.raises(NativeUnavailable, match="error"):
        builder.build(source, library=False, environ={"KVRELAY_CACHE": str(tmp_path / "cache")})
    assert list((tmp_path / "cache" / "native").iterdir()) == []


def test_a_build_is_used_again_until_its_source_changes(tmp_path: Path) -> None:
    source, environ = tmp_path / "program.cpp", {"KVRELAY_CACHE": str(tmp_path / "cache")}
    source.write_text("int main() { return 3; }")
    first = builder.build(source, library=False, environ=environ)
    stamp = first.stat().st_mtime_ns
    assert builder.build(source, library=False, environ=environ) == first
    assert first.stat().st_mtime_ns == stamp
    source.write_text("int main() { return 4; }")
    assert builder.build(source, library=False, environ=environ) != first
