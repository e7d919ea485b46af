#!/bin/bash
# vLLM's own tests, for make test-upstream: out of vLLM's source distribution, each version in a folder of its own,
# .cache/upstream/VERSION, and what they import beside vLLM, in .cache/upstream/packages.
# $1: .venv; after it the versions.
set -euo pipefail
python=$(realpath "$1")/bin/python
shift
mkdir -p .cache/upstream
cd .cache/upstream
# pip asks a source distribution's setup.py for its version, which imports the packages of the second line.
if [[ ! -e packages ]]; then
  rm -rf .packages
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target .packages \
    setuptools-rust==1.13.0 setuptools-scm==10.3.4 vcs-versioning==2.6.0 semantic-version==2.10.0 \
    tblib==3.2.2 pytest-asyncio==1.5.0
  mv .packages packages
fi
for version in "$@"; do
  [[ -e $version ]] && continue
  echo "== the tests of vLLM $version (a download of 45 MB)"
  new=.new-$version
  rm -rf "$new"
  VLLM_VERSION_OVERRIDE=$version VLLM_TARGET_DEVICE=empty PYTHONPATH=$PWD/packages \
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --no-binary :all: --dest "$new" "vllm==$version"
  tar -xzf "$new/vllm-$version.tar.gz" -C "$new" --strip-components=1 "vllm-$version/tests" "vllm-$version/pyproject.toml"
  rm "$new/vllm-$version.tar.gz"
  mv "$new" "$version"
done
