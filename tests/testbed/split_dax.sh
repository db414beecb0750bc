#!/bin/bash
# In a guest: splits the region of dax0.0, as a host agent does.
#
#   split_dax.sh make OFFSET SIZE    a device of exactly that part; prints its name
#   split_dax.sh remove NAME
#   split_dax.sh whole               dax0.0 over all of it, as it was in the beginning
set -eu
devices=/sys/bus/dax/devices
driver=/sys/bus/dax/drivers/device_dax
region=$(readlink -f "$devices/dax0.0")/../dax_region

bind() {
  [[ -e $driver/$1 ]] || echo "$1" >"$driver/new_id"
  [[ -e $driver/$1 ]] || echo "$1" >"$driver/bind"
}
unbind() { [[ ! -e $driver/$1 ]] || echo "$1" >"$driver/unbind"; }

case $1 in
  make)
    offset=$(numfmt --from=iec "$2")
    size=$(numfmt --from=iec "$3")
    base_file=/run/dax-base
    if [[ ! -e $base_file ]]; then # the device of the whole region tells where it begins
      cat "$devices/dax0.0/resource" >"$base_file"
      unbind dax0.0
      echo 0 >"$devices/dax0.0/size"
    fi
    base=$(($(<"$base_file")))
    echo 1 >"$region/create"
    name=$(<"$region/seed")
    printf '%x-%x' $((base + offset)) $((base + offset + size - 1)) >"$devices/$name/mapping"
    bind "$name"
    echo "$name"
    ;;
  remove)
    unbind "$2"
    echo 0 >"$devices/$2/size"
    echo "$2" >"$region/delete"
    echo "$2" >"$driver/remove_id"
    ;;
  whole)
    cat "$region/available_size" >"$devices/dax0.0/size"
    bind dax0.0
    rm -f /run/dax-base
    ;;
esac
