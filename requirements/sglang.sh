#!/bin/bash
# The tested versions of SGLang, for make test-sglang: each in a folder of its own, $1/overlays/sglang-VERSION,
# to be put in front on PYTHONPATH, then $1/overlays/sglang-deps (sglang.txt). They use torch and
# transformers of .venv. tests/support/sglang/shims has what a machine without a GPU lacks.
# $1: .venv; after it the versions
set -euo pipefail
python=$(realpath "$1")/bin/python
pins=$(realpath "$(dirname "$0")")/sglang.txt
cd "$1"
shift
mkdir -p overlays
pip=("$python" -m pip install --quiet --disable-pip-version-check --no-deps --target)
cmp -s "$pins" overlays/sglang-deps/.made-from || {
  rm -rf overlays/sglang-deps
  "${pip[@]}" overlays/sglang-deps -r "$pins"
  cp "$pins" overlays/sglang-deps/.made-from
}
for version in "$@"; do
  [[ -e overlays/sglang-$version ]] && continue
  new=overlays/.new-sglang-$version
  rm -rf "$new"
  echo "== SGLang $version"
  "${pip[@]}" "$new" "sglang==$version"
  mv "$new" "overlays/sglang-$version"
done
