#!/usr/bin/env bash
# Creates or updates .venv-peers/lmcache: what LMCache needs on top of .venv, for `make bench` and `benchmarks.peers`.
#
# LMCache pins older packages than vLLM's CPU wheel needs. The environment holds only those (160 MB), before .venv's
# packages on the import path; .venv (2.5 GB, `make venv` first) is not changed.
set -euo pipefail
cd "$(dirname "$0")/.."

base=$PWD/.venv
venv=.venv-peers/lmcache
stamp=$venv/.kvtier-stamp
list=benchmarks/peers/lmcache.txt

if [ ! -x "$base/bin/python" ]; then
  echo "make peers-venv: there is no .venv; run make venv first" >&2
  exit 1
fi
packages=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
wanted=$(cat "$list" scripts/make_peer_venv.sh | sha256sum | cut -d' ' -f1)-$packages
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
rm -rf "$venv"
"$base/bin/python" -m venv --without-pip "$venv"
# A path in a .pth file comes after the environment's own packages, and .pth files inside it are not followed: kvtier's
# editable install is not visible in it.
echo "$packages" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
echo "Installing LMCache into $venv ..."
"$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps -r "$list"
LMCACHE_TRACK_USAGE=false LMCACHE_LOG_LEVEL=ERROR "$venv/bin/python" -c 'import lmcache, vllm' >/dev/null
echo "$wanted" >"$stamp"
