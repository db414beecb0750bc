"""Which hosts get a claim's region."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hymcache.dra.fabric import HostId


def choose_hosts(
    usable: Sequence[HostId],
    consumers: Collection[HostId],
    share_count: int | None,
    had: Sequence[HostId] = (),
) -> tuple[HostId, ...]:
    """Hosts for a region: those that have it, then those of its pods, then any; sorted.

    `usable` are cabled to its blade; `share_count` is how many get it, None: all. A host stays
    once it is chosen. Pods beyond the share are left out.
    """
    limit = len(usable) if share_count is None else share_count
    chosen = list(had)
    wanted = [host for host in usable if host in consumers]
    for host in (*wanted, *usable):
        if len(chosen) >= limit and not (share_count is None and host in consumers):
            break
        if host not in chosen:
            chosen.append(host)
    return tuple(sorted(chosen))
