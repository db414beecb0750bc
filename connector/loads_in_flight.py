"""The loads that were ordered and are not done yet at all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hymcache.connector.metadata import LoadPart, LoadRequest


@dataclass(slots=True)
class Load:
    """A load in flight.

    `keys` are those of its blocks in the first group, which begin at `first_block`; `good_blocks`
    how many of them, from the first on, no rank has reported as failed. The first `outside`
    lie before the window and are not loaded. `end_blocks` are, by group, how many leading blocks
    the request has when all went well.
    """

    keys: list[bytes]
    first_block: int
    outside: int
    end_blocks: tuple[int, ...]
    good_blocks: int


class LoadsInFlight:
    """Loads by request, from their order to the report of the last rank.

    A load outlives its request: blocks of an aborted one stay allocated until it is reported.
    """

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._loader_of: dict[bytes, str] = {}
        self._orders: list[LoadRequest] = []

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._loads

    def add(self, req_id: str, parts: tuple[LoadPart, ...], load: Load) -> None:
        """Orders a load for the next step."""
        self._loads[req_id] = load
        for key in load.keys:
            self._loader_of[key] = req_id
        self._orders.append(LoadRequest(req_id, parts))

    def take_orders(self) -> list[LoadRequest]:
        """The loads to start in this step."""
        orders, self._orders = self._orders, []
        return orders

    def of_other(self, req_id: str, keys: Iterable[bytes]) -> bool:
        """Whether some of these keys are being loaded for another request."""
        return any(self._loader_of.get(key, req_id) != req_id for key in keys)

    def report(self, good_blocks: dict[str, int]) -> None:
        """Takes the reports of ranks that have finished loads."""
        for req_id, good in good_blocks.items():
            load = self._loads.get(req_id)
            if load is not None:
                load.good_blocks = min(load.good_blocks, load.outside + good)

    def finish(self, req_id: str) -> Load | None:
        """All ranks are done; None for a request that loads nothing here."""
        load = self._loads.pop(req_id, None)
        if load is not None:
            for key in load.keys:
                if self._loader_of.get(key) == req_id:
                    del self._loader_of[key]
        return load
