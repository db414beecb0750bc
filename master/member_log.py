"""Says in the master's log how its nodes come and go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from hymcache.errors import Unavailable

if TYPE_CHECKING:
    from hymcache._core import MasterServer, MemberInfo

# Refusals wake nobody: they are looked for this often, and with every change of a node.
_LOOK_S: Final = 10.0
_STOP_S: Final = 5.0

logger = logging.getLogger("hymcache.master")

Line = tuple[int, str]  # level of logging, text


class MemberLog:
    """A thread that waits for changes of a running master's nodes; it ends with the master."""

    def __init__(self, master: MasterServer) -> None:
        """Nothing is said before `start`."""
        self._master = master
        self._thread = threading.Thread(target=self._run, name="member log", daemon=True)

    def start(self) -> None:
        """Once the master runs."""
        self._thread.start()

    def join(self) -> None:
        """Once the master has been told to stop."""
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        known: dict[int, MemberInfo] = {}
        version = refused = 0
        try:
            while True:
                version = self._master.wait_members(version, _LOOK_S)
                # May be newer than `version`: then the next round finds no difference.
                present = {member["node"]: member for member in self._master.members()}
                for level, text in differences(known, present):
                    logger.log(level, "%s", text)
                known = present
                total = self._master.stats()["registrations_refused"]
                if total > refused:
                    logger.warning(
                        "refused %d registration(s) of nodes; their own logs say why",
                        total - refused,
                    )
                refused = total
        except Unavailable:
            return  # the master has stopped


def differences(
    known: Mapping[int, MemberInfo], present: Mapping[int, MemberInfo]
) -> Iterator[Line]:
    """What is worth a line between two looks at the nodes, by node id."""
    for node, member in present.items():
        before = known.get(node)
        place = f"node {member['name']} ({member['tcp'] or member['unix_path']})"
        if member["state"] == "lost":
            if before is None or before["state"] != "lost":
                yield (
                    logging.WARNING,
                    f"{place} is lost: its lease ran out; nobody is sent to its "
                    f"{member['objects']:,} objects until it is back",
                )
            continue
        if before is None:
            yield logging.INFO, f"{place} has joined"
        elif before["incarnation"] != member["incarnation"]:
            yield logging.INFO, f"{place} was restarted"
        elif before["state"] == "lost":
            yield logging.INFO, f"{place} is back"
        if member["draining"] != (before is not None and before["draining"]):
            drains = "takes no more writes" if member["draining"] else "takes writes again"
            yield logging.INFO, f"{place} {drains}"
    for node, member in known.items():
        if node not in present:
            yield logging.INFO, f"node {member['name']} is forgotten"
