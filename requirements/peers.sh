#!/bin/bash
# What make bench-peers and make judge need beside .venv, each in a virtual environment of its own, .cache/NAME, with
# the pins of NAME.txt. LMCache's environment finds its own packages first, then those of .venv (torch, vLLM, kvass): so all
# engines that are compared can run with one interpreter. AIPerf's asks servers over HTTP and needs nothing of .venv.
# $1: .venv; $2: lmcache or aiperf
set -euo pipefail
python=$(realpath -s "$1")/bin/python
pins=$(realpath "$(dirname "$0")")/$2.txt
folder=$(realpath -m ".cache/$2")
made_from=$(echo "# $python" "$folder" && cat "$pins")
[[ $made_from == "$(cat "$folder/.made-from" 2>/dev/null)" ]] && exit
echo "== $2 into .cache/$2"
rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps -r "$pins"
if [[ $2 == lmcache ]]; then
  "$python" -c 'import sys, sysconfig
own = sysconfig.get_path("stdlib")
print(*(path for path in sys.path[1:] if not path.startswith(own) and not path.endswith(".zip")), sep="\n")' \
    >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
else
  "$folder/bin/python" -m pip --disable-pip-version-check check
fi
echo "$made_from" >"$folder/.made-from"
