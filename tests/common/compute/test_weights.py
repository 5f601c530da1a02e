"""Weights are the checkpoint's, mapped where layout and dtype allow; what is missing or unknown is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.compute.linear_weight import LinearWeight
from common.compute.readers.safetensors_reader import SafetensorsReader
from common.compute.weights import ModelWeights, load_weights
from common.errors import ModelError
from tests.support.checkpoints import make_random_checkpoint
from tests.support.model_files import load_config

pytestmark = pytest.mark.slow

FILE = "model.safetensors"


def matrix(weight: LinearWeight) -> torch.Tensor:
    """Of a dense weight."""
    return weight.tensors[0]


def load(directory: Path, dtype: str = "float32", **options: object) -> ModelWeights:
    return load_weights(SafetensorsReader(directory), load_config(directory), dtype, **options)


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces, adds or (None) drops tensors of a single file; __ in a name stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    merged = {name: tensor for name, tensor in (load_file(directory / FILE) | named).items() if tensor is not None}
    save_file({name: tensor.clone() for name, tensor in merged.items()}, directory / FILE)


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether its memory is a file's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.endswith(".safetensors")
    raise AssertionError("no such memory")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_the_checkpoints(shards: int, tied: bool, dtype: str, tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model", shards=shards, tie_word_embeddings=tied)
    named = {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in named.items()}
    weights = load(directory, dtype)
    assert torch.equal(matrix(weights.embedding), expected["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, expected["model.norm.weight"])
    assert weights.head is weights.embedding if tied else torch.equal(matrix(weights.head), expected["lm_head.weight"])
    for i, layer in enumerate(weights.layers):
        part = {name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in expected.items()}
        q, k, v = (part[f"self_attn.{name}_proj.weight"] for name in "qkv")
        assert torch.equal(matrix(layer.qkv), torch.cat([q, k, v]))
        assert torch.equal(
            matrix(layer.mlp.gate_up), torch.cat([part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]])
        )
        assert torch.equal(matrix(layer.out), part["self_attn.o_proj.weight"])
        assert torch.equal(matrix(layer.mlp.down), part["mlp.down_proj.weight"])
        assert torch.equal(layer.input_norm, part["input_layernorm.weight"])
        assert torch.equal(layer.post_norm, part["post_attention_layernorm.weight"])


def test_what_lies_together_is_mapped_as_one(tmp_path: Path):
    """The official library writes by name: gate and up are neighbours, q, k and v are not."""
    layer = load(make_random_checkpoint(tmp_path / "model")).layers[0]
    assert all(
        is_mapped(tensor)
        for tensor in (matrix(layer.mlp.gate_up), matrix(layer.out), matrix(layer.mlp.down), layer.input_norm)
    )
    assert not is_mapped(matrix(layer.qkv))


def test_another_dtype_is_a_copy(tmp_path: Path):
    layer = load(make_random_checkpoint(tmp_path / "model"), "bfloat16").layers[0]
    assert not is_mapped(matrix(layer.mlp.gate_up))


def test_a_file_with_odd_offsets_is_read_all_the_same(tmp_path: Path):
    """The format does not demand that data is aligned."""
    directory = make_random_checkpoint(tmp_path / "model")
    expected = load(directory).layers[1].mlp.down.tensors[0].clone()
    data = (directory / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" "
    header += b" " * (1 - (8 + len(header)) % 2)
    (directory / FILE).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    assert (8 + len(header)) % 2 == 1
    assert torch.equal(load(directory).layers[1].mlp.down.tensors[0], expected)


def test_progress_reaches_the_whole(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    directory = make_random_checkpoint(tmp_path / "model", shards=3, tie_word_embeddings=False)
    load(directory, progress=lambda done, total: seen.append((done, total)))
    total = sum(t.numel() * 4 for file in directory.glob("*.safetensors") for t in load_file(file).values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"model__norm__weight": None}, r"tensor model.norm.weight is missing \(1 in all\)"),
        ({"model__layers__1__mlp__up_proj__weight": None}, "tensor model.layers.1.mlp.up_proj.weight is missing"),
        (
            {"model__layers__2__mlp__up_proj__weight": torch.ones(4)},
            "tensor model.layers.2.mlp.up_proj.weight is no part",
        ),
        ({"model__layers__0__self_attn__q_proj__bias": torch.ones(64)}, "q_proj.bias is no part of a LlamaForCausalLM"),
        ({"model__norm__weight": torch.ones(63)}, r"tensor model.norm.weight is \[63\], config.json wants \[64\]"),
        ({"model__norm__weight": torch.ones(64, 1)}, r"is \[64, 1\], config.json wants \[64\]"),
        ({"model__norm__weight": torch.ones(64, dtype=torch.int32)}, "model.norm.weight has the unsupported dtype I32"),
        ({"model__norm__weight": torch.ones(64, dtype=torch.float64)}, "has the unsupported dtype F64"),
        ({"lm_head__weight": torch.ones(64, 288)}, "tensor lm_head.weight is"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_model_is_refused(
    tensors: dict[str, torch.Tensor | None], problem: str, tmp_path: Path
):
    directory = make_random_checkpoint(tmp_path / "model")
    change(directory, **tensors)
    with pytest.raises(ModelError, match=problem) as caught:
        load(directory)
    assert str(directory) in caught.value.message


def test_a_head_of_its_own_must_be_there(tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is missing"):
        load(directory)


Change = dict[str, Callable[[torch.Tensor], torch.Tensor | None]]
TIED: dict[str, tuple[bool, Change]] = {
    "embedding": (True, {}),
    "both": (True, {"lm_head__weight": lambda embedding: embedding}),
    "another": (True, {"lm_head__weight": lambda embedding: -embedding}),
    "head": (True, {"lm_head__weight": lambda embedding: embedding, "model__embed_tokens__weight": lambda _: None}),
    "untied": (False, {"lm_head__weight": lambda embedding: -embedding}),
}


@pytest.mark.parametrize("case", TIED)
def test_a_head_is_what_transformers_takes_for_it(case: str, tmp_path: Path):
    tied, changes = TIED[case]
    directory = make_random_checkpoint(tmp_path / "model")
    embedding = load_file(directory / FILE)["model.embed_tokens.weight"]
    change(directory, **{name: value(embedding) for name, value in changes.items()})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    metadata = {"format": "pt"}  # without it transformers takes no file
    save_file(load_file(directory / FILE), directory / FILE, metadata)
    theirs, ours = AutoModelForCausalLM.from_pretrained(directory), load(directory)
    assert torch.equal(matrix(ours.head), theirs.lm_head.weight)
    assert torch.equal(matrix(ours.embedding), theirs.model.embed_tokens.weight)
    assert (ours.head is ours.embedding) == (case in ("embedding", "both", "head"))


def test_a_tied_head_and_old_constants_may_be_there(tmp_path: Path):
    directory = make_random_checkpoint(tmp_path / "model")
    embedding = load_file(directory / FILE)["model.embed_tokens.weight"]
    inv_freq = {f"model__layers__{i}__self_attn__rotary_emb__inv_freq": torch.ones(8) for i in range(2)}
    change(directory, lm_head__weight=embedding, **inv_freq)
    assert load(directory).head.tensors[0].shape == (288, 64)
