"""The two ends of the channel on this machine; those in guests are tested with the guests."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.agent_process import Agent
from tests.testbed.command_channel import (
    CommandFailed,
    CommandTimeout,
    GuestDown,
)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "commands")
    agent.start()
    agent.channel.wait_ready(deadline_s=20)
    yield agent
    agent.kill()


def test_a_result_has_status_and_both_streams(agent: Agent) -> None:
    command = agent.channel.start('echo "$GREETING"; echo wrong >&2; exit 3', deadline_s=20)
    result = command.wait(check=False)
    assert (result.status, result.stdout, result.stderr) == (3, "it's here\n", "wrong\n")
    with pytest.raises(CommandFailed, match="ended with 3") as caught:
        command.wait()
    assert "wrong" in str(caught.value)


def test_commands_run_beside_each_other(agent: Agent, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    waiting = agent.channel.start(
        f"echo waits; until [[ -e {gate} ]]; do sleep 0.05; done", deadline_s=20
    )
    assert waiting.wait_for_output("waits") == "waits\n"
    assert waiting.status() is None
    agent.channel.start(f"touch {gate}", deadline_s=20).wait()
    assert waiting.wait().status == 0


def test_a_command_is_ended_at_its_deadline_with_what_it_started(agent: Agent) -> None:
    command = agent.channel.start("sleep 60 & echo $!; wait", deadline_s=1)
    with pytest.raises(CommandTimeout, match="was ended after 1 s"):
        command.wait()
    started = int(command.stdout)
    limit = time.monotonic() + 10
    while Path(f"/proc/{started}").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not Path(f"/proc/{started}").exists()


def test_a_status_of_124_before_the_deadline_is_the_commands_own(agent: Agent) -> None:
    assert agent.channel.start("exit 124", deadline_s=20).wait(check=False).status == 124


def test_waiting_for_output_ends_with_the_command(agent: Agent) -> None:
    command = agent.channel.start("echo other", deadline_s=20)
    with pytest.raises(CommandFailed, match="without 'ready'"):
        command.wait_for_output("ready")


def test_waiting_for_output_has_a_deadline(agent: Agent) -> None:
    command = agent.channel.start("exec sleep 20", deadline_s=30)
    with pytest.raises(CommandTimeout, match="did not print 'ready'"):
        command.wait_for_output("ready", deadline_s=0.2)
    subprocess.run(["kill", "--", f"-{command.wait_started()}"], check=True)
    assert command.wait(check=False).status == 143


def test_a_guest_that_ends_ends_the_waiting(agent: Agent) -> None:
    command = agent.channel.start("exec sleep 2", deadline_s=30)
    command.wait_started()
    agent.kill()
    with pytest.raises(GuestDown, match="the agent is gone"):
        command.wait()


def test_a_guest_that_never_comes_up_is_told(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "commands")
    with pytest.raises(GuestDown, match=r"did not come up in 0\.1 s"):
        agent.channel.wait_ready(deadline_s=0.1)
