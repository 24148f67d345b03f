"""`kvtier export --decoded`: plain tensors that a notebook loads, with the values that were stored."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from safetensors import deserialize, safe_open

from kvtier._pb import cache_pb2
from kvtier.bundles.bundle import BundleChunk
from kvtier.bundles.decoded import DecodedFile
from kvtier.bundles.spool import Spool
from kvtier.config import DaemonConfig
from kvtier.core.layout import GROUP_SUFFIX_BYTES, ChunkKey, GroupLayout, KVLayout, group_idx_of
from kvtier.core.stored import StoredChunk
from kvtier.disk.base import checksum_of
from tests.fakes.bundles import a_bundle
from tests.fakes.chunks import noise
from tests.fakes.operator import Stub, pin, store_last_apart
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, running
from tests.unit.bundles.test_bundle_space import small_disk, used_bytes
from tests.unit.bundles.test_round_trip import bundle_of, home, refused

NUM_CHUNKS, BLOCKS, PAGE_BYTES = 5, 2, 1500
LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]
ONE_RANK = KVLayout(
    num_ranks=1,
    rank_bytes=8192,
    num_writers=1,
    groups=(GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=len(LAYERS) * BLOCKS * PAGE_BYTES),),
)


def fingerprint(**changes: Any) -> dict[str, str]:
    """Return the fields that `kvtier_connector.engine.namespace.namespace_fingerprint` writes and an export reads."""
    group = {"group": 0, "page_bytes": PAGE_BYTES, "dtypes": [], "layers": LAYERS} | changes.pop("group", {})
    fields = {
        "kv_layout": "LBNHC",
        "kv_cache_dtype": "bfloat16",
        "parallel": {"pp": 1, "tp": 1},
        "tokens": {"blocks_per_chunk": BLOCKS},
        "groups": [group],
    }
    return {name: json.dumps(value) for name, value in (fields | changes).items()}


async def decoded(stub: Stub) -> bytes:
    request = cache_pb2.ExportRequest(name="p", decoded=True)
    return b"".join([piece.data async for piece in stub.Export(request)])


class Loaded(NamedTuple):
    """A tensor as any reader has it."""

    dtype: str
    shape: list[int]
    data: bytes

    @property
    def rows(self) -> list[bytes]:
        """The bytes of each row."""
        return [bytes(row) for row in np.frombuffer(self.data, np.uint8).reshape(self.shape[0], -1)]


def loaded(data: bytes, folder: Path) -> tuple[dict[str, str], dict[str, Loaded]]:
    """Open the file with nothing but safetensors; numpy has no bfloat16, so that the bytes are compared."""
    file = folder / "p.safetensors"
    file.write_bytes(data)
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    tensors = {name: Loaded(each["dtype"], each["shape"], bytes(each["data"])) for name, each in deserialize(data)}
    return metadata, tensors


def exported(
    folder: Path, fields: dict[str, str], keys: list[ChunkKey], layout: KVLayout
) -> tuple[dict[str, str], dict[str, Loaded], list[bytes]]:
    """Store a prompt and export it decoded; returns metadata, tensors, and the payloads that were stored."""

    async def scenario() -> tuple[bytes, list[bytes]]:
        config = home(folder, "a")
        async with running(config) as stub, ScriptedEngine(config, layout, fingerprint=fields) as engine:
            await engine.bind(await pin(stub, recipe_json='{"kind": "text"}'), keys)
            await store_last_apart(stub, engine, keys)
            return await decoded(stub), [engine.payload(key) for key in keys]

    data, payloads = asyncio.run(scenario())
    return *loaded(data, folder), payloads


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "values"),
    [
        ("bfloat16", "BF16", 750),
        ("float32", "F32", 375),
        ("fp8_e4m3", "U8", 1500),
        ({"dtype": "fp8_e4m3", "not": ["0"]}, "U8", 1500),  # of --kv-cache-dtype-skip-layers
    ],
)
def test_each_layer_is_a_tensor(tmp_path: Path, kv_cache_dtype: object, dtype: str, values: int) -> None:
    keys = [chunk_key(number) for number in range(NUM_CHUNKS)]
    metadata, tensors, payloads = exported(tmp_path, fingerprint(kv_cache_dtype=kv_cache_dtype), keys, ONE_RANK)
    assert metadata["kvtier.prompt.name"] == "p"
    assert metadata["kvtier.decoded"] == "1"
    assert set(tensors) == {*LAYERS, "kvtier.tokens", "kvtier.recipe"}
    assert np.frombuffer(tensors["kvtier.tokens"].data, np.uint32).tolist() == list(range(80))
    assert tensors["kvtier.recipe"].data == b'{"kind": "text"}'
    layer_bytes = BLOCKS * PAGE_BYTES
    for number, layer in enumerate(LAYERS):
        assert (tensors[layer].dtype, tensors[layer].shape) == (dtype, [NUM_CHUNKS * BLOCKS, values])
        stored = b"".join(payload[number * layer_bytes : (number + 1) * layer_bytes] for payload in payloads)
        assert tensors[layer].data == stored


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_layout": None},
        {"kv_layout": "BLNHC"},
        {"parallel": {"pp": 2}},
        {"parallel": None},
        {"group": {"page_bytes": PAGE_BYTES + 1}},
        {"group": {"group": 1}},
        {"group": {"layers": [LAYERS[0]] * 2}},
        {"group": {"layers": [7, 8]}},
        {"groups": []},
        {"tokens": {}},
    ],
    ids=str,
)
def test_without_certainty_the_bytes_of_a_group_stay_together(tmp_path: Path, changes: dict[str, Any]) -> None:
    keys = [chunk_key(number) for number in range(NUM_CHUNKS)]
    _, tensors, payloads = exported(tmp_path, fingerprint(**changes), keys, ONE_RANK)
    assert set(tensors) == {"group0", "kvtier.tokens", "kvtier.recipe"}
    assert tensors["group0"].rows == payloads


def test_an_engine_that_says_nothing_of_its_layers(tmp_path: Path) -> None:
    _, tensors, payloads = exported(tmp_path, {"weights": "1"}, [chunk_key(0)], ONE_RANK)
    assert tensors["group0"].rows == payloads


def test_ranks_and_groups_have_tensors_of_their_own(tmp_path: Path) -> None:
    layout = KVLayout(
        num_ranks=2,
        rank_bytes=8192,
        num_writers=2,
        groups=(
            ONE_RANK.groups[0],
            GroupLayout(group_idx=1, chunk_tokens=16, useful_bytes=1000, window_chunks=2),
        ),
    )
    keys = [chunk_key(number) for number in range(3)]
    keys += [chunk_key(number)[:-GROUP_SUFFIX_BYTES] + (1).to_bytes(GROUP_SUFFIX_BYTES, "big") for number in (1, 2)]
    payloads = [noise(layout.payload_bytes(group_idx_of(key)), number) for number, key in enumerate(keys)]
    _, tensors = loaded(decoded_here(layout, keys, payloads, tmp_path), tmp_path)
    assert set(tensors) == {
        *(f"{layer}.rank{rank}" for layer in LAYERS for rank in (0, 1)),
        *("group1.rank0", "group1.rank1", "kvtier.tokens", "kvtier.recipe"),
    }
    region, layer_bytes = 6000, BLOCKS * PAGE_BYTES
    second = b"".join(payload[region + layer_bytes : 2 * region] for payload in payloads[:3])
    assert tensors[f"{LAYERS[1]}.rank1"].data == second
    assert tensors["group1.rank1"].rows == [payload[1000:] for payload in payloads[3:]]


def decoded_here(layout: KVLayout, keys: list[ChunkKey], payloads: list[bytes], folder: Path) -> bytes:
    """Return the decoded file of these payloads, without a daemon: test engines write all ranks alike."""
    with Spool(folder) as source, Spool(folder) as target:
        chunks = []
        for key, payload in zip(keys, payloads, strict=True):
            chunk = StoredChunk(
                key=key,
                pack_id=source.pack_id,
                offset=source.num_bytes,
                stored_bytes=len(payload),
                raw_bytes=len(payload),
                codec="raw",
                checksum=checksum_of([memoryview(payload)]),
            )
            source.append(payload)
            chunks.append(BundleChunk(chunk, b""))
        bundle, _ = a_bundle()
        bundle = dataclasses.replace(bundle, layout=layout, fingerprint=fingerprint(), chunks=tuple(chunks))
        file = DecodedFile(bundle)
        file.write_front(target)
        for part in (chunks[:2], chunks[2:]):
            file.write_chunks(source, target, part)
        assert target.num_bytes == file.file_bytes
        return target.read(target.num_bytes, 0)


def test_torch_and_numpy_load_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    exported(tmp_path, fingerprint(), [chunk_key(0)], ONE_RANK)
    assert load_file(tmp_path / "p.safetensors")[LAYERS[0]].dtype is torch.bfloat16
    (tmp_path / "a").rename(tmp_path / "b")
    exported(tmp_path, fingerprint(kv_cache_dtype="float16"), [chunk_key(0)], ONE_RANK)
    with safe_open(tmp_path / "p.safetensors", framework="np") as opened:
        assert opened.get_tensor(LAYERS[0]).dtype == np.float16


async def stored(config: DaemonConfig) -> None:
    await bundle_of(config)


def test_an_import_refuses_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = home(tmp_path, "a")
        await stored(config)
        async with running(config) as stub:
            data = await decoded(stub)
            message = "exported with --decoded, which is for reading only"
            await refused(stub, data, grpc.StatusCode.INVALID_ARGUMENT, message)
            assert not list((config.disk.disk_dir / "tmp").iterdir())

    asyncio.run(scenario())


def test_it_finds_space_for_both_files_or_says_how_much_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        config = home(tmp_path, "a")
        await stored(config)
        async with running(config) as stub:
            needed_bytes = sum([len(await decoded(stub)), len(await bundle_of_running(stub))])
            small_disk(monkeypatch, config, used_bytes(config) + needed_bytes - 1)
            with pytest.raises(grpc.aio.AioRpcError, match="the export of prompt 'p' needs") as caught:
                await decoded(stub)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert not list((config.disk.disk_dir / "tmp").iterdir())
            small_disk(monkeypatch, config, used_bytes(config) + needed_bytes)
            for _ in range(3):
                assert await decoded(stub)

    asyncio.run(scenario())


async def bundle_of_running(stub: Stub) -> bytes:
    return b"".join([piece.data async for piece in stub.Export(cache_pb2.ExportRequest(name="p"))])
