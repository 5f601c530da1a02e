"""Tokenizers of the kinds that models come with, trained on a few sentences: all of them have what tests attack."""

from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.tiny_text import CORPUS, byte_level, phi_like, sentencepiece_like, special_token

CONTROL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def gemma_like() -> Tokenizer:
    """As Gemma and Mistral's newer ones: spaces as ▁ but none in front, bytes where no letter is known."""
    tokenizer = sentencepiece_like()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace(scheme: str = "first") -> Tokenizer:
    """▁ comes from a pre-tokenizer: in front of the first piece only, or of each."""
    tokenizer = sentencepiece_like()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """As T5's and other SentencePiece ones; what it doesn't know is <unk>."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=CONTROL, unk_token="<unk>", show_progress=False, initial_alphabet=["<", "|", ">"]
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def lower_case() -> Tokenizer:
    """A byte-level one whose normalizer makes other text of a text."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return tokenizer


def split_by_pattern() -> Tokenizer:
    """As Llama 3's and Qwen's: a pattern cuts the text, bytes follow."""
    tokenizer = byte_level()
    pattern = Regex(r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "split_by_pattern": split_by_pattern,
    "lower_case": lower_case,
    "phi_like": phi_like,
    "sentencepiece": sentencepiece_like,
    "gemma_like": gemma_like,
    "metaspace_first": metaspace,
    "metaspace_always": lambda: metaspace("always"),
    "unigram": unigram,
}


def with_special(tokenizer: Tokenizer, text: str, **flags: bool) -> Tokenizer:
    """The same tokenizer with one more special token."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_special_tokens([special_token(text, **flags)])
    return copy


def with_pieces(tokenizer: Tokenizer, *texts: str) -> Tokenizer:
    """The same tokenizer with added tokens that are not special."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_tokens(list(texts))
    return copy
