"""Reads a configuration from a TOML file, the environment and `--set`, and tells its faults.

Each fault is one line: where the value came from, the key, the value, and what to write instead.

    hymcache.toml: node.listn: unknown key; did you mean node.listen?
    HYMCACHE_DEVICE__CAPACITY: device.capacity = "ten": not a size; write bytes or ...
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from hymcache.config import Config
from hymcache.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "HYMCACHE_"
FILE_VARIABLE: Final = "HYMCACHE_CONFIG"

_FILE_BYTES_MAX: Final = 1 << 20
_FAULTS_TOLD_MAX: Final = 8
_SHOWN_VALUE_CHARS_MAX: Final = 60

_Model = TypeVar("_Model", bound=BaseModel)
# Words for what pydantic says in its own terms.
_REASONS: Final = {
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
    "int_from_float": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_type": "should be a whole number",
    "model_type": "should be a table of keys",
    "path_type": "should be a path",
    "too_short": "should name at least one",
    "tuple_type": "should be a list",
}

# Dotted key -> where its value came from, for values that are not from the file.
_Origins = dict[str, str]


def load_config(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    settings: Iterable[str] = (),
) -> Config:
    """The configuration of this process.

    `path` names the TOML file; without it `$HYMCACHE_CONFIG` does, and without that there is no
    file. `settings` are `KEY=VALUE` with a dotted key. Raises ConfigError, one line a fault.
    """
    environ = os.environ if environ is None else environ
    if path is None and environ.get(FILE_VARIABLE):
        path = Path(environ[FILE_VARIABLE])
    data = {} if path is None else _read_file(path)
    origins: _Origins = {}
    for key, text, origin in (*_from_environment(environ), *_from_settings(settings)):
        _put(data, key, text)
        origins[key] = origin
    return _validate(Config, data, str(path or "defaults"), origins)


def parse_section(model: type[_Model], data: Mapping[str, Any], origin: str) -> _Model:
    """One section from a mapping that came from elsewhere, such as vLLM's extra configuration.

    `origin` says where from, in the faults. Raises ConfigError, one line a fault.
    """
    return _validate(model, data, origin, {})


def known_keys(model: type[BaseModel] = Config) -> tuple[str, ...]:
    """The dotted keys of a model, those of its sections included."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        section = section_model(field)
        if section is None:
            keys.append(name)
        else:
            keys += (f"{name}.{key}" for key in known_keys(section))
    return tuple(keys)


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section; None for a field that is a key."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def environment_variable(key: str) -> str:
    """`node.listen` -> `HYMCACHE_NODE__LISTEN`."""
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "__")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a readable TOML file") from error
    if len(raw) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {_FILE_BYTES_MAX} bytes; not a configuration")
    try:
        return tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    variables = {environment_variable(key): key for key in known_keys()}
    one_underscore = {name.replace("__", "_"): name for name in variables}
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        key = variables.get(name)
        if key is None:
            # Names without "__" may be anybody's: Kubernetes makes HYMCACHE_PORT and the like
            # for a service called hymcache. Those with it are meant for us, so a typo is told.
            meant = one_underscore.get(name)
            if meant is None and "__" not in name:
                continue
            near = f"did you mean {meant}?" if meant else _near(name, variables)
            raise ConfigError(f"{name}: unknown key; {near}")
        yield key, environ[name], name


def _from_settings(settings: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    keys = known_keys()
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"--set {setting}: write KEY=VALUE, e.g. device.capacity=10GiB")
        if key not in keys:
            raise ConfigError(f"--set {key}: unknown key; {_near(key, keys)}")
        yield key, text.strip(), "--set"


def _put(data: dict[str, Any], key: str, text: str) -> None:
    section, dot, name = key.rpartition(".")
    target = data.setdefault(section, {}) if dot else data
    # A section that is no table is told by the validation.
    if isinstance(target, dict):
        target[name] = text


def _validate(
    model: type[_Model], data: Mapping[str, Any], origin: str, origins: _Origins
) -> _Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = list(_faults(model, error, origin, origins))
    untold = len(lines) - _FAULTS_TOLD_MAX
    if untold > 0:
        lines[_FAULTS_TOLD_MAX:] = [f"{origin}: and {untold} more"]
    raise ConfigError("\n".join(lines))


def _faults(
    model: type[BaseModel], error: ValidationError, origin: str, origins: _Origins
) -> Iterator[str]:
    for fault in error.errors(include_url=False):
        # Its cause, the field that it depends on, is told on its own.
        if fault["type"] == "default_factory_not_called":
            continue
        path = [str(part) for part in fault["loc"]]
        # An item of a list: the key is the list's, and the value at fault the item.
        key = ".".join(part for part in path if not part.isdigit())
        where = origins.get(key, origin)
        if fault["type"] == "extra_forbidden":
            yield f"{where}: {key}: unknown key; {_near(key, _names(model))}"
        elif not key:
            yield f"{where}: {_reason(fault['type'], fault['msg'])}"
        else:
            shown = _shown(key, fault["input"])
            yield f"{where}: {key}{shown}: {_reason(fault['type'], fault['msg'])}"


def _reason(kind: str, message: str) -> str:
    if kind in _REASONS:
        return _REASONS[kind]
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    return message[:1].lower() + message[1:]


def _shown(key: str, value: object) -> str:
    # A fault of a whole section is told without its keys, as is one of a secret.
    if "secret" in key or isinstance(value, SecretStr | dict):
        return ""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > _SHOWN_VALUE_CHARS_MAX:
        text = text[: _SHOWN_VALUE_CHARS_MAX - 3] + "..."
    return f" = {text}"


def _names(model: type[BaseModel]) -> list[str]:
    """The keys of a model and its sections."""
    return [*model.model_fields, *(key for key in known_keys(model) if "." in key)]


def _near(name: str, known: Iterable[str]) -> str:
    """What a wrong name was probably meant to be, or all names that its section has."""
    known = list(known)
    section = name.rpartition(".")[0]
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if not close:
        # The right word in the wrong section: `capacity` in [node].
        word = name.rpartition(".")[2]
        close = [key for key in known if key.rpartition(".")[2] == word][:1]
    if close:
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(siblings or known)}"
