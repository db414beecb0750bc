#!/bin/bash
# Runs the commands that appear in the folder $1 as folders 1, 2, 3, ...: each at once, beside
# those that still run. A command's folder holds on arrival
#   script      what bash is to run
#   deadline    seconds after which it is ended, with all of its process group
# and then
#   pid         its process group
#   stdout, stderr
#   status      its exit status and a newline; 124 or 137 after its deadline
# One that has `argv` instead of `script` is handed on to ../python_server.py, by the pipe $2.
set -u
commands=$1
python=$2

run() {
  if [[ -e $1/argv ]]; then
    echo "$1" >"$python"
    return
  fi
  timeout --kill-after=5 "$(<"$1/deadline")" bash "$1/script" </dev/null \
    >"$1/stdout" 2>"$1/stderr" &
  echo "$!" >"$1/pid"
  wait "$!"
  echo "$?" >"$1/status"
}

# A pipe that nobody writes to: reading from it sleeps without starting a process.
exec {silence}<> <(:)
next=1
echo "$$" >"$commands/ready"
while :; do
  while [[ -d $commands/$next ]]; do
    run "$commands/$next" &
    next=$((next + 1))
  done
  read -r -t 0.05 -u "$silence"
done
