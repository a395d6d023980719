#!/usr/bin/env bash
# Installs the Debian packages named as arguments that are not there yet; silent when all are. Elsewhere it lists them and stops.
set -eu
missing=()
for package in "$@"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
root=()
if [ "$(id -u)" -ne 0 ]; then root=(sudo); fi
if ! command -v apt-get >/dev/null || { [ ${#root[@]} -gt 0 ] && ! command -v sudo >/dev/null; }; then
  echo "deps: cannot install packages here; please install what these Debian packages hold: ${missing[*]}" >&2
  exit 1
fi
echo "deps: installing ${missing[*]}"
"${root[@]}" apt-get update -qq
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
