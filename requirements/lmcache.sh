#!/bin/bash
# LMCache in a virtual environment of its own, for make bench-peers: its own packages first, then those of
# .venv (torch, vLLM, kvass). So all engines that are compared can run with one interpreter.
# $1: .venv; $2: the folder
set -euo pipefail
python=$(realpath -s "$1")/bin/python
pins=$(realpath "$(dirname "$0")")/lmcache.txt
cmp -s "$pins" "$2/.made-from" && exit
echo "== LMCache into $2"
rm -rf "$2"
"$python" -m venv "$2"
"$2/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps -r "$pins"
"$python" -c 'import sys, sysconfig
own = sysconfig.get_path("stdlib")
print(*(path for path in sys.path[1:] if not path.startswith(own) and not path.endswith(".zip")), sep="\n")' \
  >"$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
cp "$pins" "$2/.made-from"
