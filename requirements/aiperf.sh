#!/bin/bash
# AIPerf in a virtual environment of its own, for make judge. It asks servers over HTTP, so it needs nothing of .venv.
# $1: .venv; $2: the folder
set -euo pipefail
python=$(realpath -s "$1")/bin/python
pins=$(realpath "$(dirname "$0")")/aiperf.txt
cmp -s "$pins" "$2/.made-from" && exit
echo "== AIPerf into $2"
rm -rf "$2"
"$python" -m venv "$2"
"$2/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps -r "$pins"
cp "$pins" "$2/.made-from"
