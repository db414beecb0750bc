"""Where the controller stands between two changes of the world, so that tests can kill it there.

claimed ─▶ intended ─▶ composed ─▶ recorded ─▶ noted ─▶ attached ─▶ published ─▶ settled
freeing ─▶ detached ─▶ freed ─▶ freed-recorded ─▶ released ─▶ forgotten
"""

from __future__ import annotations

import os
import signal
from enum import StrEnum
from typing import Final, Protocol

from hymcache.errors import ConfigError

CRASH_VARIABLE: Final = "HYMCACHE_DRA_CRASH_AT"


class Step(StrEnum):
    """A step has just been taken, and what follows it has not."""

    CLAIMED = "claimed"  # owner and finalizer are on the claim
    INTENDED = "intended"  # the ledger says what is going to be composed
    COMPOSED = "composed"  # the fabric manager has the region, the ledger not yet
    RECORDED = "recorded"  # the ledger has it
    NOTED = "noted"  # the claim's annotation has it
    ATTACHED = "attached"  # hosts have their devices
    PUBLISHED = "published"  # the claim's status says so
    SETTLED = "settled"  # the ledger says that it does
    FREEING = "freeing"  # the ledger says that the region goes
    DETACHED = "detached"  # no host has it any more, and the ledger says so
    FREED = "freed"  # it is gone
    FREED_RECORDED = "freed-recorded"  # the ledger says so
    RELEASED = "released"  # the claim's finalizer is gone
    FORGOTTEN = "forgotten"  # and so is the record


class StepHook(Protocol):
    """Is told of each step."""

    def __call__(self, step: Step, /) -> None:
        """`step` has just been taken."""


def no_hook(_step: Step) -> None:
    """Does nothing."""


def hook_from_environment() -> StepHook:
    """Kills this process at the step that $HYMCACHE_DRA_CRASH_AT names, if it names one."""
    text = os.environ.get(CRASH_VARIABLE, "")
    if not text:
        return no_hook
    try:
        fatal = Step(text)
    except ValueError as error:
        known = ", ".join(step.value for step in Step)
        raise ConfigError(f"{CRASH_VARIABLE} = {text}: not a step; known are {known}") from error

    def crash(step: Step) -> None:
        if step is fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    return crash
