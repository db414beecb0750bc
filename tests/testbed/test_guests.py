"""The guests themselves, and perftest between them as the control of what RDMA tests show."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

import pytest

from tests.testbed.command_channel import CommandFailed, CommandTimeout, GuestDown
from tests.testbed.dax_bytes import move_dax_bytes
from tests.testbed.guest import PYTHON
from tests.testbed.roce import sent_packets
from tests.testbed.testbed import Testbed

HERE = Path(__file__).resolve()
PERFTEST_BYTES = 1 << 20
PERFTEST_MESSAGES = 8


# What is true of guests of any kind is tested in those that have the least to do besides.


# Before Python has been made ready in guests that are to go.
@pytest.mark.testbed("rxe")
def test_a_guest_that_dies_is_told_and_started_anew(testbed: Testbed) -> None:
    first, second = testbed.guests
    command = first.start_command("echo o >/proc/sysrq-trigger; sleep 60")
    with pytest.raises(GuestDown, match=r"guest alpha \(rxe\) is down \(QEMU ended with 0\)"):
        command.wait()
    assert not first.is_running()
    assert second.answers()
    testbed.ensure_ready()
    # The link is whole again, with the same other end.
    second.run(f"ping -c 2 -W 5 {first.address}")
    assert "state ACTIVE" in first.run("rdma link show rxe0/1").stdout
    # The logs of the one that died are still there.
    assert (testbed.folder / "alpha.1" / "console.log").exists()


@pytest.mark.testbed("cxl")
def test_a_guest_that_hangs_is_started_anew(testbed: Testbed) -> None:
    testbed.second.pause()
    assert not testbed.second.answers()
    testbed.ensure_ready()
    assert testbed.second.answers()


@pytest.mark.testbed("cxl")
def test_a_guest_runs_on_the_files_of_the_host(testbed: Testbed) -> None:
    guest = testbed.first
    printed = guest.run(
        f"uname -r; hostname; md5sum <{HERE}; {PYTHON} -c 'import sys; print(sys.version)'"
    )
    kernel, name, digest, version = printed.stdout.splitlines()
    assert kernel.startswith("6.12")
    assert kernel != os.uname().release
    assert name == "alpha"
    assert digest.split()[0] == hashlib.md5(HERE.read_bytes()).hexdigest()
    assert version == sys.version


@pytest.mark.testbed("cxl")
def test_what_a_guest_changes_the_host_keeps(testbed: Testbed) -> None:
    marker = HERE.with_name("written-by-a-guest")
    testbed.first.run(f"echo hello >{marker}; cat {marker}; rm {HERE}")
    assert not marker.exists()
    assert HERE.exists()
    assert testbed.first.run(f"cat {marker}; [[ ! -e {HERE} ]]; rm {marker}").stdout == "hello\n"


@pytest.mark.testbed("cxl")
def test_guests_and_host_see_each_others_files_at_once(testbed: Testbed) -> None:
    path = testbed.folder / "exchange"
    path.write_text("from the host\n")
    testbed.first.run(f"grep -q host {path} && echo from alpha >{path}")
    testbed.second.run(f"grep -q alpha {path} && echo from beta >{path}")
    assert path.read_text() == "from beta\n"


@pytest.mark.testbed("cxl")
def test_commands_end_with_their_status_or_at_their_deadline(testbed: Testbed) -> None:
    with pytest.raises(CommandFailed, match="ended with 7"):
        testbed.first.run("exit 7")
    with pytest.raises(CommandTimeout, match="was ended after 1 s"):
        testbed.first.run("sleep 60", deadline_s=1)
    # Both kinds leave a guest that works.
    assert testbed.first.run("echo fine").stdout == "fine\n"


@pytest.mark.testbed("rxe")
def test_the_two_reach_each_other_in_large_frames(testbed: Testbed) -> None:
    first, second = testbed.guests
    frame = "-M do -s 8900"  # with its headers almost the 9000 bytes of the interface
    second.run(f"ping -c 2 -W 5 {frame} {first.address}")
    first.run(f"ping -c 2 -W 5 {frame} {second.address}")


@pytest.mark.testbed("cxl")
def test_a_paused_guest_is_silent_and_comes_back(testbed: Testbed) -> None:
    first, second = testbed.guests
    second.pause()
    try:
        first.run(f"! ping -c 1 -W 2 {second.address}")
    finally:
        second.resume()
    first.run(f"ping -c 3 -W 5 {second.address}")


@pytest.mark.testbed("rxe")
@pytest.mark.parametrize("program", ["ib_read_bw", "ib_write_bw"])
def test_perftest_moves_data_by_rdma(testbed: Testbed, program: str) -> None:
    first, second = testbed.guests
    call = f"stdbuf -oL {program} -d rxe0 -x 1 -F -s {PERFTEST_BYTES} -n {PERFTEST_MESSAGES}"
    before = sum(map(sent_packets, testbed.guests))
    server = first.start_command(call)
    server.wait_for_output("Waiting for client")
    printed = second.run(f"{call} {first.address}").stdout
    server.wait()
    assert re.search(rf"^ *{PERFTEST_BYTES} +{PERFTEST_MESSAGES} ", printed, re.MULTILINE)
    # By the link between the two, in RoCE's large frames.
    assert re.search(r"Mtu +: 4096", printed)
    assert "192:168:77:01" in printed
    sent = sum(map(sent_packets, testbed.guests)) - before
    assert sent >= PERFTEST_MESSAGES * PERFTEST_BYTES // 4096


@pytest.mark.testbed("rxe")
def test_pyverbs_opens_the_device(testbed: Testbed) -> None:
    code = "from pyverbs.device import get_device_list; print(get_device_list()[0].name.decode())"
    assert testbed.first.run(f"{PYTHON} -c '{code}'").stdout == "rxe0\n"


@pytest.mark.testbed("hmem", "cxl")
def test_both_guests_hold_the_same_memory(testbed: Testbed) -> None:
    first, second = testbed.guests
    seed = 20
    mib = 1 << 20
    for writer, reader, offset in ((first, second, 0), (second, first, 3 * mib)):
        move_dax_bytes(writer, "write", "/dev/dax0.0", offset, mib, seed + offset)
        move_dax_bytes(reader, "verify", "/dev/dax0.0", offset, mib, seed + offset)
    with pytest.raises(CommandFailed, match="differs"):
        move_dax_bytes(first, "verify", "/dev/dax0.0", 0, mib, seed + 1)


@pytest.mark.testbed("hmem")
def test_a_region_is_split_by_address(testbed: Testbed) -> None:
    first, second = testbed.guests
    split = HERE.with_name("split_dax.sh")
    mib = 1 << 20
    names = []
    # Each to its own: neither kernel knows of the other's devices.
    for guest, extent in ((first, "256M"), (second, "256M")):
        names.append(guest.run(f"bash {split} make {extent} 64M").stdout.strip())
        guest.run(f"[[ -e /dev/{names[-1]} && ! -e /dev/dax0.9 ]]")
    seed = 20
    move_dax_bytes(first, "write", f"/dev/{names[0]}", 4096, 65536, seed)
    move_dax_bytes(second, "verify", f"/dev/{names[1]}", 4096, 65536, seed)
    for guest, name in zip(testbed.guests, names, strict=True):
        guest.run(f"bash {split} remove {name}")
        guest.run(f"[[ ! -e /dev/{name} ]]")
    # The whole device comes back for whoever is next.
    for guest in testbed.guests:
        guest.run(f"bash {split} whole")
        move_dax_bytes(guest, "verify", "/dev/dax0.0", 256 * mib + 4096, 65536, seed)
