"""Settings: what wins, how sizes are written, what is refused, and that configs/kvtier.toml is the truth."""

import errno
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from kvtier.client.address import SOCKET_VARIABLE
from kvtier.config import (
    CacheConfig,
    DaemonConfig,
    DiskConfig,
    HostConfig,
    HttpConfig,
    LogConfig,
    ServerConfig,
    resolve,
    units,
)
from kvtier.config.load import load_config
from kvtier.config.settings import KEYS
from kvtier.config.units import available_bytes, format_size, parse_address, parse_percent, parse_size
from kvtier.errors import ConfigError, ConfigErrors
from kvtier.printable import MAX_LISTED

MODEL = Path(__file__).parents[3] / "kvtier" / "config" / "model.py"
SHIPPED = Path(__file__).parents[3] / "configs" / "kvtier.toml"
GIB = 1024**3


@pytest.fixture(autouse=True)
def clean_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's own settings and freeze what changes under the tests."""
    for name in ("XDG_RUNTIME_DIR", SOCKET_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr(resolve, "available_bytes", lambda folder: 100 * GIB)
    monkeypatch.setattr(resolve, "filesystem_bytes", lambda folder: 400 * GIB)
    monkeypatch.setattr(resolve, "physical_memory_bytes", lambda: 64 * GIB)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_file(text: str) -> Path:
        path = tmp_path / "kvtier.toml"
        path.write_text(text)
        return path

    return write_file


def failures(
    path: Path | None = None, environ: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> tuple[ConfigError, ...]:
    with pytest.raises(ConfigErrors) as caught:
        load_config(path=path, environ=environ or {}, flags=flags or {})
    return caught.value.errors


def failure(
    path: Path | None = None, environ: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> ConfigError:
    (error,) = failures(path, environ, flags)
    return error


def test_no_file_gives_sane_defaults(tmp_path: Path) -> None:
    loaded = load_config(environ={})
    assert loaded.path is None
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.config.disk.disk_dir == tmp_path / "state" / "kvtier"
    assert loaded.config.server.socket.is_absolute()
    assert loaded.config.host.host_bytes == 16 * GIB
    assert loaded.config.disk.disk_bytes == 50 * GIB


def test_the_default_file_is_read_when_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "config" / "kvtier" / "kvtier.toml"
    path.parent.mkdir(parents=True)
    path.write_text('[log]\nlevel = "debug"')
    assert load_config(environ={}).config.log.level == "debug"


def test_flag_beats_environment_beats_file(write: Callable[[str], Path]) -> None:
    path = write('[host]\nbytes = "1GiB"\n[disk]\nbytes = "1GiB"\n[log]\nlevel = "error"')
    environ = {"KVTIER_HOST_BYTES": "2GiB", "KVTIER_DISK_BYTES": "2GiB"}
    loaded = load_config(path=path, environ=environ, flags={"disk.bytes": "3GiB", "log.format": None})
    assert loaded.config.log.level == "error"
    assert loaded.config.host.host_bytes == 2 * GIB
    assert loaded.config.disk.disk_bytes == 3 * GIB
    wanted = {"log.level": str(path), "host.bytes": "environment", "disk.bytes": "flag", "log.format": "default"}
    assert {key: loaded.sources[key] for key in wanted} == wanted


def test_the_socket_has_the_variable_that_clients_read(tmp_path: Path) -> None:
    loaded = load_config(environ={SOCKET_VARIABLE: "/run/k.sock", "KVTIER_LOG_LEVEL": ""})
    assert loaded.config.server.socket == Path("/run/k.sock")
    assert loaded.sources["log.level"] == "default", "an empty variable counts as not set"


def test_relative_paths_start_at_the_file(write: Callable[[str], Path], tmp_path: Path) -> None:
    assert load_config(path=write('[disk]\ndir = "packs"'), environ={}).config.disk.disk_dir == tmp_path / "packs"


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * GIB), ("512 MiB", 512 * 1024**2), ("1.5kb", 1500), ("7", 7), ("2TB", 2 * 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 XB", "-1GiB", "1,5GiB", "25%"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="64GiB"):
        parse_size(text)


@pytest.mark.timeout(20)
def test_a_size_with_blanks_without_end_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size("2" + " " * 400_000 + "\0")


def test_percent_is_of_memory_for_host_and_of_the_file_system_for_disk() -> None:
    config = load_config(environ={"KVTIER_HOST_BYTES": "50%", "KVTIER_DISK_BYTES": "25 %"}).config
    assert config.host.host_bytes == 32 * GIB
    assert config.disk.disk_bytes == 100 * GIB
    assert parse_percent("12.5%") == 0.125


def test_automatic_sizes_respect_small_file_systems_and_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "available_bytes", lambda folder: 6 * GIB)
    assert load_config(environ={}).config.host.host_bytes == 3 * GIB
    monkeypatch.setattr(resolve, "available_bytes", lambda folder: 9000 * GIB)
    assert load_config(environ={}).config.disk.disk_bytes == 256 * GIB


def test_preallocated_rows_are_a_share_of_little_memory() -> None:
    assert load_config(environ={}).config.host.preallocated_bytes == GIB // 4
    assert load_config(environ={"KVTIER_HOST_BYTES": "1GiB"}).config.host.preallocated_bytes == GIB // 8


def test_the_reserve_is_a_share_of_a_small_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(environ={}).config.disk.reserve_bytes == GIB
    monkeypatch.setattr(resolve, "filesystem_bytes", lambda folder: 2 * GIB)
    assert load_config(environ={}).config.disk.reserve_bytes == 2 * GIB // 20


def test_available_bytes_counts_own_files_as_free(tmp_path: Path) -> None:
    """Otherwise each restart of the daemon would halve what is left."""
    before = available_bytes(tmp_path / "not yet there")
    (tmp_path / "pack").write_bytes(bytes(8 << 20))
    assert available_bytes(tmp_path) >= before - (4 << 20)
    assert units.physical_memory_bytes() > 0


@pytest.mark.parametrize(
    ("own", "files", "least"),
    [
        ("0::/", {"memory.max": "max"}, None),
        ("0::/system.slice/kvtier.service", {"system.slice/kvtier.service/memory.max": "1000"}, 1000),
        ("0::/a/b", {"a/memory.max": "2000", "a/b/memory.max": "max"}, 2000),
        ("0::/a/b", {"a/memory.max": "2000", "a/b/memory.max": "3000", "memory.max": "4000"}, 2000),
        ("0::/../sibling", {"memory.max": "5000"}, 5000),
        ("7:cpu:/x\n5:memory:/docker/id", {"memory/docker/id/memory.limit_in_bytes": "6000"}, 6000),
        ("5:memory:/docker/id", {"memory/memory.limit_in_bytes": "7000"}, 7000),
        ("7:cpu:/x", {"memory/x/memory.limit_in_bytes": "8000"}, None),
        (None, {"memory.max": "9000"}, 9000),
    ],
)
def test_memory_is_the_least_that_any_cgroup_of_the_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, files: dict[str, str], least: int | None
) -> None:
    """Of a service, or with the host's cgroups in view, the root has no limit: a quarter of the machine was taken."""
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    if own is not None:
        (tmp_path / "own").write_text(own + "\n")
    monkeypatch.setattr(units, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(units, "_OWN_CGROUPS", tmp_path / "own")
    assert units.physical_memory_bytes() == (units.machine_memory_bytes() if least is None else least)


def test_unknown_key_suggests_the_right_one(write: Callable[[str], Path]) -> None:
    path = write("[disk]\nbyte = 1")
    error = failure(path)
    assert (error.key, error.value, error.source) == ("disk.byte", 1, str(path))
    assert "did you mean disk.bytes?" in str(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[hosts]\nbytes = 1", "did you mean host?"),
        ('[Log]\nlevel = "loud"', "Log = '{...}': no such table; did you mean log?"),
        ('socket = "/x"', "write it as server.socket"),
        ("host = 3", "write [host]"),
        ("nonsense = 3", "known: server.socket, server.group, server.listen, host.arena_dir, host.bytes, "),
        ("[xyz]\nx = 3", "no such table; known: server, host, disk, cache, owners, remote, access, http, trace"),
        ("[host]\ndir = 3", "belongs into another table; write it as disk.dir"),
        ("[cache]\nbytes = 3", "write it as host.bytes or disk.bytes"),
        ("[disk]\npack_bytes = 1", "no such setting; did you mean disk.bytes?"),
    ],
)
def test_misplaced_keys(write: Callable[[str], Path], text: str, said: str) -> None:
    assert said in str(failure(write(text)))


def test_unknown_variable_of_a_table_is_refused_and_others_are_not_ours() -> None:
    assert "did you mean KVTIER_HOST_BYTES?" in str(failure(environ={"KVTIER_HOST_BYTE": "1GiB"}))
    assert f"did you mean {SOCKET_VARIABLE}?" in str(failure(environ={"KVTIER_SERVER_SOCKET": "/x"}))
    load_config(
        environ={"KVTIER_VLLM_URL": "x", "KVTIER_DEMO": "1", "KVTIER_HOST": '{"bytes": 1}', "kvtier_log_level": "x"}
    )


def test_all_errors_of_all_sources_are_found_at_once(write: Callable[[str], Path]) -> None:
    """Of three one was named, and the next at the next start."""
    path = write('typo = 1\n[host]\nbytes = "500GiB"\nkeep_arena = "yes"\n[disk]\nbyte = 1\n[lgo]\nx = 1\n')
    found = failures(path, {"KVTIER_LOG_LEVEL": "loud", "KVTIER_LOG_FILE": "x"}, {"disk.bytes": "lots"})
    assert {(error.key, error.source) for error in found} == {
        ("typo", str(path)),
        ("host.bytes", str(path)),
        ("host.keep_arena", str(path)),
        ("disk.byte", str(path)),
        ("lgo", str(path)),
        ("log.level", "environment"),
        ("KVTIER_LOG_FILE", "environment"),
        ("disk.bytes", "flag"),
    }
    assert all(str(error) for error in found)


def test_a_default_file_that_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback: a daemon of another user with root's $HOME."""

    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setattr(Path, "open", lambda path, _: refuse(path))
    error = failure()
    assert (error.key, "cannot be read: Permission denied" in str(error)) == ("config", True)
    assert "name another with --config" in str(error)


def test_an_unreadable_file_hides_no_other_error(tmp_path: Path) -> None:
    found = failures(tmp_path / "none.toml", {"KVTIER_LOG_LEVEL": "loud"})
    assert {error.key for error in found} == {"config", "log.level"}


def test_a_bad_value_that_another_source_overrides_is_found(write: Callable[[str], Path]) -> None:
    """It would be in force as soon as the variable is gone."""
    path = write('[host]\nbytes = "lots"')
    error = failure(path, {"KVTIER_HOST_BYTES": "1GiB"}, {"host.bytes": "2GiB"})
    assert (error.key, error.value, error.source) == ("host.bytes", "lots", str(path))


def test_of_a_file_of_another_kind_some_errors_are_shown(write: Callable[[str], Path]) -> None:
    keys = "".join(f"key{number} = 1\n" for number in range(5_000))
    for text in (keys, f"[host]\n{keys}"):
        assert len(failures(write(text))) == MAX_LISTED


@pytest.mark.parametrize("name", ["flag", "environment", "default"])
def test_a_file_may_have_the_name_of_a_source(
    name: str, write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write('[disk]\ndir = "d"')
    path.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(path=Path(os.path.relpath(tmp_path / name)), environ={"KVTIER_LOG_LEVEL": "error"}).config
    assert (config.disk.disk_dir, config.log.level) == (tmp_path / "d", "error")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("host.bytes", "lots", "64GiB"),
        ("host.bytes", 12, "at least 1.00 MiB"),
        ("host.bytes", True, "64GiB"),
        ("host.bytes", "500GiB", "larger tmpfs"),
        ("disk.bytes", 1.5, "64GiB"),
        ("host.keep_arena", "yes", "true or false"),
        ("host.keep_arena", 1, "true or false"),
        ("log.level", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("log.format", 3, "'text' or 'json'"),
        ("disk.dir", 3, "text in quotes"),
        ("server.socket", "/" + "x" * 107, "at most 107"),
        ("server.socket", "/run/a\0b", "none of them NUL"),
        ("server.group", "no-such-group", "there is no such group; make it (`groupadd no-such-group`)"),
        ("server.group", "", "name or number"),
        ("server.group", "a:b", "name or number"),
        ("server.group", True, "text in quotes"),
        ("server.group", "-1", "must be a gid"),
        ("server.group", "4294967295", "must be a gid"),
        ("server.group", "²", "must be a gid"),
        ("http.listen", 9464, "text in quotes"),
        ("http.listen", ":9464", '"0.0.0.0:9464" for every interface'),
        ("http.listen", "localhost", "host:port"),
        ("http.listen", "127.0.0.1:70000", "up to 65535"),
        ("http.listen", "::1:9464", '"[::1]:9464"'),
    ],
)
def test_bad_values_name_key_value_source_and_remedy(key: str, value: object, said: str) -> None:
    error = failure(flags={key: value})
    assert (error.key, error.value, error.source) == (key, value, "flag")
    assert said in str(error)


@pytest.mark.parametrize(("written", "value"), [("true", True), ("False", False)])
def test_a_switch_may_come_from_the_environment(written: str, value: bool) -> None:
    assert load_config(environ={"KVTIER_HOST_KEEP_ARENA": written}).config.host.keep_arena is value


@pytest.mark.parametrize(("written", "gid"), [("off", None), ("OFF", None), ("root", 0), ("2000", 2000), (2000, 2000)])
def test_a_group_is_a_name_or_a_gid_that_needs_no_name(written: object, gid: int | None) -> None:
    """In containers most groups have none."""
    assert load_config(environ={}, flags={"server.group": written}).config.server.gid == gid


def test_unreadable_files(write: Callable[[str], Path], tmp_path: Path) -> None:
    assert "not valid TOML" in str(failure(write("[log")))
    assert "cannot be read" in str(failure(tmp_path / "none.toml"))


def test_each_field_is_a_setting_or_a_constant_that_says_so() -> None:
    config = load_config(environ={}).config
    declared = {(t.name, f.name) for t in fields(DaemonConfig) for f in fields(getattr(config, t.name))}
    constants = Counter(re.findall(r'^    (\w+): .*\n    """No setting\. ', MODEL.read_text(), flags=re.MULTILINE))
    written = {tuple(key.split(".")) for key in KEYS}
    fixed = [name for table, name in declared if not {(table, name), (table, name.removeprefix(f"{table}_"))} & written]
    assert Counter(fixed) == constants
    assert len(declared) == len(fixed) + len(written)


def test_dataclass_defaults_are_the_settings_defaults() -> None:
    config = load_config(environ={}).config
    assert config.log == LogConfig()
    assert config.cache == CacheConfig(auto_pin_max_bytes=config.disk.disk_bytes // 2)
    assert config.http == HttpConfig()
    assert config.server == ServerConfig(socket=config.server.socket)
    assert config.host == HostConfig(arena_dir=config.host.arena_dir, host_bytes=config.host.host_bytes)
    assert config.disk == DiskConfig(disk_dir=config.disk.disk_dir, disk_bytes=config.disk.disk_bytes)


def test_the_shipped_file_has_every_setting_and_says_the_defaults(write: Callable[[str], Path]) -> None:
    uncommented = re.sub(r"^#(?=\w+ = )", "", SHIPPED.read_text(), flags=re.MULTILINE)
    loaded = load_config(path=write(uncommented), environ={})
    assert {key for key, source in loaded.sources.items() if source != "default"} == set(KEYS)
    assert loaded.config == load_config(environ={}).config
    assert load_config(path=SHIPPED, environ={}).config == loaded.config


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (20 << 20, "20.0 MiB"),
        (500 * GIB, "500 GiB"),
        (2048 * GIB, "2.00 TiB"),
    ],
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:9464", ("127.0.0.1", 9464)), ("localhost:0", ("localhost", 0)), ("[::1]:1", ("::1", 1))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert load_config(environ={"KVTIER_HTTP_LISTEN": text}).config.http.listen == text


def test_metrics_may_be_switched_off() -> None:
    assert load_config(environ={"KVTIER_HTTP_LISTEN": "OFF"}).config.http.listen == "off"


def test_automatic_pins(write: Callable[[str], Path]) -> None:
    text = """
    [disk]
    bytes = "8GiB"
    [cache]
    auto_pin = "OBSERVE"
    auto_pin_max_bytes = "25%"
    auto_pin_ttl = "never"
    auto_pin_min_tokens = 512
    auto_pin_public = true
    """
    config = load_config(path=write(text), environ={"KVTIER_CACHE_AUTO_PIN_MIN_REQUESTS": "7"}).config.cache
    assert (config.auto_pin, config.auto_pin_max_bytes, config.auto_pin_ttl_s) == ("observe", 2 * 1024**3, 0)
    assert (config.auto_pin_min_tokens, config.auto_pin_min_requests, config.auto_pin_public) == (512, 7, True)
    with pytest.raises(ConfigErrors) as caught:
        load_config(
            path=write('[cache]\nauto_pin = "on"\nauto_pin_ttl = "5 years"\nauto_pin_min_requests = 1\n'), environ={}
        )
    assert all(key in str(caught.value) for key in ("cache.auto_pin ", "cache.auto_pin_ttl", "auto_pin_min_requests"))


def test_a_budget_of_automatic_pins_that_cannot_be_is_refused_by_its_key(write: Callable[[str], Path]) -> None:
    """It was a traceback."""
    with pytest.raises(ConfigErrors, match=r"cache\.auto_pin_max_bytes .*must be at least"):
        load_config(path=write('[cache]\nauto_pin_max_bytes = "0%"\n'), environ={})


def test_the_store_mode(write: Callable[[str], Path]) -> None:
    assert load_config(path=write('[cache]\nstore = "all"\n'), environ={}).config.cache.store == "all"
    assert "'pinned' or 'all'" in str(failure(environ={"KVTIER_CACHE_STORE": "some"}))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("url", "ftp://bucket/x", "must begin with one of s3://"),
        ("url", "bucket", "must begin with one of"),
        ("url", "s3:///", "name a bucket or folder"),
        ("poll", "never", "must be a duration"),
        ("grace", "9m", 'at least "10m"'),
        ("upload_bytes_per_s", "fast", "not a size"),
    ],
)
def test_a_store_that_cannot_be_is_refused_with_the_remedy(
    write: Callable[[str], Path], key: str, value: str, says: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load_config(path=write(f'[remote]\n{key} = "{value}"\n'), environ={})
    assert f"remote.{key}" in str(caught.value)
    assert says in str(caught.value)


def test_a_pool_stands_in_front_of_a_store(write: Callable[[str], Path]) -> None:
    text = '[remote]\nurl = "s3://bucket/x"\npool = "mooncake://10.0.0.5:50051/fleet/"\n'
    assert load_config(path=write(text), environ={}).config.remote.pool == "mooncake://10.0.0.5:50051/fleet"
    for key, value, says in (
        ("url", "mooncake://10.0.0.5:50051", "remote.pool"),
        ("pool", "redis://10.0.0.5:6379", "mooncake://HOST:PORT"),
        ("pool", "mooncake://10.0.0.5", "mooncake://HOST:PORT"),
        ("pool", "mooncake://10.0.0.5:50051/a b", "mooncake://HOST:PORT"),
    ):
        with pytest.raises(ConfigErrors, match=says) as caught:
            load_config(path=write(f'[remote]\n{key} = "{value}"\n'), environ={})
        assert f"remote.{key}" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "url"),
    [
        ("REMOTE_URL", "s3://AKIA:se/hunter2@bucket/x"),
        ("REMOTE_URL", "ftp://AKIA:se/hunter2@bucket"),
        ("REMOTE_POOL", "mooncake://me:se/hunter2@host:1"),
        ("HTTP_VLLM_URL", "http://me:se/hunter2@host:8000"),
        ("HTTP_VLLM_URL", "ftp://me:se/hunter2@host:8000"),
    ],
)
def test_credentials_with_a_slash_are_credentials(variable: str, url: str) -> None:
    """They were taken for a bucket and a prefix, and shown in the status and the log."""
    error = failure(environ={f"KVTIER_{variable}": url})
    assert "hunter2" not in str(error)
    assert load_config(environ={"KVTIER_REMOTE_URL": "s3://bucket/a@b:c"}).config.remote.url == "s3://bucket/a@b:c"


def test_credentials_in_a_url_are_refused_and_not_shown(write: Callable[[str], Path]) -> None:
    text = '[remote]\nurl = "s3://AKIA:hunter2@bucket/x"\n'
    for source in (
        {"path": write(text), "environ": {}},
        {"environ": {"KVTIER_REMOTE_URL": "s3://AKIA:hunter2@bucket"}},
    ):
        with pytest.raises(ConfigErrors, match="must not hold credentials") as caught:
            load_config(**source)
        assert "hunter2" not in str(caught.value)


def test_a_store_and_its_bounds(write: Callable[[str], Path]) -> None:
    text = '[remote]\nurl = "s3://bucket/x/"\npoll = "2m"\nupload_bytes_per_s = "1MiB"\ndollars_per_gib_down = 0.09\n'
    config = load_config(path=write(text), environ={"KVTIER_REMOTE_DOLLARS_PER_1000_READS": "0.5"}).config.remote
    assert (config.url, config.poll_s, config.grace_s) == ("s3://bucket/x", 120, 86400)
    assert (config.upload_bytes_per_s, config.download_bytes_per_s) == (1024**2, 0)
    assert (config.dollars_per_gib_down, config.dollars_per_1000_reads) == (0.09, 0.5)


@pytest.mark.parametrize("owner", ["default", "support"])
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("pins = -1", "pins = -1: Input should be greater than or equal to 0"),
        ('bytes = "much"', "bytes = 'much': not a size"),
        ("pinz = 1", "pinz = 1: no such setting; did you mean pins?"),
        ("xyz = 1", "xyz = 1: no such setting; known: pins, tokens, bytes"),
    ],
)
def test_a_wrong_limit_of_an_owner_is_named(write: Callable[[str], Path], owner: str, limit: str, said: str) -> None:
    """It said `owners.default = 1: belongs into another table; write it as owners.default`."""
    error = failure(write(f"[owners]\n{owner} = {{ {limit} }}"))
    assert f"owners.{owner}.{said}" in str(error)


@pytest.mark.parametrize("name", ["my team", "_x", "", "é", "x" * 65])
def test_a_quota_of_a_name_that_no_owner_can_have_is_refused(write: Callable[[str], Path], name: str) -> None:
    """It was taken, and held for no one."""
    error = failure(write(f'[owners]\n"{name}" = {{ pins = 1 }}'))
    assert f"owners.{name} = {{'pins': 1}}" in str(error)
    assert "no owner can have this name; write it with 1 to 64 letters" in str(error)


def test_each_owner_has_a_variable() -> None:
    """Only KVTIER_OWNERS_DEFAULT was read; that of an owner was refused, with the advice to write a table."""
    environ = {"KVTIER_OWNERS_DEFAULT": '{"pins": 5}', "KVTIER_OWNERS_TEAM_A": '{"bytes": "1GiB", "tokens": 7}'}
    owners = load_config(environ=environ).config.owners
    assert (owners.of("x").pins, owners.of("team_a").pins) == (5, None)
    assert (owners.of("team_a").bytes, owners.of("team_a").tokens) == (GIB, 7)
    for wrong in ("5", "[]", "pins", "{"):
        for name in ("DEFAULT", "SUPPORT"):
            error = failure(environ={f"KVTIER_OWNERS_{name}": wrong})
            assert 'must be JSON like {"pins": 100, "bytes": "20GiB"}' in str(error)


@pytest.mark.parametrize(("value", "num_bytes"), [("0", 0), ("500KB", 500_000), ("100MiB", 100 * 1024**2)])
def test_a_bound_is_the_same_in_the_environment_and_in_a_file(
    write: Callable[[str], Path], value: str, num_bytes: int
) -> None:
    """`0`, no limit, could not be set in the environment, nor anything below 1 MiB as text."""
    name = "upload_bytes_per_s"
    for given in (
        {"environ": {f"KVTIER_REMOTE_{name.upper()}": value}},
        {"path": write(f'[remote]\n{name} = "{value}"\n'), "environ": {}},
        {"path": write(f"[remote]\n{name} = {num_bytes}\n"), "environ": {}},
    ):
        assert load_config(**given).config.remote.upload_bytes_per_s == num_bytes
    quota = write(f'[owners]\nsupport = {{ bytes = "{value}" }}\n')
    assert load_config(path=quota, environ={}).config.owners.of("support").bytes == num_bytes
    assert "at most 2**60 bytes" in str(failure(environ={f"KVTIER_REMOTE_{name.upper()}": "1048577TiB"}))


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ('[server]\nlisten = "0.0.0.0:1"', "server.listen", "set access.tls_cert_file"),
        ('[server]\nlisten = "cache.example.com:1"', "server.listen", "set access.tls_cert_file"),
        ('[server]\nlisten = "[::]:1"\n[access]\nauth = "none"', "access.auth", "would need no credentials"),
        ('[http]\nlisten = "0.0.0.0:1"\n[access]\nauth = "none"', "access.auth", "would need no credentials"),
        ('[access]\ntls_cert_file = "c"', "access.tls_key_file", "TLS needs both"),
        ('[access]\ntls_key_file = "k"', "access.tls_cert_file", "TLS needs both"),
        ('[access]\nclient_ca_file = "c"', "access.client_ca_file", "needs TLS"),
        ('[access]\nauth = "password"', "access.auth", "'token' or 'none'"),
        ('[server]\nlisten = "7464"', "server.listen", "host:port"),
    ],
)
def test_doors_that_would_stand_open(write: Callable[[str], Path], text: str, key: str, said: str) -> None:
    assert any(key in str(error) and said in str(error) for error in failures(write(text)))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "127.8.8.8:0"])
def test_loopback_needs_no_tls(write: Callable[[str], Path], address: str) -> None:
    loaded = load_config(path=write(f'[server]\nlisten = "{address}"\n[access]\nauth = "none"'), environ={})
    assert loaded.config.server.listen == address
    assert loaded.config.access.auth == "none"
