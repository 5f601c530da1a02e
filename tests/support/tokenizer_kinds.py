"""Tokenizers of the kinds that models come with, trained on a few sentences: all of them have what tests attack."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.tiny_text import CORPUS, byte_level, phi_like, sentencepiece_like, special_token

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
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


def wordpiece(cleanup: bool = False) -> Tokenizer:
    """As BERT's: pieces that go on have ## in front. cleanup: some spaces before punctuation go."""
    words = [
        "[UNK]",
        "the",
        "relay",
        "##s",
        "##ing",
        ".",
        ",",
        "do",
        "not",
        "n't",
        "'",
        "##東",
        "\N{GRINNING FACE}",
        "##",
    ]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return tokenizer


def nested_bytes() -> Tokenizer:
    """Byte-level, but one can only see that inside of its decoder."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("#", 0, 0)])
    return tokenizer


def words(decoder: decoders.Decoder | None, vocabulary: Sequence[str]) -> Tokenizer:
    """Whole words, as many as are given."""
    model = models.WordLevel({word: number for number, word in enumerate(["<unk>", *vocabulary])}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def pieces_then(*steps: decoders.Decoder) -> Tokenizer:
    """Raw bytes where no letter is known, and steps that see the whole text."""
    tokenizer = sentencepiece_like()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), *steps])
    return tokenizer


LETTERS = ["a", "b", "ab", "aab", " ", "  ", "x ", "\u2581", "\u2581the", "東", "\N{GRINNING FACE}", "-", "a-", "--b"]
DECODERS: dict[str, Callable[[], Tokenizer]] = KINDS | {  # for what is decoded only
    "wordpiece": wordpiece,
    "wordpiece_cleaned": lambda: wordpiece(cleanup=True),
    "nested_bytes": nested_bytes,
    "no_decoder": lambda: words(None, ["the", "relay", "東京", "."]),
    "word_ends": lambda: words(decoders.BPEDecoder(), ["the</w>", "re", "lay</w>", "東京</w>", ".</w>", "</w>"]),
    "ctc": lambda: words(decoders.CTC(), ["<pad>", "|", "h", "e", "l", "o", "東", "n't"]),
    "metaspace_and_more": lambda: words(
        decoders.Sequence([decoders.Replace("b", "東"), decoders.Metaspace(), decoders.Strip("x", 1, 0)]), LETTERS
    ),
    "replaced_at_last": lambda: pieces_then(decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)),
    "replaced_across_tokens": lambda: words(
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a-b", "東"), decoders.Replace("aab", "")]), LETTERS
    ),
    "bytes_without_fuse": lambda: words(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), [*LETTERS, *BYTES]
    ),
}


def decoded(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """As the library decodes; but of a run of raw bytes with a broken one, what SentencePiece makes of it.

    The library would write U+FFFD for each byte of that run, also for those of characters that are complete.
    """
    tokens = [tokenizer.id_to_token(one) for one in ids]
    added = tokenizer.get_added_tokens_decoder()
    hidden = {one for one, token in added.items() if token.special} if skip_special_tokens else set()
    shown = [token for one, token in zip(ids, tokens, strict=True) if token is not None and one not in hidden]
    if "ByteFallback" not in str(tokenizer.decoder):
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
    whole: list[str] = []
    for is_byte, run in groupby(shown, lambda token: re.fullmatch("<0x[0-9A-F]{2}>", token) is not None):
        letters = list(run)
        text = characters(bytes(int(token[3:5], 16) for token in letters)) if is_byte else ""
        whole += [text] if REPLACEMENT in text else letters
    return str(tokenizer.decoder.decode(whole))


def characters(raw: bytes) -> str:
    """UTF-8, with U+FFFD for each byte that belongs to no character."""
    text, at = "", 0
    while at < len(raw):
        for size in range(1, 5):
            with suppress(UnicodeDecodeError):
                text += raw[at : at + size].decode()
                at += size
                break
        else:
            text += REPLACEMENT
            at += 1
    return text


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
