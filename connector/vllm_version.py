"""Which versions of vLLM the connector works with."""

from __future__ import annotations

import re
from typing import Final

from hymcache.errors import ConfigError

# The whole test suite passes with these.
TESTED_VERSIONS: Final = ("0.32.0",)

# The oldest one whose connector interface is the one used here: logical [B, H, N, C] views of
# one allocation, `on_new_request`, `get_transfer_results`, loads that start after the forward.
_OLDEST: Final = (0, 32)


def check_version(version: str) -> str | None:
    """A word of warning for a version that was not tested, None for one that was.

    Raises ConfigError for one that cannot work.
    """
    release = version.partition("+")[0]
    if release in TESTED_VERSIONS:
        return None
    tested = ", ".join(TESTED_VERSIONS)
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None or (int(match[1]), int(match[2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ConfigError(
            f"HyMCacheConnector needs vLLM {oldest} or newer (tested with {tested}), "
            f"and this is vLLM {version}"
        )
    return f"HyMCacheConnector was tested with vLLM {tested}, and this is vLLM {version}"
