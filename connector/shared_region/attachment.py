"""A region's directory as one half of an engine has it: attached anew when it was lost.

    detached --attach--> attached --an error, e.g. it was formatted anew--> detached
       ^  |
       +--+ refused: told once, tried again a second later

Between the two nothing is found and nothing is stored; the engine computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from vllm.logger import init_logger

from hymcache.errors import DeviceError, HymcacheError

if TYPE_CHECKING:
    from hymcache.lookup.region_directory import RegionDirectory

T = TypeVar("T")

logger = init_logger("vllm.hymcache.region")

_RETRY_S: Final = 1.0
# A directory that is lost at its first use after it was attached is left for a second.
_ATTEMPTS: Final = 2


class Attachment:
    """Thread-safe. No call waits for another thread that attaches."""

    def __init__(
        self,
        attach: Callable[[], RegionDirectory],
        *,
        directory: RegionDirectory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory` is one that `attach` gave already. `attach` raises HymcacheError."""
        self._attach = attach
        self._clock = clock
        self._lock = threading.Lock()
        self._directory = directory
        self._attaching = False
        self._tried_at: float | None = None
        self._reason = ""
        self._closed = False

    @property
    def directory(self) -> RegionDirectory | None:
        """What is attached now; does not try."""
        return self._directory

    def use(self, call: Callable[[RegionDirectory], T]) -> T | None:
        """What `call` says of the directory; None while there is none.

        Raises DeviceError where `call` does: a write that failed does not tell of the region.
        """
        for _ in range(_ATTEMPTS):
            directory = self.attached()
            if directory is None:
                return None
            try:
                return call(directory)
            except DeviceError:
                raise
            except HymcacheError as error:
                self._lose(directory, error)
        return None

    def attached(self) -> RegionDirectory | None:
        """The directory; attaches where there is none and the last try is long enough ago."""
        with self._lock:
            now = self._clock()
            if self._directory is not None or self._closed or self._attaching:
                return self._directory
            if self._tried_at is not None and now - self._tried_at < _RETRY_S:
                return None
            self._attaching = True
        try:
            return self._keep(self._attach())
        except HymcacheError as error:
            self._tell(error)
            return None
        finally:
            with self._lock:
                self._attaching = False
                self._tried_at = self._clock()

    def close(self) -> None:
        """Leaves the region for good."""
        with self._lock:
            self._closed = True
            directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

    def _keep(self, directory: RegionDirectory) -> RegionDirectory | None:
        with self._lock:
            if not self._closed:
                self._directory = directory
                self._reason = ""
                return directory
        directory.close()
        return None

    def _lose(self, directory: RegionDirectory, error: HymcacheError) -> None:
        with self._lock:
            if self._directory is not directory:
                return
            self._directory = None
        self._tell(error)
        directory.close()

    def _tell(self, error: HymcacheError) -> None:
        if str(error) != self._reason:
            self._reason = str(error)
            logger.warning("HyMCache: nothing is found in the region: %s", error)
