#!/bin/sh
# The first program of a guest: its root is the host's, read-only, with a layer of memory above it.
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
while read -r module; do insmod "/modules/$module"; done </modules/order
options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "ro,$options,cache=loose" host /host
mount -t tmpfs -o size=75% tmpfs /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work overlay /root
for name in proc sys dev; do mount -o move "/$name" "/root/$name"; done
# What the host has mounted there is the host's.
mount -t tmpfs tmpfs /root/run
mkdir /root/run/testbed /root/run/lock
cp /stage2.sh /agent.sh /root/run/
mkdir -p /root/lib/modules
mount -t 9p -o "ro,$options,cache=loose" modules /root/lib/modules
# The tests' folder: what one side writes the other reads at once.
mount -t 9p -o "$options,cache=none" share /root/run/testbed
exec switch_root /root /bin/bash /run/stage2.sh
