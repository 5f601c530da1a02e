"""A model in several GGUF files is opened by its first; what doesn't belong together is refused."""

import shutil
from pathlib import Path

import pytest

from common.errors import ModelError
from common.model.gguf.gguf_model import GgufSource
from common.model.gguf.header import TYPES
from common.model.gguf.split import part_names
from common.model.open import open_source
from tests.support.gguf_models import Kind, gguf, random_model, split_file, write_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = write_model(tmp_path_factory.mktemp("made") / "x.gguf", "llama", random_model("llama"))
    split_file(whole, 3)
    whole.unlink()
    return whole.parent


@pytest.fixture
def parts(made: Path, tmp_path: Path) -> list[Path]:
    directory = Path(shutil.copytree(made, tmp_path / "model"))
    return sorted(directory.iterdir())


def test_names_of_all_parts_follow_from_one():
    assert part_names("a.b-00002-of-00003.gguf") == [f"a.b-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert part_names("whole.gguf") == ["whole.gguf"]
    assert part_names("x-2-of-3.gguf") == ["x-2-of-3.gguf"]


def test_a_directory_with_one_split_model_is_that_model(parts: list[Path]):
    source = open_source(parts[0].parent)
    assert source.path == parts[0]
    assert {tensor.path for tensor in source.tensors()} == set(parts[1:])


def test_every_part_counts_for_the_revision(parts: list[Path]):
    before = GgufSource(parts[0]).revision()
    for part in parts[1:]:
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)
        assert GgufSource(parts[0]).revision() != before
        content[-1] ^= 1
        part.write_bytes(content)
    assert GgufSource(parts[0]).revision() == before


def test_another_part_names_the_first(parts: list[Path]):
    with pytest.raises(ModelError, match=r"part 2 of 3: name the first one, x-00001-of-00003\.gguf"):
        GgufSource(parts[1]).config()


def test_a_missing_part_is_named(parts: list[Path]):
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"x-00003-of-00003\.gguf can't be read: No such file"):
        GgufSource(parts[0]).config()


def test_a_part_of_another_place_is_refused(parts: list[Path]):
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelError, match=r"x-00003-of-00003\.gguf: split\.no and .* make it part 3 of 3"):
        GgufSource(parts[0]).config()


def test_a_name_that_says_otherwise_is_refused(parts: list[Path]):
    renamed = parts[0].rename(parts[0].with_name("x.gguf"))
    with pytest.raises(ModelError, match="part 1 of 3: its name must say so"):
        GgufSource(renamed).config()


def test_types_have_the_sizes_that_the_package_has():
    assert {Kind[each.name]: (each.block, each.num_bytes) for each in TYPES.values()} == {
        kind: gguf.GGML_QUANT_SIZES[kind] for kind in map(Kind, TYPES)
    }
    assert {kind.name for kind in gguf.quants._type_traits} - {"NVFP4"} <= {each.name for each in TYPES.values()}
