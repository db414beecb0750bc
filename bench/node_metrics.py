"""What a running node says of itself in /metrics."""

from __future__ import annotations

import time
import urllib.request
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from hymcache.errors import Unavailable

_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.02


class NodeMetrics:
    """Reads the metrics of the node at `http`, "host:port"."""

    def __init__(self, http: str) -> None:
        self._url = f"http://{http}/metrics"

    def value(self, name: str) -> float:
        """A metric by its name, added up over its labels.

        Raises:
            Unavailable: the node does not answer, or has no such metric.
        """
        try:
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as response:  # noqa: S310 - http, to a child of ours
                text = response.read().decode()
        except OSError as error:
            raise Unavailable(f"{self._url}: {error}") from error
        values = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]
        if not values:
            raise Unavailable(f"{self._url} has no {name}")
        return sum(values)

    def wait_flushed(self, timeout_s: float) -> None:
        """Waits until everything that was put is on the device.

        Raises:
            Unavailable: it is not within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while self.value(WRITE_BUFFER_USED) > 0:
            if time.monotonic() > deadline:
                raise Unavailable(f"the node has not flushed its buffer within {timeout_s:.0f} s")
            time.sleep(_POLL_S)


WRITE_BUFFER_USED: Final = "hymcache_node_write_buffer_used_bytes"
DEVICE_READ_BYTES: Final = "hymcache_node_device_read_bytes_total"
