#!/bin/bash
# Programs of Debian that the tests run, without changing the system: headless Chromium (the
# dashboard), Prometheus' promtool (the alert rules), kubectl (it renders deploy/kubernetes) and
# bubblewrap (it starts what deploy/ has), with the libraries and fonts that they lack here, unpacked
# into one folder: 120 MB to download, 360 MB on disk. $1: .venv
set -euo pipefail
. "$(dirname "$0")/apt.sh"
folder=$(realpath "$1")/debian
works() {
  LD_LIBRARY_PATH=$folder/lib "$folder/bin/chromium-headless-shell" --version && "$folder/bin/promtool" --version \
    && "$folder/bin/kubectl" version --client && "$folder/bin/bwrap" --version
}

works >/dev/null 2>&1 && exit
[[ $(uname -s) == Linux ]] || exit 0
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
cd "$unpacked"
chmod 755 .
download() {
  local wanted=(chromium-headless-shell fonts-dejavu-core bubblewrap)
  "${apt[@]}" download prometheus kubernetes-client chromium-headless-shell chromium-common fonts-dejavu-core bubblewrap \
    $("${apt[@]}" -s install --no-install-recommends "${wanted[@]}" | sed -n 's/^Inst \(lib[^ ]*\) .*/\1/p')
}
if with_lists download; then
  for package in *.deb; do dpkg-deb -x "$package" root; done
  rm -rf "$folder"
  mkdir -p "$folder/lib" "$folder/fonts"
  mv root/usr/lib/chromium "$folder/bin"
  mv root/usr/bin/{promtool,kubectl,bwrap} "$folder/bin/"
  find root/usr/lib -name 'lib*.so*' -exec mv -t "$folder/lib" {} +
  find root/usr/share/fonts -name '*.ttf' -exec mv -t "$folder/fonts" {} +
fi
works >/dev/null 2>&1 || cat >&2 <<END
The tests of the dashboard and of deploy/ will fail: Debian's Chromium, promtool, kubectl or bwrap does not run here.
$(works 2>&1 | tail -1)
Once apt-get reaches Debian's packages: bash requirements/debian.sh .venv
Elsewhere: put chromium-headless-shell, promtool, kubectl and bwrap into .venv/debian/bin
END
