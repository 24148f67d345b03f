"""What keeps the code findable: small folders and classes, names that occur once, a sentence for each folder.

import-linter refuses circles and arrows upwards; this is what it cannot say (see ADR 20).
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "kvtier", ROOT / "connector" / "kvtier_connector", ROOT / "benchmarks"]
MAX_MODULES = 12
MAX_METHODS = 25
CONTRACTS = "base"
"""The one name that many folders have: each time it is the contract of what lives there."""
PUBLIC_VALUES = [
    ROOT / "kvtier" / "library" / "values" / f"{name}_values.py" for name in ("public", "proof", "outcome")
]
"""Users meet these names beside no other: `Prompt`, `PromptState`, `Namespace` as the protocol has them."""


def modules(package: Path) -> Iterator[Path]:
    return (path for path in package.rglob("*.py") if "_pb" not in path.parts)


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_folder_says_in_a_docstring_what_lives_there_and_has_a_dozen_modules(package: Path) -> None:
    for folder in {path.parent for path in modules(package)}:
        stems = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
        assert len(stems) <= MAX_MODULES, folder
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_class_has_more_methods_than_can_be_kept_in_mind(package: Path) -> None:
    for path in modules(package):
        for node in classes(path):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            assert len(methods) <= MAX_METHODS, f"{path.relative_to(ROOT)}: {node.name}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_file_name_or_a_public_class_name_occurs_once_in_a_package(package: Path) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules(package):
        place = str(path.relative_to(ROOT))
        if path.stem not in ("__init__", "__main__", CONTRACTS):
            places[f"{path.stem}.py"].append(place)
        for node in classes(path):
            if not node.name.startswith("_") and path not in PUBLIC_VALUES:
                places[node.name].append(place)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
