"""Writes a configuration as TOML, and the reference of all keys as Markdown.

docs/configuration.md is what reference_markdown() returns (`make docs`).
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from hymcache.config import Config, Kind
from hymcache.config_source import environment_variable, section_model

_INTRODUCTION: Final = """\
# Configuration

One TOML file (`hymcache up --config FILE`, or `$HYMCACHE_CONFIG`), every key optional.
`hymcache config check FILE` prints what is in force, or says in one line what is wrong.

- An environment variable overrides the file: `HYMCACHE_NODE__LISTEN` is `listen` in `[node]`.
- `--set node.listen=0.0.0.0:7410` overrides both.
- Sizes are bytes or texts such as `"10GiB"` and `"500MB"`; durations are numbers in the unit that
  the key names, or texts such as `"250ms"` and `"10s"`. Addresses are `"host:port"`, IPv6
  `"[::1]:7400"`; port 0 lets the system choose.
- An unknown key is an error.
"""


def configuration_toml(config: Config) -> str:
    """The effective configuration as a TOML file; a secret shows as asterisks."""
    lines: list[str] = []
    sections: dict[str, dict[str, Any]] = {}
    for key, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            sections[key] = value
        elif value is not None:
            lines.append(f"{key} = {_toml(value)}")
    for name, section in sections.items():
        lines += ["", f"[{name}]"] if lines else [f"[{name}]"]
        lines += (f"{key} = {_toml(value)}" for key, value in section.items())
    return "\n".join(lines) + "\n"


def reference_markdown() -> str:
    """All keys of the configuration: one table a section."""
    defaults = Config().model_dump(mode="json")
    keys: dict[str, FieldInfo] = {}
    sections: list[str] = []
    for name, field in Config.model_fields.items():
        section = section_model(field)
        if section is None:
            keys[name] = field
        else:
            sections.append(f"## `[{name}]`\n\n{section.__doc__}\n")
            sections.append(_table(f"{name}.", section.model_fields, defaults[name]))
    return "\n".join([_INTRODUCTION, _table("", keys, defaults), *sections])


def _table(prefix: str, fields: dict[str, FieldInfo], defaults: dict[str, Any]) -> str:
    rows = ["| key | kind | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        variable = environment_variable(prefix + name)
        rows.append(
            f"| `{name}` | {_kind(field)} | {_default(field, defaults[name])} "
            f"| {field.description}<br>`{variable}` |"
        )
    return "\n".join(rows) + "\n"


def _kind(field: FieldInfo) -> str:
    for mark in field.metadata:
        if isinstance(mark, Kind):
            return mark.name
    if get_origin(field.annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(field.annotation))
    if field.annotation is bool:
        return "true or false"
    return "number" if field.annotation is int else "text"


def _default(field: FieldInfo, value: Any) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default_text" in extra:
        return str(extra["default_text"])
    return "none" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # A TOML string has the escapes of JSON, but no pairs of surrogates: so no \u for letters.
    return json.dumps(value, ensure_ascii=False)
