"""A model in several GGUF files, as gguf-split cuts it: the first has the metadata."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from common.model.gguf.header import GgufFile, GgufTensor, read_gguf

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """Of all files of the model that has this one; of this alone where it is whole."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def first_parts(paths: Iterable[Path]) -> list[Path]:
    """Those that are whole, and of the others the first of each model."""
    return [path for path in paths if part_names(path.name)[:1] == [path.name]]


def read_parts(path: Path) -> GgufFile:
    """The headers of a model's files as one. Raises ModelError."""
    first = read_gguf(path)
    count, number = (first.optional(f"split.{key}", int) or 0 for key in ("count", "no"))
    if count <= 1:
        return first
    names = part_names(path.name)
    if len(names) != count or not 0 <= number < count or names[number] != path.name:
        raise first.error("split.no", f"makes it part {number + 1} of {count}: its name must say so")
    if number:
        raise first.error("split.no", f"makes it part {number + 1} of {count}: name the first one, {names[0]}")
    parts = [first, *(read_gguf(path.with_name(name)) for name in names[1:])]
    tensors: dict[str, GgufTensor] = {}
    for i, part in enumerate(parts):
        if (part.optional("split.no", int), part.optional("split.count", int)) != (i, count):
            raise part.error("split.no", f"and split.count must make it part {i + 1} of {count}")
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise part.error(f"tensor {name[:60]!r}", f"is in {tensors[name].path}, too")
            tensors[name] = tensor
    if (total := first.optional("split.tensors.count", int)) not in (None, len(tensors)):
        raise first.error("split.tensors.count", f"is {total}, the files have {len(tensors)}")
    return replace(first, tensors=tensors, paths=tuple(part.path for part in parts))
