from __future__ import annotations

from pathlib import Path

import pytest

from hymcache import limits
from hymcache.connector.settings import read_settings
from hymcache.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HYMCACHE_CONFIG", "HYMCACHE_CLIENT__DEADLINE_S"):
        monkeypatch.delenv(name, raising=False)


def test_the_master_is_enough() -> None:
    settings = read_settings({"master": "storage-1:7400"})
    assert settings.master_addresses() == ("storage-1:7400",)
    assert settings.deadline_s == limits.LOAD_DEADLINE_S
    assert settings.staging_bytes == limits.STAGING_BUFFER_BYTES
    assert settings.transport == "auto"
    assert settings.verify_checksums
    assert settings.secret_bytes() == b""


@pytest.mark.parametrize("master", ["a:1,b:2", ["a:1", "b:2"]])
def test_several_masters(master: object) -> None:
    assert read_settings({"master": master}).master_addresses() == ("a:1", "b:2")


def test_sizes_and_durations_are_read_as_people_write_them() -> None:
    settings = read_settings({"master": "a:1", "staging_bytes": "2GiB", "deadline_s": "500ms"})
    assert settings.staging_bytes == 2 << 30
    assert settings.deadline_s == 0.5


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ({"mastr": "a:1"}, "kv_connector_extra_config: mastr: unknown key; did you mean master?"),
        ({"stagingbytes": 1}, "did you mean staging_bytes?"),
        ({"master": "storage"}, 'master = "storage": not an address; write host:port'),
        ({"master": "0.0.0.0:7400"}, "not an address to connect to"),
        ({"master": 7400}, "master = 7400: not an address"),
        ({"master": []}, "master = []"),
        ({"staging_bytes": "1KiB"}, "staging_bytes"),
        ({"deadline_s": 0}, "deadline_s = 0"),
        ({"load_threads": 0}, "load_threads = 0"),
        ({"transport": "rdma"}, "transport"),
        ({"config": 3}, "config = 3: should be the path of a TOML file"),
        ({"config": "/nonexistent/h.toml"}, "/nonexistent/h.toml: No such file or directory"),
        ({"secret_file": "/nonexistent/s"}, "/nonexistent/s: No such file or directory"),
    ],
)
def test_a_wrong_value_is_told_in_one_line(extra: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"master": "a:1", **extra})
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_given_to_the_engine_wins_over_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "h.toml"
    file.write_text(
        'secret = "hush"\n[client]\nmasters = ["f:1"]\ndeadline_s = "1s"\ntransport = "tcp"\n'
    )
    monkeypatch.setenv("HYMCACHE_CLIENT__DEADLINE_S", "2s")
    settings = read_settings({"config": str(file), "transport": "shm"})
    assert settings.master_addresses() == ("f:1",)
    assert settings.deadline_s == 2.0
    assert settings.transport == "shm"
    assert settings.secret_bytes() == b"hush"


def test_the_secret_comes_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hush\n")
    assert read_settings({"master": "a:1", "secret_file": str(file)}).secret_bytes() == b"hush"
