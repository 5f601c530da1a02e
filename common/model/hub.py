"""Models by their names on the Hugging Face hub: only the files that are read here, never code."""

import re
import sys
from pathlib import Path

from common.errors import ModelError
from common.model.gguf.split import part_names

TEXT_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
WEIGHT_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}\w)?"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:/(?P<file>(?:[\w-][\w.-]*/)*[\w-][\w.-]*\.gguf))?", re.ASCII)


def is_hub_name(model: str) -> bool:
    """Whether it reads as owner/name, or owner/name/file.gguf."""
    match = _NAME.fullmatch(model)
    return match is not None and (match["file"] is not None or not model.endswith(".gguf"))


def fetch_from_hub(model: str, revision: str | None, *, weights: bool) -> Path:
    """The cached directory or GGUF file of a model on the hub, fetched as far as needed. Raises ModelError."""
    import huggingface_hub  # 0.15 s, for this alone
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    match = _NAME.fullmatch(model)
    if match is None:
        raise ModelError(f"{model!r} is no name on the hub", field="model")
    if not sys.stderr.isatty():
        disable_progress_bars()
    at = f" at revision {revision}" if revision else ""
    try:
        if match["file"]:
            folder, _, name = match["file"].rpartition("/")
            files = [f"{folder}/{part}".lstrip("/") for part in part_names(name)]
            paths = [huggingface_hub.hf_hub_download(match["repo"], file, revision=revision) for file in files]
            return Path(paths[files.index(match["file"])])
        wanted = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
        return Path(huggingface_hub.snapshot_download(match["repo"], revision=revision, allow_patterns=wanted))
    except errors.GatedRepoError as error:
        problem = "needs its terms accepted on the hub, and a token in HF_TOKEN"
        raise ModelError(f"{model}{at} {problem}", field="model") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{model} has no revision {revision} on the hub", field="revision") from error
    except errors.RepositoryNotFoundError as error:
        problem = "is neither here nor on the hub; if it is private, a token is needed in HF_TOKEN"
        raise ModelError(f"{model} {problem}", field="model") from error
    except errors.LocalEntryNotFoundError as error:
        problem = "is not here, not in the hub's cache, and the hub can't be reached"
        raise ModelError(f"{model}{at} {problem}", field="model") from error
    except errors.EntryNotFoundError as error:
        raise ModelError(f"{model}{at} is not on the hub: it has no such file", field="model") from error
    except Exception as error:  # of HTTP, TLS, the disk: the library has no common base for them
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"{model}{at} can't be fetched from the hub: {reason}", field="model") from error
