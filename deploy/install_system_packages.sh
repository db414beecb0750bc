#!/usr/bin/env bash
# Installs what pip cannot: the compiler, headers, and tools of the tests (Debian, Ubuntu).
#
#   deploy/install_system_packages.sh [test] [fuzz]
#
# Without arguments: what building the package needs. "test" adds the C++ tests' framework,
# "fuzz" the compiler of the fuzz targets. As root or with sudo that asks no password it installs
# them; otherwise it prints the command to run. It takes no time where nothing is missing.
#
# PYTHON names the interpreter to build for (default python3).
set -euo pipefail

python=${PYTHON:-python3}
required=() # without these nothing can be built
optional=() # without these it works, only slower

has_header() { [[ -e /usr/include/$1 || -e /usr/local/include/$1 ]]; }

command -v "$python" >/dev/null || {
  echo "hymcache: $python not found: install Python 3.11 or later, or set PYTHON" >&2
  exit 1
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "hymcache: $("$python" -V) is too old: install Python 3.11 or later, or set PYTHON" >&2
  exit 1
}
"$python" -c 'import ensurepip, venv' 2>/dev/null || required+=(python3-venv)
"$python" -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' ||
  required+=(python3-dev)
command -v "${CXX:-g++}" >/dev/null || required+=(g++)
has_header liburing.h || optional+=(liburing-dev)
for use in "$@"; do
  case $use in
    test) has_header doctest/doctest.h || required+=(doctest-dev) ;;
    fuzz) command -v clang++ >/dev/null || required+=(clang) ;;
    *) echo "usage: $0 [test] [fuzz]" >&2 && exit 2 ;;
  esac
done

packages=("${required[@]}" "${optional[@]}")
[[ ${#packages[@]} -eq 0 ]] && exit 0

as_root=()
if [[ $EUID -ne 0 ]]; then
  as_root=(sudo -n)
fi
apt=(apt-get -o DPkg::Lock::Timeout=300 -qq)
if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
  echo "hymcache: installing ${packages[*]}" >&2
  "${as_root[@]}" "${apt[@]}" update &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      "${apt[@]}" install -y --no-install-recommends "${packages[@]}" >/dev/null && exit 0
fi

if [[ ${#required[@]} -gt 0 ]]; then
  echo "hymcache: missing ${packages[*]}; run: sudo apt-get install ${packages[*]}" >&2
  exit 1
fi
echo "hymcache: without liburing the device uses threads;" \
  "for io_uring run: sudo apt-get install ${optional[*]}" >&2
