"""Packs of every format version and codec, as they were written once: they are read for ever."""

import shutil
from pathlib import Path

import pytest

from kvtier.disk.codecs import default_codecs
from kvtier.disk.packs.chunk_seals import ChunkSeals
from kvtier.disk.packs.pack_format import FORMAT_VERSION, PLAIN_VERSION, SEALED_VERSION
from kvtier.disk.packs.pack_tier import PackTier
from tests.data.packs.make import CONTENT, FOLDER, KEYS, NAMESPACE_ID, PACK_ID, key_of
from tests.fakes.chunks import read_back

FIXTURES = sorted(path.name for path in FOLDER.glob("*.kvpack"))


@pytest.mark.parametrize("name", FIXTURES)
def test_a_pack_of_any_version_and_codec_is_read(tmp_path: Path, name: str) -> None:
    tier = PackTier(tmp_path, seals=ChunkSeals(KEYS))
    shutil.copyfile(FOLDER / name, tmp_path / f"{PACK_ID}.kvpack")
    record = tier.read_record(PACK_ID)
    assert record.namespace_id == NAMESPACE_ID
    assert {chunk.key: read_back(tier, chunk) for chunk in record.chunks} == {
        key_of(chunk): content for chunk, content in CONTENT.items()
    }


@pytest.mark.parametrize("name", FIXTURES)
def test_a_pack_of_any_version_is_rewritten_as_the_newest(tmp_path: Path, name: str) -> None:
    tier = PackTier(tmp_path, seals=ChunkSeals(KEYS))
    shutil.copyfile(FOLDER / name, tmp_path / f"{PACK_ID}.kvpack")
    old = tier.read_record(PACK_ID)
    new = tier.rewrite_pack(NAMESPACE_ID, old.chunks)
    assert tier.read_record(new.pack_id) == new
    assert [chunk.opened()[3:] for chunk in new.chunks] == [chunk.opened()[3:] for chunk in old.chunks]
    assert {chunk.sealed_by for chunk in new.chunks} == {KEYS.writing.name}
    assert [read_back(tier, chunk) for chunk in new.chunks] == list(CONTENT.values())


def test_every_version_and_codec_has_its_fixture() -> None:
    """A new version or codec comes with a pack: run `python -m tests.data.packs.make` and commit what it wrote."""
    versions = (PLAIN_VERSION, SEALED_VERSION)
    expected = {f"v{version}-{codec.name}.kvpack" for codec in default_codecs() for version in versions}
    assert expected <= set(FIXTURES)
    assert {name.removeprefix("v").partition("-")[0].partition(".")[0] for name in FIXTURES} == {
        str(version) for version in range(1, FORMAT_VERSION + 1)
    }


def test_each_codec_is_really_in_its_fixture(tmp_path: Path) -> None:
    tier = PackTier(tmp_path, seals=ChunkSeals(KEYS))
    for codec in default_codecs():
        for version in (PLAIN_VERSION, SEALED_VERSION):
            shutil.copyfile(FOLDER / f"v{version}-{codec.name}.kvpack", tmp_path / f"{PACK_ID}.kvpack")
            assert codec.name in {chunk.codec_name for chunk in tier.read_record(PACK_ID).chunks}
