"""A directory, a GGUF file or a hub name becomes the right source; what fits none of them is refused in one line."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.gguf_conversion import convert_gguf
from cluster.model_fetch import MODELS, _download, _unpack
from common.compute.readers.open_tensors import open_tensors
from common.compute.readers.safetensors_reader import SafetensorsReader
from common.engine.build import build_engine
from common.engine.config import EngineConfig
from common.engine.sequence import Sequence
from common.errors import ModelError
from common.model import open as opening
from common.model.config import parse_config
from common.model.directory import DirectorySource
from common.model.gguf.gguf_model import GgufSource
from common.model.open import WithTokenizer, open_model, open_source
from common.sampling import SamplingParams
from common.settings import Bytes
from common.text.text_model import TextModel
from tests.support.checkpoints import make_random_checkpoint
from tests.support.gguf_models import Kind, byte_level, random_model, write_model
from tests.support.tiny_text import model_directory

pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_random_checkpoint(tmp_path / "some-model")


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_model(tmp_path / "some.gguf", "llama", random_model("llama"))


def test_a_directory_of_safetensors_is_opened(directory: Path):
    source = open_source(directory)
    assert isinstance(source, DirectorySource)
    assert (source.name, source.path) == ("some-model", directory)
    assert isinstance(open_tensors(source), SafetensorsReader)
    assert sum(tensor.num_bytes for tensor in source.tensors()) > 0
    assert source.tokenizer_kind() == "BPE"


def test_a_gguf_file_is_opened_whatever_its_name(gguf_file: Path):
    assert isinstance(open_source(str(gguf_file)), GgufSource)
    blob = gguf_file.rename(gguf_file.with_name("blob"))
    assert open_source(blob).name == "blob"
    assert set(open_tensors(open_source(blob)).tensors) == {tensor.name for tensor in open_source(blob).tensors()}


def test_the_one_gguf_of_a_directory_is_opened(tmp_path: Path, gguf_file: Path):
    source = open_source(tmp_path)
    assert source.path == gguf_file
    gguf_file.with_name("second.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"has second\.gguf, some\.gguf: name the one"):
        open_source(tmp_path)


def test_safetensors_come_first_unless_told_otherwise(directory: Path, gguf_file: Path):
    gguf_file.rename(directory / "x.gguf")
    assert isinstance(open_source(directory), DirectorySource)
    assert isinstance(open_source(directory, load_format="gguf"), GgufSource)
    assert isinstance(open_source(directory, load_format="safetensors"), DirectorySource)


@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        ("", {}, "there is no ''"),
        ("a\0b", {}, "there is no"),
        ("x" * 5000, {}, "there is no"),
        ("none", {}, "there is no 'none'"),
        ("/no/such/place", {}, "there is no '/no/such/place'"),
        ("text.txt", {}, r"text\.txt must be a directory or a GGUF file"),
        ("some.gguf", {"load_format": "safetensors"}, "must be a directory for load_format safetensors"),
        ("some-model", {"load_format": "gguf"}, "has no GGUF file"),
        ("some-model", {"revision": "main"}, "revision is for models of the hub"),
        ("some-model", {"tokenizer": "nowhere"}, "there is no 'nowhere'"),
    ],
)
def test_what_fits_nothing_is_refused(
    model: str, options: dict[str, Any], problem: str, directory: Path, gguf_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("no model")
    with pytest.raises(ModelError, match=problem) as caught:
        open_source(model, **options)
    assert "\n" not in str(caught.value)


def test_a_hub_name_is_fetched_and_keeps_its_name(directory: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def fetch(model: str, revision: str | None, *, weights: bool) -> Path:
        asked.append((model, revision, weights))
        return directory

    monkeypatch.setattr(opening, "fetch_from_hub", fetch)
    source = open_model(EngineConfig(model="owner/name", revision="v1"), weights=False)
    assert (source.name, source.path) == ("owner/name", directory)
    assert asked == [("owner/name", "v1", False)]


def test_another_tokenizer_goes_with_its_template_and_counts(directory: Path, tmp_path: Path):
    other = model_directory(tmp_path / "other", chat_template="{{ messages[0].content }}!")
    plain, source = open_source(directory), open_source(directory, tokenizer=str(other))
    assert isinstance(source, WithTokenizer)
    assert source.tokenizer_json().content == DirectorySource(other).tokenizer_json().content
    assert parse_config(source.config()) == parse_config(plain.config())
    assert source.revision() != plain.revision()
    assert source.revision() == open_source(directory, tokenizer=str(other)).revision()
    assert source.tokenizer_kind() == "BPE"
    assert isinstance(open_tensors(source), SafetensorsReader)
    assert TextModel.load(source).render_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_gguf_may_lend_its_tokenizer(directory: Path, gguf_file: Path):
    source = open_source(directory, tokenizer=str(gguf_file))
    assert source.tokenizer_kind() == "gpt2/smollm"
    assert TextModel.load(source).encode("hello") == TextModel.load(open_source(gguf_file)).encode("hello")


def test_the_text_of_a_gguf_needs_neither_torch_nor_numpy_nor_gguf(gguf_file: Path):
    program = f"""
import sys
from pathlib import Path
from router.config import RouterConfig
from common.model.open import open_model
from common.text.text_model import TextModel
text = TextModel.load(open_model(RouterConfig(model={str(gguf_file)!r}), weights=False))
heavy = {{"torch", "numpy", "gguf", "transformers", "huggingface_hub"}}
print(text.encode("hello"), sorted(heavy & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    words = byte_level()["tokenizer.ggml.tokens"]
    assert (done.stdout, done.stderr) == (f"[{words.index('hello')}] []\n", "")


def answer(model: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of an engine over a model."""
    settings = EngineConfig(model=str(model), max_model_len=512, kv_cache_memory=Bytes(2**28), served_model_name="x")
    built = build_engine(settings, max_num_batched_tokens=64, shared_pool=False, clock=time.monotonic)
    try:
        assert built.name == "x"
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        sequence = Sequence("a", list(prompt), len(prompt), params)
        built.engine.add(sequence)
        while built.engine.load().running + built.engine.load().waiting:
            output = built.engine.step()
            assert output is None or output.failed == ()
        return sequence.output_ids
    finally:
        built.pool.close()


def converted(path: Path, directory: Path) -> Path:
    directory.mkdir()
    convert_gguf(path, directory)
    return directory


def test_an_engine_answers_from_a_gguf_as_from_its_conversion(gguf_file: Path, tmp_path: Path):
    torch.set_num_threads(1)
    path = write_model(gguf_file, "llama", random_model("llama"), kind=Kind.Q8_0)
    tokens = answer(path, list(range(5, 40)), 24)
    assert len(set(tokens)) > 4
    assert tokens == answer(converted(path, tmp_path / "made"), list(range(5, 40)), 24)


@pytest.mark.model
def test_the_demo_models_gguf_answers_as_the_converted_model(demo_model: Path, tmp_path: Path):
    source = MODELS["smollm2-135m"]
    path = _unpack(_download(source, tmp_path), source, tmp_path)
    text, same = TextModel.load(open_source(path)), TextModel.load(demo_model)
    for words in ("Hello world 12345", "  x\t\ty\n\n\n", "naïve café 日本語 🎉🇩🇪 \u200d", "I'm THEY'LL <|im_end|>"):
        assert text.encode(words) == same.encode(words)
    prompt = text.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    assert prompt == same.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    assert answer(path, prompt, 4) == answer(demo_model, prompt, 4)
