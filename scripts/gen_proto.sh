#!/usr/bin/env bash
# Generates kvtier/_pb from proto/. With --check: fails when the committed code differs.
#
# grpcio-tools 1.76 pins protoc (protobuf 6): protobuf's runtime accepts generated code of its own major version and of
# the one before, so this code runs under 6.x and 7.x. It has an environment of its own, because grpcio-tools needs
# protobuf below 7 and vLLM's environment has 7.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.venv-proto
if [ ! -x "$tools/bin/python" ] || ! "$tools/bin/python" -c 'import grpc_tools' 2>/dev/null; then
  "${PYTHON:-python3}" -m venv "$tools"
  "$tools/bin/pip" install -q "grpcio-tools==1.76.0"
fi
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"$tools/bin/python" -m grpc_tools.protoc -I proto --python_out="$tmp" --pyi_out="$tmp" --grpc_python_out="$tmp" \
  proto/kvtier/v1/*.proto
sed -i 's/^from kvtier\.v1 import/from kvtier._pb import/' "$tmp"/kvtier/v1/*.py "$tmp"/kvtier/v1/*.pyi
if [ "${1:-}" = "--check" ]; then
  for file in "$tmp"/kvtier/v1/*; do
    diff -u "kvtier/_pb/$(basename "$file")" "$file" || {
      echo "kvtier/_pb is out of date: run scripts/gen_proto.sh" >&2
      exit 1
    }
  done
else
  mkdir -p kvtier/_pb
  cp "$tmp"/kvtier/v1/* kvtier/_pb/
  init=kvtier/_pb/__init__.py
  [ -f $init ] || printf '"""Code that scripts/gen_proto.sh generates from proto/. Not edited by hand."""\n' >$init
fi
