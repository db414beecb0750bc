"""The page of a master for people: its nodes, and what it holds. No script, one request."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from hymcache.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hymcache._core import MasterStats, MemberInfo
    from hymcache.master.metrics import MasterSnapshot

_REFRESH_S: Final = 5
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em;
       color: #1c2430; background: #fff; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35em .8em .35em 0; border-bottom: 1px solid #dde3ea; }
th { font-weight: 600; color: #566273; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.alive { color: #17713a; } .draining { color: #94600a; } .lost { color: #b3261e; }
small { color: #566273; }
@media (prefers-color-scheme: dark) {
  body { color: #d7dde5; background: #14181d; } th, td { border-color: #2c343e; }
  th, small { color: #93a0b0; }
  .alive { color: #6fcf8e; } .draining { color: #e0b050; } .lost { color: #f28b82; }
}
"""


def render_status_page(snapshot: MasterSnapshot, endpoints: Iterable[str], uptime_s: float) -> str:
    """HTML of a page that reloads itself."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="{_REFRESH_S}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>HyMCache master</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>HyMCache master</h1>
<p>{escape(", ".join(endpoints))}<br>
<small>version {escape(__version__)}, up {_duration(uptime_s)};
<a href="/metrics">metrics</a></small></p>
<h2>Nodes</h2>
{_nodes(snapshot.members)}
<h2>Index</h2>
{_index(snapshot.stats)}
</body>
</html>
"""


def _nodes(members: list[MemberInfo]) -> str:
    if not members:
        return "<p>No node has registered yet: start one with <code>hymcache node</code>.</p>"
    head = _cells("th", ("node", "state", "endpoint"), ("objects", "used", "capacity", "sessions"))
    rows = [
        _cells(
            "td",
            (escape(member["name"]), _state(member), escape(member["tcp"])),
            (
                f"{member['rows']:,}",
                _bytes(member["used_bytes"]),
                _bytes(member["capacity_bytes"]),
                f"{member['sessions']:,}",
            ),
        )
        for member in members
    ]
    return _table(head, rows)


def _state(member: MemberInfo) -> str:
    state = member["state"]
    age = _duration(member["state_age_ms"] / 1e3)
    away = "" if member["connected"] or state == "lost" else ", not connected"
    return f'<span class="{state}">{state}</span> <small>for {age}{away}</small>'


def _index(stats: MasterStats) -> str:
    keys = stats["lookup_keys"]
    share = f" ({stats['lookup_hits'] / keys:.0%})" if keys else ""
    facts = {
        "objects listed": f"{stats['rows'] - stats['rows_hidden']:,}",
        "memory": _bytes(stats["index_bytes"]),
        "namespaces": f"{stats['namespaces']:,}",
        "lookups": f"{stats['lookups']:,} of {keys:,} keys",
        "hits": f"{stats['lookup_hits']:,}{share}",
        "connections": f"{stats['connections']:,}",
        "protocol errors": f"{stats['protocol_errors']:,}",
    }
    return _table("", [_cells("td", (name,), (value,)) for name, value in facts.items()])


def _table(head: str, rows: list[str]) -> str:
    return f"<table>{head}{''.join(rows)}</table>"


def _cells(tag: str, texts: Iterable[str], numbers: Iterable[str]) -> str:
    cells = [f"<{tag}>{text}</{tag}>" for text in texts]
    cells += [f'<{tag} class="number">{number}</{tag}>' for number in numbers]
    return f"<tr>{''.join(cells)}</tr>"


def _duration(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
