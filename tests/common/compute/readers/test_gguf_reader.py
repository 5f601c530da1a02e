"""A GGUF's numbers, under Hugging Face's names, are those of the model it was written from, of the gguf package and of
transformers; logits agree in float32."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.compute.decoder import Decoder
from common.compute.ops.choose import choose_ops
from common.compute.readers.gguf_reader import GgufReader, halves_from_pairs
from common.compute.readers.open_tensors import open_tensors
from common.compute.weights import load_weights
from common.engine.kv_pool import HostKVPool
from common.engine.runner import ModelRunner
from common.errors import ModelError
from common.model.config import parse_config
from common.model.gguf.gguf_model import GgufSource
from common.model.gguf.header import TYPES
from tests.support.gguf_models import MODELS, Kind, gguf_tensors, packed, random_model, split_file, write_model
from tests.support.model_tools import logits_by_chunks, random_ids

pytestmark = pytest.mark.slow

KINDS = [Kind(number) for number in TYPES]
READ_BY_TRANSFORMERS = [name for name in MODELS if name != "smollm3"]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def write(directory: Path, architecture: str, kind: Kind = Kind.F32) -> tuple[Path, PreTrainedModel]:
    model = random_model(architecture)
    return write_model(directory / "x.gguf", architecture, model, kind=kind), model


def our_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """[vocab], of the last token, in two chunks."""
    source = GgufSource(path)
    config = parse_config(source.config())
    pool = HostKVPool(config.kv_layout("float32"), 16, shared=False)
    runner = ModelRunner(
        Decoder(config, load_weights(open_tensors(source), config, "float32"), choose_ops(config, "torch")), pool
    )
    return logits_by_chunks(runner, ids, [20, len(ids) - 20])[-1]


def their_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.5
    assert (ours - theirs).abs().max() <= 1e-4 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("architecture", MODELS)
def test_every_tensor_is_the_models(architecture: str, tmp_path: Path):
    path, model = write(tmp_path, architecture)
    reader, wanted = GgufReader(GgufSource(path)), model.state_dict()
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert set(reader.tensors) == set(wanted)
    for name, tensor in wanted.items():
        assert reader.tensors[name].shape == tuple(tensor.shape)
        torch.testing.assert_close(reader.view(name), tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("architecture", MODELS)
def test_logits_are_those_of_the_model_it_was_written_from(architecture: str, tmp_path: Path):
    path, model = write(tmp_path, architecture)
    ids = random_ids(45, vocab_size=model.config.vocab_size)
    assert_close(our_logits(path, ids), their_logits(model, ids))


def test_biases_are_rotated_with_their_matrices(tmp_path: Path):
    model = random_model("llama", attention_bias=True, mlp_bias=True)
    path, ids = write_model(tmp_path / "x.gguf", "llama", model), random_ids(45, vocab_size=model.config.vocab_size)
    reader, wanted = GgufReader(GgufSource(path)), model.state_dict()
    assert set(reader.tensors) == set(wanted)
    assert all(torch.equal(reader.view(name), wanted[name]) for name in wanted)
    assert_close(our_logits(path, ids), their_logits(model, ids))


@pytest.mark.parametrize("architecture", READ_BY_TRANSFORMERS)
def test_logits_are_those_that_transformers_has_from_the_same_file(architecture: str, tmp_path: Path):
    path, model = write(tmp_path, architecture, Kind.Q8_0)
    ids = random_ids(45, vocab_size=model.config.vocab_size)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    assert_close(our_logits(path, ids), their_logits(theirs, ids))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_is_what_the_package_and_transformers_make_of_it(kind: Kind, tmp_path: Path):
    path, model = write(tmp_path, "llama", kind)
    reader, blocks = GgufReader(GgufSource(path)), gguf_tensors(model, "llama")
    for theirs, ours in [("blk.0.ffn_down", "model.layers.0.mlp.down_proj"), ("token_embd", "model.embed_tokens")]:
        values = blocks[f"{theirs}.weight"]
        stored = values.astype(np.float16) if kind == Kind.F16 else packed(values, kind)
        wanted = gguf.dequantize(stored, kind)
        assert np.array_equal(reader.view(f"{ours}.weight").float().numpy(), wanted)
        assert np.ptp(wanted) > 0
    ids = random_ids(45, vocab_size=model.config.vocab_size)
    same = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    state = same.state_dict()
    for name in reader.tensors:
        assert torch.equal(reader.view(name).float(), state[name])
    if kind < Kind.Q2_K or kind == Kind.BF16:  # random blocks make random models, with logits of any size
        assert_close(our_logits(path, ids), their_logits(same, ids))


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "F32"), (Kind.BF16, "BF16"), (Kind.Q4_K, "F32")], ids=str)
def test_the_dtype_is_told_before_a_tensor_is_read(kind: Kind, dtype: str, tmp_path: Path):
    reader = GgufReader(GgufSource(write(tmp_path, "llama", kind)[0]))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert reader.tensors[name].dtype == dtype
    assert reader.view(name).dtype == {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    assert reader.stacked([name, name]) is None


def test_halves_come_from_pairs():
    rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [10.0], [11.0], [12.0], [13.0]])
    assert halves_from_pairs(rows, 2).flatten().tolist() == [0, 2, 1, 3, 10, 12, 11, 13]


def test_infinite_scales_are_refused(tmp_path: Path):
    path, _ = write(tmp_path, "llama", Kind.Q8_0)
    source = GgufSource(path)
    tensor = source.file.tensors["blk.1.attn_v.weight"]
    content = bytearray(path.read_bytes())
    content[tensor.offset : tensor.offset + 2] = np.array([np.inf], np.float16).tobytes()
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"blk\.1\.attn_v\.weight has numbers that are not finite"):
        GgufReader(GgufSource(path)).view("model.layers.1.self_attn.v_proj.weight")


def split_model(directory: Path) -> tuple[Path, Path]:
    """A model in one file, and the first of three that gguf-split would make of it."""
    whole, _ = write(directory, "llama")
    return whole, split_file(whole, 3)


def test_a_model_in_several_files_is_the_one_they_were_split_from(tmp_path: Path):
    whole, first = split_model(tmp_path)
    ours, wanted = GgufReader(GgufSource(first)), GgufReader(GgufSource(whole))
    assert len({tensor.path for tensor in ours.tensors.values()}) == 2  # the first has none, as with --no-tensor-first
    assert GgufSource(first).config().content == GgufSource(whole).config().content
    assert set(ours.tensors) == set(wanted.tensors)
    for name in wanted.tensors:
        assert torch.equal(ours.view(name), wanted.view(name))
