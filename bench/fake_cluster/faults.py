"""What goes wrong with the API server at the moment; tests set it over HTTP (control_app.py)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hymcache.bench.fake_cluster.status_error import StatusError


@dataclass
class Faults:
    """`delay_s` before each answer; the next `refusals` writes that match get their status."""

    delay_s: float = 0.0
    refusals: list[tuple[str, int]] = field(default_factory=list)

    async def delay(self) -> None:
        """Waits as long as the fault says."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s)

    def check(self, method: str, path: str) -> None:
        """Raises StatusError where the next refusal is meant for this path."""
        if method == "GET":
            return
        for index, (part, code) in enumerate(self.refusals):
            if part in path:
                del self.refusals[index]
                raise StatusError(code, "Injected", f"{method} {path}: injected")
