"""Readers of what people write: the daemon's settings, and files of prompts."""

from collections.abc import Sequence
from pathlib import Path

from kvtier.config.load import load_config
from kvtier.library.declared.files import read_declared
from tests.fuzz.file_targets import FileTarget

_CONFIGS = Path(__file__).parents[2] / "configs"


class TomlTarget(FileTarget):
    """Settings of the daemon."""

    name = "toml"
    words = (
        b"[host]",
        b"[owners]",
        b"bytes = ",
        b'"64GiB"',
        b"{ pins = 1 }",
        b"= {",
        b"'''",
        b'"""',
        b"1979-05-27",
        b"inf",
    )

    def seeds(self) -> Sequence[bytes]:
        """See `Target`."""
        shipped = (_CONFIGS / "kvtier.toml").read_bytes()
        settings = b"\n".join(
            line.removeprefix(b"#")
            for line in shipped.splitlines()
            if (line.startswith((b"#", b"[")) and b"=" in line) or line.startswith(b"[")
        )
        owners = b'[owners]\nsupport = { pins = 100, tokens = 500_000, bytes = "20GiB" }\n[log]\nlevel = "info"\n'
        return [settings, owners]

    def _read(self, data: bytes) -> None:
        path = self.folder / "kvtier.toml"
        path.write_bytes(data)
        load_config(path=path, environ={})


class YamlTarget(FileTarget):
    """Files of prompts, with aliases."""

    name = "yaml"
    words = (
        *(
            b"prompts:\n",
            b"- name: ",
            b"&a ",
            b"*a",
            b"<<: *a",
            b"!!python/object ",
            b"!!binary ",
            b"system_file: /dev/zero",
        ),
        *(b"---\n", b"? ", b"| \n", b"tokens: [1, 2]", b"1:2:3", b"=", b"0o7", b".inf", b"2001-01-01", b"text_file: -"),
    )

    def seeds(self) -> Sequence[bytes]:
        """See `Target`."""
        folder = _CONFIGS / "kubernetes" / "example" / "prompts"
        for source in folder.iterdir():
            (self.folder / source.name).write_bytes(source.read_bytes())
        laughs = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
        return [(folder / "prompts.yaml").read_bytes(), laughs.encode(), b"prompts: [{name: p, text: hello, ttl: 1h}]"]

    def _read(self, data: bytes) -> None:
        path = self.folder / "fuzzed.yaml"
        path.write_bytes(data)
        read_declared([str(path)])
