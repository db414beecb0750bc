"""Two hosts and one region, with nothing between them but memory."""

from __future__ import annotations

import pytest

from tests.testbed.testbed import Testbed

CLIENT = "tests.testbed.region_client"
DEVICE = "/dev/dax0.0"
MIB = 1 << 20
COMMAND_S = 120  # emulated guests take long where others use the machine


@pytest.mark.testbed("hmem", "cxl")
def test_what_one_host_stores_the_other_finds_and_verifies(testbed: Testbed) -> None:
    first, second = testbed.guests
    # QEMU's CXL memory moves a few MB a second, and every byte of the directory is written once.
    first.run_python(
        CLIENT, "format", DEVICE, str(8 * MIB), str(MIB // 2), "10", deadline_s=COMMAND_S
    )
    first.run_python(CLIENT, "store", DEVICE, "2", str(MIB // 2), deadline_s=COMMAND_S)
    second.run_python(CLIENT, "verify", DEVICE, "2", str(MIB // 2), deadline_s=COMMAND_S)
    shown = second.run_python("hymcache", "region", "inspect", DEVICE, deadline_s=COMMAND_S)
    assert "made_for=testbed" in shown.stdout


@pytest.mark.timeout(600)
@pytest.mark.testbed("hmem")
def test_a_host_dies_in_a_store_and_the_other_takes_the_slot_back(testbed: Testbed) -> None:
    first, second = testbed.guests
    # A store takes seconds: the host is still in the middle of it when it is killed.
    size = 256 * MIB
    first.run_python(CLIENT, "format", DEVICE, str(640 * MIB), str(size), "2", deadline_s=COMMAND_S)
    churn = first.start_python(CLIENT, "churn", DEVICE, str(size), deadline_s=3 * COMMAND_S)
    churn.wait_for_output("storing", deadline_s=COMMAND_S)
    survivor = second.start_python(
        CLIENT, "await_reclaim", DEVICE, str(size), deadline_s=2 * COMMAND_S
    )
    survivor.wait_for_output("pending", deadline_s=COMMAND_S)
    first.kill()
    survivor.wait()
