#!/usr/bin/env bash
# Installs what pip cannot: the compiler, headers, and tools of the tests (Debian, Ubuntu).
#
#   deploy/install_system_packages.sh [test] [fuzz] [testbed] [containerd]
#
# Without arguments: what building the package needs. "test" adds the C++ tests' framework,
# "fuzz" the compiler of the fuzz targets, "testbed" what the tests in QEMU guests need, with the
# guests' kernel in ~/.cache/hymcache/testbed (Debian), "containerd" the container runtime of tests,
# unpacked in ~/.cache/hymcache/containerd (Debian). As root or with sudo that asks no password it
# installs them; otherwise it prints the command to run. It takes no time where nothing is missing.
#
# PYTHON names the interpreter to build for (default python3).
set -euo pipefail

python=${PYTHON:-python3}
required=() # without these nothing can be built
optional=() # without these it works, only slower
testbed=()  # without these tests in guests are skipped
containers=() # without these tests in containers are skipped
kernel_cache=${XDG_CACHE_HOME:-$HOME/.cache}/hymcache/testbed
containerd_cache=${XDG_CACHE_HOME:-$HOME/.cache}/hymcache/containerd
want_kernel=false
want_containerd=false

has_header() { [[ -e /usr/include/$1 || -e /usr/local/include/$1 ]]; }

need_testbed() {
  local program package
  while read -r program package; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || testbed+=("$package")
  done <<'PROGRAMS'
modprobe kmod
cpio cpio
busybox busybox-static
setpriv util-linux
ip iproute2
ping iputils-ping
daxctl daxctl
ibv_devinfo ibverbs-utils
ib_read_bw perftest
PROGRAMS
  compgen -G "/usr/lib/*/libibverbs/librxe-*.so" >/dev/null || testbed+=(ibverbs-providers)
  [[ -e /usr/lib/python3/dist-packages/pyverbs ]] || testbed+=(python3-pyverbs)
  # Debian 12 has 7.2 beside the 10.0 in its backports.
  local version
  version=$(dpkg-query -f '${Version}' -W qemu-system-x86 2>/dev/null || true)
  dpkg --compare-versions "${version:-0}" ge 1:9.2 || testbed+=(qemu-system-x86)
  compgen -G "$kernel_cache/linux-image-6.12.*.deb" >/dev/null || want_kernel=true
}

need_containerd() {
  command -v busybox >/dev/null || containers+=(busybox-static)
  [[ -x $containerd_cache/usr/bin/containerd && -x $containerd_cache/usr/sbin/runc ]] ||
    want_containerd=true
}

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
    fuzz)
      command -v clang++ >/dev/null || required+=(clang)
      # libFuzzer and the sanitizers' runtimes are a package of their own on Debian.
      compgen -G "/usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a" >/dev/null ||
        required+=(libclang-rt-dev)
      ;;
    testbed) command -v dpkg-query >/dev/null && need_testbed ;;
    containerd) command -v dpkg-query >/dev/null && need_containerd ;;
    *) echo "usage: $0 [test] [fuzz] [testbed] [containerd]" >&2 && exit 2 ;;
  esac
done

packages=("${required[@]}" "${optional[@]}" "${testbed[@]}" "${containers[@]}")
[[ ${#packages[@]} -eq 0 && $want_kernel = false && $want_containerd = false ]] && exit 0

as_root=()
if [[ $EUID -ne 0 ]]; then
  as_root=(sudo -n)
fi
apt_options=(-o DPkg::Lock::Timeout=300)

# Debian 12 has QEMU and the kernel for the testbed in its backports. They are added to what this
# run of apt knows, and are all that it takes from there; nor is libc or Python exchanged.
add_backports() {
  local codename uri
  codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
  [[ $codename = bookworm ]] || return 0
  uri=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' \
    "Codename: $codename" | head -n 1)
  mkdir "$work/sources" "$work/preferences"
  cp /etc/apt/sources.list.d/*.{list,sources} "$work/sources/" 2>/dev/null || true
  cp /etc/apt/preferences.d/* "$work/preferences/" 2>/dev/null || true
  local signed=signed-by=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [$signed] ${uri:-http://deb.debian.org/debian} $codename-backports main" \
    >"$work/sources/testbed-backports.list"
  cat >"$work/preferences/testbed" <<PREFERENCES
Package: src:qemu src:seabios
Pin: release n=$codename-backports
Pin-Priority: 990

Package: src:glibc src:python3-defaults src:python3.11
Pin: release a=now
Pin-Priority: 1001
PREFERENCES
  apt_options+=(-o "Dir::Etc::SourceParts=$work/sources"
    -o "Dir::Etc::PreferencesParts=$work/preferences")
}

# The kernel is kept as a package; nothing of it is installed here.
download_kernel() {
  local newest
  newest=$(apt-cache "${apt_options[@]}" pkgnames linux-image-6.12. |
    { grep -E '^linux-image-6\.12\.[0-9]+\+deb[0-9]+-amd64$' || true; } | sort -V | tail -n 1)
  if [[ -z $newest ]]; then
    echo "hymcache: no Debian kernel 6.12 for the testbed's guests among apt's packages" >&2
    return
  fi
  mkdir -p "$work/kernel" "$kernel_cache"
  (cd "$work/kernel" && apt-get "${apt_options[@]}" -qq -o APT::Sandbox::User=root \
    download "$newest")
  mv "$work/kernel"/*.deb "$kernel_cache/"
}

# Debian 12's own is too old for CDI. The package of Debian's development branch runs on its libc; it
# is found by lists of its own, so that apt knows nothing of that branch, and is not installed.
download_containerd() {
  local uri
  uri=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' |
    head -n 1)
  if [[ -z $uri ]]; then
    echo "hymcache: no Debian packages of containerd for the tests in containers" >&2
    return
  fi
  mkdir -p "$work/sid/lists/partial" "$work/containerd" "$containerd_cache"
  local signed=signed-by=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [$signed] $uri sid main" >"$work/sid/sources.list"
  local sid=(-o "Dir::Etc::SourceList=$work/sid/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$work/sid/lists" -o Acquire::Languages=none)
  local download=(-qq -o APT::Sandbox::User=root download)
  apt-get "${sid[@]}" -qq -o APT::Sandbox::User=root update
  (cd "$work/containerd" && apt-get "${sid[@]}" "${download[@]}" containerd &&
    apt-get "${download[@]}" runc)
  local package
  for package in "$work/containerd"/*.deb; do
    dpkg-deb -x "$package" "$containerd_cache"
  done
}

install_packages() {
  "${as_root[@]}" apt-get "${apt_options[@]}" -qq update || return
  if [[ ${#packages[@]} -gt 0 ]]; then
    echo "hymcache: installing ${packages[*]}" >&2
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "${apt_options[@]}" -qq \
      install -y --no-install-recommends "${packages[@]}" >/dev/null || return
  fi
  if [[ $want_kernel = true ]]; then
    download_kernel
  fi
  if [[ $want_containerd = true ]]; then
    download_containerd
  fi
}

if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  chmod 755 "$work"
  if [[ $want_kernel = true || ${#testbed[@]} -gt 0 ]]; then
    add_backports
  fi
  install_packages && exit 0
fi

if [[ ${#required[@]} -gt 0 ]]; then
  echo "hymcache: missing ${packages[*]}; run: sudo apt-get install ${packages[*]}" >&2
  exit 1
fi
if [[ ${#optional[@]} -gt 0 ]]; then
  echo "hymcache: without liburing the device uses threads;" \
    "for io_uring run: sudo apt-get install ${optional[*]}" >&2
fi
if [[ ${#testbed[@]} -gt 0 || $want_kernel = true ]]; then
  echo "hymcache: tests in guests are skipped; for them run as root or with sudo:" \
    "deploy/install_system_packages.sh testbed" >&2
fi
if [[ ${#containers[@]} -gt 0 || $want_containerd = true ]]; then
  echo "hymcache: tests in containers are skipped; for them run as root or with sudo:" \
    "deploy/install_system_packages.sh containerd" >&2
fi
