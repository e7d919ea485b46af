#!/bin/bash
# What Mooncake's package needs of the system, for the tests, without changing the system: Debian's
# libibverbs and what that needs, unpacked among the libraries that the package brings. $1: .venv
set -euo pipefail
. "$(dirname "$0")/apt.sh"
python=$(realpath "$1")/bin/python

works() { "$python" -c 'import mooncake.store' 2>/dev/null; }

works && exit
[[ $(uname -s) == Linux ]] || exit 0
libraries=$("$python" -c 'import pathlib, sysconfig
print(pathlib.Path(sysconfig.get_path("platlib"), "mooncake_transfer_engine_non_cuda.libs"))')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
chmod 755 .
download() { "${apt[@]}" download libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1; }
if with_lists download; then
  for package in *.deb; do dpkg-deb -x "$package" unpacked; done
  find unpacked -name 'lib*.so.*' -exec cp -a {} "$libraries" \;
fi
works || cat >&2 <<END
The tests of the Mooncake tier will fail: its package does not load here:
$("$python" -c 'import mooncake.store' 2>&1 | tail -1)
On Debian, as root: apt-get install libibverbs1 libnuma1 libcurl4
END
