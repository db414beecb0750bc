"""Copies of a Python that has imported, on this machine; they end as processes of their own do."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.agent_process import Agent
from tests.testbed.command_channel import CommandFailed, CommandTimeout
from tests.testbed.guest import REPOSITORY

STARTED_S = 20

COMMAND = """
import atexit, json, os, sys, time
print(json.dumps([__name__, sys.argv[1:], "heavy" in sys.modules, os.getpgrp() == os.getpid()]))
print("wrong", file=sys.stderr)
atexit.register(print, "at exit")
action = sys.argv[1]
if action == "exit":
    sys.exit(7)
if action == "raise":
    raise KeyError("lost")
if action == "wait":
    sys.stdout.flush()
    time.sleep(60)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """With a server that has imported `heavy`, and where `command` can be found."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "heavy.py").touch()
    (modules / "command.py").write_text(COMMAND)
    agent = Agent(tmp_path / "commands")
    agent.start()
    server = agent.channel.start(
        f"cd {REPOSITORY}; export PYTHONPATH={modules}\n"
        f"exec {sys.executable} -m tests.testbed.python_server heavy <>{agent.pipe}",
        deadline_s=300,
    )
    server.wait_for_output("ready", deadline_s=STARTED_S)
    yield agent
    end(server.wait_started())
    assert server.wait(check=False).stderr == ""
    agent.kill()


def end(group: int) -> None:
    subprocess.run(["kill", "-s", "KILL", "--", f"-{group}"], check=True)


def test_a_module_runs_as_if_it_had_been_started(agent: Agent) -> None:
    result = agent.channel.start_python(["command", "end", "a b"], deadline_s=STARTED_S).wait()
    assert result.stdout == '["__main__", ["end", "a b"], true, true]\nat exit\n'
    assert result.stderr == "wrong\n"
    # What one has changed, the next does not see.
    again = agent.channel.start_python(["command", "end", "a b"], deadline_s=STARTED_S).wait()
    assert again == result


def test_its_status_is_told(agent: Agent) -> None:
    command = agent.channel.start_python(["command", "exit"], deadline_s=STARTED_S)
    assert command.wait(check=False).status == 7
    command = agent.channel.start_python(["command", "raise"], deadline_s=STARTED_S)
    with pytest.raises(CommandFailed, match="python -m command raise") as caught:
        command.wait()
    assert "KeyError: 'lost'" in str(caught.value)
    assert command.status() == 1


def test_commands_run_beside_each_other_until_they_are_ended(agent: Agent) -> None:
    waiting = agent.channel.start_python(["command", "wait"], deadline_s=60)
    waiting.wait_for_output("__main__", deadline_s=STARTED_S)
    agent.channel.start_python(["command", "end"], deadline_s=STARTED_S).wait()
    assert waiting.status() is None
    end(waiting.wait_started())
    assert waiting.wait(check=False).status == 128 + signal.SIGKILL


def test_one_is_ended_at_its_deadline(agent: Agent) -> None:
    with pytest.raises(CommandTimeout, match="was ended after 1 s"):
        agent.channel.start_python(["command", "wait"], deadline_s=1).wait()


def test_threads_would_be_lost_and_are_refused(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "modules" / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(5,)).start()\n"
    )
    server = agent.channel.start(
        f"cd {REPOSITORY}; export PYTHONPATH={tmp_path / 'modules'}\n"
        f"exec {sys.executable} -m tests.testbed.python_server threaded </dev/null",
        deadline_s=STARTED_S,
    )
    with pytest.raises(CommandFailed, match="would lack the 1 threads"):
        server.wait()
