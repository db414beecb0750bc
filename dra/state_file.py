"""A small JSON document on disk that several processes may change: state that outlives them.

A change is made under an exclusive flock of `<path>.lock` and replaces the file as a whole
(temporary file, fsync, rename, fsync of the directory): whoever reads sees the old document or
the new one, also after a crash. Reading takes no lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from hymcache.errors import ConfigError, Corrupt, DeviceError, Unavailable

_LOCK_TIMEOUT_S: Final = 10.0
# Thousands of allocations fit; a file larger than that is not one of ours.
_FILE_BYTES_MAX: Final = 16 << 20
# What the system says where the folder is not one of ours.
_WRONG_PLACE: Final = (PermissionError, FileNotFoundError, NotADirectoryError, FileExistsError)


class StateDocument(BaseModel):
    """What a state file holds: a model with defaults for all fields, which stand for "no file".

    `version` is that of the document's layout. Unknown keys of the same version are refused:
    to ignore what a newer program wrote would lose it with the next change.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    version: int = 1


_Document = TypeVar("_Document", bound=StateDocument)


class StateFile(Generic[_Document]):
    """The document of one file. The folder is made when it is first written."""

    def __init__(
        self, path: Path, model: type[_Document], *, lock_timeout_s: float = _LOCK_TIMEOUT_S
    ) -> None:
        self._path = path
        self._model = model
        self._lock_timeout_s = lock_timeout_s
        # The file's bytes after the last change, and the document that they are.
        self._kept: tuple[bytes | None, _Document] | None = None

    @property
    def path(self) -> Path:
        """Where the document lies."""
        return self._path

    def load(self) -> _Document:
        """The document as of the last change; the model's defaults where there is no file.

        Raises Corrupt when it cannot be read as one of this version.
        """
        return self._parse(self._read())

    @contextmanager
    def change(self) -> Iterator[_Document]:
        """The document, to be changed in place; written when the block ends without an error.

        Raises Unavailable when another process keeps the lock for longer than the time-out,
        ConfigError where the file cannot be written.
        """
        with locked(self._path.with_name(self._path.name + ".lock"), self._lock_timeout_s):
            before = self._read()
            # To parse what this object wrote itself would be most of the work of a change.
            kept, self._kept = self._kept, None
            document = kept[1] if kept and kept[0] == before else self._parse(before)
            yield document
            after = document.model_dump_json(indent=1).encode() + b"\n"
            if after != before and (before is not None or document != self._model()):
                write_atomically(self._path, after)
                self._kept = (after, document)
            else:
                self._kept = (before, document)

    def _read(self) -> bytes | None:
        try:
            with self._path.open("rb") as file:
                return file.read(_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _refused(self._path, "read", error) from error

    def _parse(self, raw: bytes | None) -> _Document:
        if raw is None:
            return self._model()
        if len(raw) > _FILE_BYTES_MAX:
            raise Corrupt(f"{self._path}: larger than {_FILE_BYTES_MAX} bytes; not a state file")
        try:
            data: Any = json.loads(raw)
        except ValueError as error:
            raise Corrupt(f"{self._path}: not JSON ({error}); restore or remove it") from error
        known = self._model.model_fields["version"].default
        version = data.get("version") if isinstance(data, dict) else None
        if version != known:
            raise Corrupt(
                f"{self._path}: has the layout version {version}, this program writes {known}; "
                "run the version that wrote it, or remove the file"
            )
        try:
            return self._model.model_validate(data)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in fault["loc"])
            raise Corrupt(
                f"{self._path}: {where}: {fault['msg']}; restore or remove the file"
            ) from error


def write_atomically(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replaces a file as a whole: afterwards, a crash included, it is the old or the new one.

    Raises ConfigError where it cannot be written.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name that neither container runtimes nor readers of state take for one of theirs.
        descriptor, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
        )
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        Path(temporary).replace(path)
        temporary = None
        sync_folder(path.parent)
    except OSError as error:
        raise _refused(path, "write", error) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def remove_durably(path: Path) -> bool:
    """Removes a file; whether there was one. Afterwards a crash does not bring it back."""
    try:
        path.unlink()
        sync_folder(path.parent)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _refused(path, "remove", error) from error
    return True


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
    """Holds an exclusive flock of a file, against other processes and other threads.

    Raises Unavailable when it is not to be had within the time-out. The file is never removed:
    whoever waits for the lock of a removed file would hold another lock than the next.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refused(path, "open", error) from error
    if not _flock(descriptor, timeout_s):
        raise Unavailable(
            f"{path}: another process has held the lock for {timeout_s:g} s; "
            "is it stuck? end it, or try again"
        )
    try:
        yield
    finally:
        os.close(descriptor)


def _flock(descriptor: int, timeout_s: float) -> bool:
    """Whether the lock was had in time; the descriptor is closed where it was not."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _WaitingFlock(descriptor).wait(timeout_s)
    return True


class _WaitingFlock:
    """flock(2) knows no time-out: a thread waits, and gives the lock back if it comes too late."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._decision = threading.Lock()
        self._is_held = False
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="flock", daemon=True)

    def wait(self, timeout_s: float) -> bool:
        self._thread.start()
        self._thread.join(timeout_s)
        with self._decision:
            self._is_given_up = not self._is_held
            return self._is_held

    def _run(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        with self._decision:
            if self._is_given_up:
                os.close(self._descriptor)
            else:
                self._is_held = True


def _refused(path: Path, verb: str, error: OSError) -> ConfigError | DeviceError:
    reason = error.strerror or str(error)
    if isinstance(error, _WRONG_PLACE):
        return ConfigError(f"{path}: cannot {verb} it ({reason}); name a folder of this process")
    return DeviceError(f"{path}: cannot {verb} it ({reason})", error.errno or 0)
