"""Which namespace an object belongs to, and its chunk key."""

from dataclasses import dataclass, replace

from kvtier_lmcache.object_layouts import ObjectFamily, ObjectLayout, chunk_key_of, family_of


@dataclass
class Name:
    """LMCache's `ObjectKey`."""

    chunk_hash: bytes = b"12345678"
    model_name: str = "org/model"
    kv_rank: int = 2 << 24 | 1 << 16 | 2 << 8 | 1
    object_group_id: int = 0
    cache_salt: str = ""


def test_each_field_makes_another_key() -> None:
    name = Name()
    others = [
        name,
        replace(name, chunk_hash=b"1234567"),
        replace(name, model_name="org/mode"),
        replace(name, kv_rank=name.kv_rank ^ 1),
        replace(name, object_group_id=1),
        replace(name, cache_salt="a"),
        replace(name, cache_salt="l", model_name="org/mode"),
    ]
    assert len({chunk_key_of(other) for other in others}) == len(others)
    assert chunk_key_of(name) == chunk_key_of(Name())
    assert len(chunk_key_of(name)) == 36


def test_ranks_of_one_world_share_a_namespace() -> None:
    assert family_of(Name()) == ObjectFamily("org/model", 2, 0)
    assert family_of(replace(Name(), kv_rank=2 << 24)) == family_of(Name())
    assert family_of(replace(Name(), kv_rank=4 << 24)) != family_of(Name())


def test_each_fact_of_a_layout_makes_another_namespace() -> None:
    layout = ObjectLayout(ObjectFamily("m", 1, 0), (("2x4", "torch.bfloat16"),), 16)
    others = [
        layout,
        replace(layout, family=ObjectFamily("n", 1, 0)),
        replace(layout, parts=(("4x2", "torch.bfloat16"),)),
        replace(layout, parts=(("2x4", "torch.float16"),)),
        replace(layout, object_bytes=32),
    ]
    assert len({tuple(other.fingerprint().items()) for other in others}) == len(others)
    assert layout.kv_layout().groups[0].useful_bytes == 16
