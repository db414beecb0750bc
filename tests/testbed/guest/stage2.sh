#!/bin/bash
# The guest's process 1 on the host's root: finishes the system and takes commands.
export PATH=/run/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root LANG=C.UTF-8
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o size=75% tmpfs /dev/shm
ulimit -l unlimited
ulimit -n 65536
# An editable install builds its C++ when it is imported. The host has done that.
mkdir /run/bin
ln -s /bin/true /run/bin/cmake

read -r kernel_arguments </proc/cmdline
for argument in $kernel_arguments; do
  case $argument in testbed.guest=*) guest=${argument#*=} ;; esac
done
# NAME, ADDRESS, PREFIX, FOLDER, and TERMINAL_SIZE where a person is to have a shell.
. "/run/testbed/$guest/settings"
hostname "$NAME"
# One path for a file on the host and in every guest.
mkdir -p "$FOLDER"
mount --bind /run/testbed "$FOLDER"

ip link set lo up
interface=$(cd /sys/class/net && echo e*)
ip address add "$ADDRESS/$PREFIX" dev "$interface"
ip link set "$interface" up

if [[ -n ${TERMINAL_SIZE:-} ]]; then
  read -r columns lines <<<"$TERMINAL_SIZE"
  stty -F /dev/ttyS1 columns "$columns" rows "$lines"
  while :; do
    TERM=xterm PS1="$NAME:\w\\$ " setsid --ctty --wait bash --norc -i </dev/ttyS1 >/dev/ttyS1 2>&1
    sleep 1
  done &
fi
mkfifo /run/python
exec bash /run/agent.sh "$FOLDER/$NAME/commands" /run/python
