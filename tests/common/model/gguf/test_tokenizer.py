"""A GGUF's tokenizer gives the same token ids and the same chat as transformers has from the same file; what neither a
byte-level nor a SentencePiece BPE is, is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.errors import ModelError
from common.model.gguf.gguf_model import GgufSource
from common.model.gguf.tokenizer import _SPLITS
from common.text.text_model import TextModel
from tests.support.gguf_models import SPM, TEMPLATE, WORDS, byte_level, random_model, sentencepiece, write_model

TEXTS = [
    "",
    " ",
    "hello world 12",
    "  two\n\n\tthree ",
    "naïve 日本語 🎉\u200d",
    "1234 ½² 12345",
    "\x00\x7f",
    "a<|im_end|>\n<|im_start|>b</s><|user|>",
    "I'm THEY'LL go/home\r\n x",
    "hello <think>x<|user|> hello",
    "▁x  y",
    "e\u0301 Á \N{OHM SIGN}",
]
SOME = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def write(directory: Path, tokenizer: dict[str, Any], architecture: str = "llama") -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": len(tokenizer["tokenizer.ggml.tokens"])}
    return write_model(directory / "x.gguf", architecture, random_model(architecture, **sizes), tokenizer=tokenizer)


def both(path: Path) -> tuple[TextModel, PreTrainedTokenizerFast]:
    return TextModel.load(GgufSource(path)), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def assert_same(path: Path, texts: list[str] = TEXTS) -> None:
    ours, theirs = both(path)
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        stream = ours.detokenizer(skip_special_tokens=False)
        assert stream.push(ids) + stream.finish() == theirs.decode(ids)
    for role in ("bos_token", "eos_token", "unk_token"):
        assert ours.special_tokens.get(role) == getattr(theirs, role)
    chat = [{"role": "user", "content": "hello 12"}]
    assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("pre", [*_SPLITS, "default", "gpt-2", None])
def test_byte_level_ids_are_transformers(pre: str | None, tmp_path: Path):
    assert_same(write(tmp_path, byte_level(**{"tokenizer.ggml.pre": pre})))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "phi3"])
def test_byte_level_ids_are_transformers_in_every_family(architecture: str, tmp_path: Path):
    assert_same(write(tmp_path, byte_level("qwen2"), architecture))


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2", "gemma3"])
def test_sentencepiece_ids_are_transformers(architecture: str, tmp_path: Path):
    assert_same(write(tmp_path, sentencepiece(), architecture))


@pytest.mark.parametrize("tokenizer", [byte_level("llama-bpe", **SOME), sentencepiece(**SOME)], ids=["bpe", "spm"])
def test_bos_and_eos_are_added_where_the_file_says_so(tokenizer: dict[str, Any], tmp_path: Path):
    path = write(tmp_path, tokenizer)
    ours, _ = both(path)
    assert_same(path)
    assert (ours.encode("he")[0], ours.encode("he")[-1]) == (1, 2)


@pytest.mark.parametrize(
    ("tokenizer", "bos"),
    [
        (byte_level("llama-bpe"), True),
        (byte_level("tekken"), True),
        (byte_level("qwen2"), False),
        (byte_level("smollm"), False),
        (sentencepiece(), True),
        (sentencepiece(**{"tokenizer.ggml.add_bos_token": False}), False),
    ],
)
def test_a_file_that_is_silent_on_bos_means_its_kinds_usual(tokenizer: dict[str, Any], bos: bool, tmp_path: Path):
    """As in llama.cpp."""
    if tokenizer["tokenizer.ggml.model"] == "gpt2":
        tokenizer["tokenizer.ggml.add_bos_token"] = None
    ids = TextModel.load(GgufSource(write(tmp_path, tokenizer))).encode("he")
    assert (ids[0] == 1) == bos


def test_smollm_splits_digits_one_by_one(tmp_path: Path):
    """As the model's own tokenizer.json does, and llama.cpp; transformers does not know this name in a GGUF."""
    ours, theirs = both(write(tmp_path, byte_level("smollm")))
    one, two = WORDS.index("1"), WORDS.index("2")
    assert ours.encode("hello 12")[-2:] == [one, two]
    assert theirs("hello 12")["input_ids"][-1] == WORDS.index("12")
    without_digits = [text for text in TEXTS if not any(letter.isdigit() for letter in text)]
    assert_same(write(tmp_path, byte_level("smollm")), without_digits)


def test_no_space_is_put_in_front_where_the_file_says_so(tmp_path: Path):
    """As in llama.cpp; transformers overlooks it."""
    tokenizer = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    ours, _ = both(write(tmp_path, tokenizer))
    assert [SPM[i] for i in ours.encode("hello hello")] == ["<s>", "he", "ll", "o", "▁hello"]
    stream = ours.detokenizer(skip_special_tokens=True)
    assert stream.push(ours.encode("hello hello")) + stream.finish() == "hello hello"


def test_a_whole_word_needs_no_merges_where_the_family_says_so(tmp_path: Path):
    """Llama 3's tokenizer.json has ignore_merges."""
    tokens = [*WORDS, "wo"]
    kinds = [3, 3, 3, *[1] * (len(tokens) - 3)]
    for pre, whole in [("llama-bpe", True), ("qwen2", False)]:
        values = {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.add_bos_token": False,
        }
        model = TextModel.load(GgufSource(write(tmp_path, byte_level(pre, **values))))
        assert (model.encode("wo") == [len(tokens) - 1]) == whole


def test_user_defined_tokens_are_whole_but_not_special(tmp_path: Path):
    model = TextModel.load(GgufSource(write(tmp_path, sentencepiece())))
    think, user = SPM.index("<think>"), SPM.index("<|user|>")
    assert {think, user} <= set(model.encode("x<think>y<|user|>z"))
    stream = model.detokenizer(skip_special_tokens=True)
    assert stream.push([think, user]) + stream.finish() == "<think>"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tokenizer.ggml.model": "bert"}, "model 'bert' is not supported"),
        ({"tokenizer.ggml.model": "t5"}, "model 't5' is not supported"),
        ({"tokenizer.ggml.model": None}, "model is missing"),
        ({"tokenizer.ggml.pre": "klingon"}, "pre 'klingon' is a pre-tokenizer that is not supported"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["h e", "x"]}, "merges has 'x'"),
        ({"tokenizer.ggml.merges": ["h nowhere"]}, "merges has 'h nowhere'"),
        ({"tokenizer.ggml.merges": ["h  e"]}, "no two tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 entries for"),
        ({"tokenizer.ggml.tokens": [*WORDS, "a"], "tokenizer.ggml.token_type": None}, "has 1 tokens twice"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"tokenizer.ggml.token_type": ["a"] * len(WORDS)}, "array of int"),
    ],
    ids=range(12),
)
def test_what_does_not_fit_is_named(values: dict[str, Any], problem: str, tmp_path: Path):
    with pytest.raises(ModelError, match=problem):
        TextModel.load(GgufSource(write(tmp_path, byte_level(**values))))


@pytest.mark.parametrize("scores", [None, [0.0], [float("nan")] * len(SPM)], ids=["none", "one", "nan"])
def test_sentencepiece_needs_scores(scores: list[float] | None, tmp_path: Path):
    with pytest.raises(ModelError, match="scores"):
        TextModel.load(GgufSource(write(tmp_path, sentencepiece(**{"tokenizer.ggml.scores": scores}))))


def test_the_kind_and_the_template_are_told(tmp_path: Path):
    source = GgufSource(write(tmp_path, byte_level("llama-bpe")))
    assert source.tokenizer_kind() == "gpt2/llama-bpe"
    template = source.chat_template()
    assert template is not None
    assert template.text == TEMPLATE
    assert GgufSource(write(tmp_path, sentencepiece())).tokenizer_kind() == "llama"
    bare = GgufSource(write(tmp_path, byte_level(**{"tokenizer.chat_template": None})))
    assert bare.chat_template() is None
