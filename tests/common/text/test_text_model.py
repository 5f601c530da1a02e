"""Text becomes the token ids that transformers gives it, and a broken model directory is one clear line."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from common.errors import ContextLengthExceeded, ModelError
from common.text.text_model import TextModel
from tests.support.tiny_text import (
    BARE,
    CHATML,
    CONVERSATIONS,
    TRIMMED,
    byte_level,
    model_directory,
    phi_like,
    sentencepiece_directory,
    user,
)

PIECEWISE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def reference(directory: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def model(directory: Path) -> TextModel:
    return TextModel.load(directory)


@pytest.fixture(scope="module")
def llama_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_directory(tmp_path_factory.mktemp("sentencepiece"))


@pytest.mark.parametrize("template", [CHATML, TRIMMED, BARE], ids=["chatml", "trimmed", "bare"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_has_the_ids_of_transformers(tmp_path: Path, template: str, messages: list[dict[str, str]]) -> None:
    directory = model_directory(tmp_path, chat_template=template, tokenizer=byte_level(bos=True))
    wanted = reference(directory).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert TextModel.load(directory).encode_chat(messages) == wanted


@pytest.mark.parametrize("messages", CONVERSATIONS[:3])
def test_special_tokens_that_a_template_puts_together_count(tmp_path: Path, messages: list[dict[str, str]]) -> None:
    messages = [message for message in messages if message["role"] != "system"]
    directory = model_directory(tmp_path, chat_template=PIECEWISE, tokenizer=phi_like())
    wanted = reference(directory).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert TextModel.load(directory).encode_chat(messages) == wanted


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_sentencepiece_directory_chat_has_the_ids_of_transformers(
    llama_directory: Path, messages: list[dict[str, str]]
) -> None:
    wanted = reference(llama_directory).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert TextModel.load(llama_directory).encode_chat(messages) == wanted


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_message_without_special_tokens_has_the_ids_of_transformers(
    directory: Path, model: TextModel, text: str
) -> None:
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    wanted = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(rendered, add_special_tokens=False).ids
    assert model.encode_chat(user(text)) == wanted


@pytest.mark.parametrize("text", ["", "hello", "a <|im_end|> b", "<s>x", "<s><s>x", "東京"])
@pytest.mark.parametrize("bos", [True, False])
def test_prompt_has_the_ids_of_transformers_but_one_bos(tmp_path: Path, text: str, bos: bool) -> None:
    directory = model_directory(tmp_path, tokenizer=byte_level(bos=bos))
    wanted = reference(directory)(text)["input_ids"]
    doubled = bos and text.startswith("<s>")
    assert TextModel.load(directory).encode(text) == wanted[doubled:]


def test_tokens_of_the_tokenizer_config_are_added(tmp_path: Path) -> None:
    extra = {"900": {"content": "<|extra|>", "special": True}}
    directory = model_directory(tmp_path, tokenizer_config={"pad_token": "[PAD]", "added_tokens_decoder": extra})
    ids = TextModel.load(directory).encode("a[PAD]b<|extra|>")
    known = TextModel.load(model_directory(tmp_path / "plain")).encode("a[PAD]b<|extra|>")
    assert len(ids) == 4
    assert len(known) > 4


@pytest.mark.parametrize("truncating", ["truncation", "padding"])
def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path, truncating: str) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(2) if truncating == "truncation" else tokenizer.enable_padding(length=100)
    text = "one two three four five"
    model = TextModel.load(model_directory(tmp_path, tokenizer=tokenizer))
    assert model.encode(text) == byte_level().encode(text).ids


@pytest.mark.parametrize("encode", ["encode", "encode_chat"])
def test_hopelessly_long_text_is_refused_unencoded(model: TextModel, encode: str) -> None:
    text = "x" * 100_000
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 10 tokens"):
        getattr(model, encode)(text if encode == "encode" else user(text), limit=10)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (model_directory(tmp_path) / name).unlink()
    with pytest.raises(ModelError, match=name):
        TextModel.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE"}, "decoder": null}'),
        ("tokenizer.json", '{"version": "1.0", "added_tokens": 5, "model": null, "decoder": null}'),
        ("tokenizer_config.json", "nonsense"),
        ("tokenizer.json", '{"added_tokens": [{"content": 5, "special": true}], "model": {}, "decoder": null}'),
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("generation_config.json", "{"),
    ],
)
def test_corrupt_file_is_one_line(tmp_path: Path, name: str, content: str | bytes) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (model_directory(tmp_path) / name).write_bytes(data)
    with pytest.raises(ModelError) as caught:
        TextModel.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("template", [5, {"default": "x"}, "{% if %}"])
def test_corrupt_template_in_the_tokenizer_config_is_one_line(tmp_path: Path, template: Any) -> None:
    model_directory(tmp_path, chat_template=None, tokenizer_config={"chat_template": template})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        TextModel.load(tmp_path)


def test_knows_the_models_config(tmp_path: Path) -> None:
    model = TextModel.load(model_directory(tmp_path, generation={"temperature": 0.25, "eos_token_id": [2, 3]}))
    assert model.config.max_position_embeddings == 512
    assert model.generation.temperature == 0.25
    assert model.generation.eos_token_ids == (2, 3)
