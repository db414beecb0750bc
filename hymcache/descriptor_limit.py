"""Room for as many connections as a service is configured for.

Systems start processes with a soft limit of 1,024 descriptors, for the sake of programs that use
select(); none of ours does, so the limit can go up to the hard one.
"""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger("hymcache")


def ensure_descriptors(count: int) -> None:
    """Raises the soft limit to `count` if it is lower, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    target = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    if target < count:
        logger.warning(
            "this process may open %d files, and %d connections are allowed: raise the limit "
            "(ulimit -Hn, LimitNOFILE=), or lower connections_max",
            target,
            count,
        )
