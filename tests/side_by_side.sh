#!/usr/bin/env bash
# side_by_side.sh LOG COMMAND... -- COMMAND...
# Runs both at the same time. The output of the second goes to LOG, and follows that of the first.
# Fails if one does; pytest's 5, "no tests", is no failure.
set -u
log=$1
shift
first=()
while [[ $1 != -- ]]; do
  first+=("$1")
  shift
done
shift
mkdir -p "$(dirname "$log")"
"$@" >"$log" 2>&1 &
second=$!
trap 'kill "$second"; exit 130' INT TERM
"${first[@]}"
statuses=("$?")
wait "$second"
statuses+=("$?")
cat "$log"
for status in "${statuses[@]}"; do
  [[ $status == [05] ]] || exit "$status"
done
