"""Records the parts of published vLLM wheels that the connector uses: tests/contract/vllm_signatures.json.

usage: python scripts/record_vllm_signatures.py [--unpacked FOLDER] [VERSION ...]

pip downloads each wheel (300 to 600 MB, removed again); the script parses the files that SURFACE names and imports none
of them. With --unpacked it reads the files of VERSION from FOLDER/VERSION instead. It records names, parameters and
fields.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

VERSIONS = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
RECORDING = Path(__file__).parents[1] / "tests" / "contract" / "vllm_signatures.json"

_OFFLOADING = "distributed/kv_transfer/kv_connector/v1/offloading"
SURFACE: dict[str, tuple[str, ...]] = {
    "v1/kv_offload/base.py": (
        "OffloadingManager",
        "OffloadingWorker",
        "OffloadingSpec",
        "ReqContext",
        "LookupResult",
        "OffloadPolicy",
        "RequestOffloadingContext",
        "ScheduleEndContext",
        "PrepareStoreOutput",
        "GPULoadStoreSpec",
        "CanonicalKVCacheTensor",
        "CanonicalKVCacheRef",
        "CanonicalKVCaches",
        "TransferResult",
        "OffloadingMetricMetadata",
        "OffloadingCounterMetadata",
        "OffloadingGaugeMetadata",
        "OffloadingHistogramMetadata",
        "make_offload_key",
        "get_offload_group_idx",
    ),
    "v1/kv_offload/config.py": (
        "OffloadingConfig",
        "OffloadingGroupConfig",
        "OffloadingModelConfig",
        "OffloadingCacheConfig",
        "OffloadingParallelConfig",
    ),
    "v1/kv_offload/factory.py": ("OffloadingSpecFactory",),
    "distributed/kv_transfer/kv_connector/v1/offloading_connector.py": ("OffloadingConnector",),
    "distributed/kv_transfer/kv_connector/v1/base.py": (
        "KVConnectorBase_V1",
        "KVConnectorTransferResults",
        "SupportsHMA",
    ),
    "distributed/kv_transfer/kv_connector/factory.py": ("KVConnectorFactory",),
    f"{_OFFLOADING}/config.py": ("build_offloading_config",),
    f"{_OFFLOADING}/scheduler.py": ("OffloadingConnectorScheduler", "GroupOffloadConfig", "SchedulerOffloadConfig"),
    f"{_OFFLOADING}/worker.py": ("OffloadingConnectorWorker",),
    f"{_OFFLOADING}/common.py": ("TransferJob", "OffloadingConnectorMetadata", "OffloadingWorkerMetadata"),
    f"{_OFFLOADING}/metrics.py": ("OffloadingConnectorStats", "OffloadPromMetrics"),
    "v1/metrics/cache_hit_source.py": ("CacheHitSource",),
    "v1/executor/abstract.py": ("Executor",),
    "lora/request.py": ("LoRARequest",),
    "v1/outputs.py": ("KVConnectorOutput",),
    "v1/request.py": ("Request",),
    "v1/kv_cache_interface.py": (
        "KVCacheConfig",
        "KVCacheTensor",
        "KVCacheGroupSpec",
        "KVCacheSpec",
        "AttentionSpec",
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
        "UniformTypeKVCacheSpecs",
    ),
    "v1/core/kv_cache_utils.py": ("get_request_block_hasher", "NONE_HASH"),
    "utils/hashing.py": ("get_hash_fn_by_name",),
    "platforms/interface.py": ("Platform",),
    "_custom_ops.py": ("swap_blocks_batch",),
    "v1/kv_offload/cpu/swap_blocks_triton.py": ("_swap_blocks_kernel",),
}

_PRIVATE_BUT_USED = frozenset({"__init__", "_current_batch_jobs_to_flush"})

Facts = dict[str, dict[str, object]]


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unpacked", type=Path)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    options = parser.parse_args()
    recording = json.loads(RECORDING.read_text()) if RECORDING.exists() else {}
    for version in options.versions:
        read = _reader_of_folder(options.unpacked / version) if options.unpacked else _reader_of_wheel(version)
        recording[version] = signatures(read)
        print(f"vLLM {version}: {len(recording[version])} names")
    RECORDING.write_text(_text_of(recording))


def signatures(read: Callable[[str], str | None]) -> Facts:
    """Return what a version offers, by `module:name`; a name that it lacks is left out.

    Args:
        read: Gives the text of a file of the package, None when there is none.
    """
    facts: Facts = {}
    for path, names in SURFACE.items():
        text = read(f"vllm/{path}")
        module = "vllm." + path.removesuffix(".py").replace("/", ".")
        for node in ast.parse(text).body if text is not None else ():
            facts |= {f"{module}:{name}": each for name, each in _facts_of(node) if name in names}
    return facts


def _text_of(recording: dict[str, Facts]) -> str:
    """Return JSON with a line for each name, so that differences can be read."""
    versions = (
        f'"{version}": {{\n'
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(facts.items()))
        + "\n}"
        for version, facts in sorted(recording.items())
    )
    return "{\n" + ",\n".join(versions) + "\n}\n"


def _is_used(name: str) -> bool:
    return not name.startswith("_") or name in _PRIVATE_BUT_USED


def _facts_of(node: ast.stmt) -> Iterable[tuple[str, dict[str, object]]]:
    match node:
        case ast.FunctionDef():
            yield node.name, {"parameters": _parameters(node)}
        case ast.ClassDef():
            yield node.name, _class_facts(node)
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name, {}
        case ast.Assign(targets=[ast.Name(id=name)]):
            yield name, {}


def _class_facts(node: ast.ClassDef) -> dict[str, object]:
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    methods = [each for each in functions if _is_used(each.name)]
    fields = [
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    constants = [
        target.id
        for each in node.body
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Name)
    ]
    facts: dict[str, object] = {
        "fields": fields,
        "constants": constants,
        "methods": {each.name: _parameters(each) for each in methods},
        "abstract": [each.name for each in methods if "abstractmethod" in map(ast.unparse, each.decorator_list)],
        "properties": [
            each.name
            for each in methods
            if {"property", "cached_property"} & set(map(ast.unparse, each.decorator_list))
        ],
        "attributes": sorted({name for each in functions for name in _assigned(each) if _is_used(name)}),
    }
    return {name: value for name, value in facts.items() if value}


def _parameters(function: ast.FunctionDef) -> list[str]:
    """Return parameter names; one with a default ends in `=`, keyword-only ones come after `*`."""
    given = function.args
    positional = [each.arg for each in (*given.posonlyargs, *given.args)]
    first_default = len(positional) - len(given.defaults)
    names = [name + "=" * (number >= first_default) for number, name in enumerate(positional)]
    if given.vararg or given.kwonlyargs:
        names.append("*" + (given.vararg.arg if given.vararg else ""))
    names += [
        each.arg + "=" * (default is not None)
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _assigned(function: ast.FunctionDef) -> Iterable[str]:
    """Yield the names of `self.NAME = ...`."""
    for node in ast.walk(function):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                    yield each.attr


def _reader_of_folder(folder: Path) -> Callable[[str], str | None]:
    return lambda path: (folder / path).read_text() if (folder / path).exists() else None


def _reader_of_wheel(version: str) -> Callable[[str], str | None]:
    """Download a wheel and read what SURFACE names."""
    arguments = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for abi in ("cp312", "abi3", "none"):
        arguments += ["--abi", abi]
    for glibc in (17, 24, 26, 27, 28, 31, 34, 35):
        arguments += ["--platform", f"manylinux_2_{glibc}_x86_64"]
    arguments += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", *arguments, "-d", folder, f"vllm=={version}"]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            names = set(wheel.namelist())
            wanted = (f"vllm/{path}" for path in SURFACE)
            texts = {path: wheel.read(path).decode() for path in wanted if path in names}
    return texts.get


if __name__ == "__main__":
    main()
