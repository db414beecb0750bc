from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from hymcache.address import Address
from hymcache.config import ClientConfig, Config
from hymcache.config_reference import configuration_toml, reference_markdown
from hymcache.config_source import (
    environment_variable,
    known_keys,
    load_config,
    parse_section,
)
from hymcache.errors import ConfigError

ROOT = Path(__file__).parents[2]


def faults(tmp_path: Path, text: str) -> list[str]:
    """The lines that a file with this text is refused with, without the file's name."""
    path = tmp_path / "hymcache.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def test_without_a_file_there_are_defaults() -> None:
    config = load_config(environ={})
    assert config.master.listen == Address("127.0.0.1", 7400)
    assert config.client.deadline_s == 10.0
    assert config.device.capacity == 10 << 30
    assert config.secret_bytes() == b""


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hymcache.toml"
    path.write_text("""
        [master]
        http = ""
        lease_ms = "5s"
        [node]
        name = "n1"
        listen = "0.0.0.0:9000"
        advertise = "n1.example"
        masters = ["m1:7400", "[::1]:7400"]
        [device]
        capacity = "2GiB"
        preallocate = false
        [client]
        deadline_s = "250ms"
    """)
    config = load_config(path, environ={})
    assert config.master.http is None
    assert config.master.lease_ms == 5000
    assert config.node.masters == (Address("m1", 7400), Address("::1", 7400))
    assert config.node.advertise == "n1.example"
    assert config.node.unix.name == "node-9000.sock"
    assert config.device.capacity == 2 << 30
    assert not config.device.preallocate
    assert config.client.deadline_s == 0.25


def test_the_configuration_cannot_be_changed() -> None:
    config = load_config(environ={})
    with pytest.raises(ValidationError):
        config.node.name = "other"


def test_a_wildcard_is_not_advertised() -> None:
    config = load_config(environ={}, settings=["node.listen=0.0.0.0:7410"])
    assert config.node.advertise not in {"0.0.0.0", ""}


def test_the_environment_wins_over_the_file_and_set_over_both(tmp_path: Path) -> None:
    path = tmp_path / "hymcache.toml"
    path.write_text('[device]\ncapacity = "1GiB"\nio_depth = 2\n[node]\nname = "file"\n')
    environ = {
        "HYMCACHE_CONFIG": str(path),
        "HYMCACHE_DEVICE__IO_DEPTH": "3",
        "HYMCACHE_NODE__NAME": "environment",
        "HYMCACHE_NODE__MASTERS": "a:1,b:2",
    }
    config = load_config(environ=environ, settings=["node.name=set"])
    assert config.device.capacity == 1 << 30
    assert config.device.io_depth == 3
    assert config.node.name == "set"
    assert config.node.masters == (Address("a", 1), Address("b", 2))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[node]\nlistn = "a:1"', "node.listn: unknown key; did you mean node.listen?"),
        ("[node]\ncapacity = 1", "node.capacity: unknown key; did you mean device.capacity?"),
        ("[nodes]\nname = 1", "nodes: unknown key; did you mean node?"),
        (
            '[device]\ncapacity = "ten"',
            'device.capacity = "ten": not a size; write bytes or a number with a unit, '
            'e.g. "10GiB" or "500MB"',
        ),
        (
            '[device]\nio = "uring"',
            "device.io = \"uring\": should be 'auto', 'io_uring' or 'threads'",
        ),
        (
            "[device]\nio_depth = 0",
            "device.io_depth = 0: should be greater than or equal to 1",
        ),
        ('[device]\nio_depth = "x"', 'device.io_depth = "x": should be a whole number'),
        (
            '[device]\npreallocate = "no way"',
            'device.preallocate = "no way": should be true or false',
        ),
        (
            '[node]\nmasters = ["a:1", "b"]',
            'node.masters = "b": not an address; write host:port, e.g. "127.0.0.1:7400"',
        ),
        ("[client]\nmasters = []", "client.masters = []: should name at least one"),
        (
            '[client]\nmasters = ["0.0.0.0:7400"]',
            'client.masters = "0.0.0.0:7400": not an address to connect to; '
            "write the host and port of the master",
        ),
        (
            '[device]\ncapacity = "1GiB"\nwrite_buffer = "2GiB"',
            "device: write_buffer (2GiB) is larger than capacity (1GiB); make it smaller",
        ),
        ("node = 3", "node = 3: should be a table of keys"),
        (
            'secret = "a"\nsecret_file = "b"',
            "secret and secret_file are both set; remove one of them",
        ),
    ],
)
def test_a_fault_is_one_line_that_names_the_key_and_the_fix(
    tmp_path: Path, text: str, line: str
) -> None:
    assert faults(tmp_path, text) == [line]


def test_each_of_several_faults_has_its_line(tmp_path: Path) -> None:
    lines = faults(tmp_path, '[node]\nlisten = "x"\n[device]\nio_depth = 0\n')
    assert [line.split()[0] for line in lines] == ["node.listen", "device.io_depth"]


def test_a_flood_of_faults_is_cut(tmp_path: Path) -> None:
    lines = faults(tmp_path, "\n".join(f"k{i} = 1" for i in range(100)))
    assert len(lines) == 9
    assert lines[-1] == "and 92 more"


def test_what_is_no_toml_is_told(tmp_path: Path) -> None:
    (line,) = faults(tmp_path, "[node\n")
    assert line.startswith("not valid TOML: ")
    assert "line 1" in line


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*name a readable TOML file"):
        load_config(tmp_path / "absent.toml", environ={})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path, environ={})


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("HYMCACHE_NODE__LISTN", "unknown key; did you mean HYMCACHE_NODE__LISTEN?"),
        ("HYMCACHE_NODE_LISTEN", "unknown key; did you mean HYMCACHE_NODE__LISTEN?"),
        (
            "HYMCACHE_NODE__LISTEN",
            'node.listen = "7": not an address; write host:port, e.g. "127.0.0.1:7400"',
        ),
    ],
)
def test_a_fault_in_the_environment_names_the_variable(name: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={name: "7"})
    assert str(caught.value) == f"{name}: {line}"


def test_variables_that_kubernetes_makes_for_a_service_are_let_be() -> None:
    load_config(environ={"HYMCACHE_PORT": "tcp://10.0.0.1:7400", "HYMCACHE_SERVICE_HOST": "x"})


@pytest.mark.parametrize("setting", ["node.nam=x", "node.name", "=x"])
def test_a_wrong_set_is_told(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set "):
        load_config(environ={}, settings=[setting])


def test_every_key_has_a_variable_of_its_own() -> None:
    variables = [environment_variable(key) for key in known_keys()]
    assert len(set(variables)) == len(variables)
    assert "HYMCACHE_CLIENT__DEADLINE_S" in variables


def test_a_section_can_come_from_elsewhere() -> None:
    client = parse_section(ClientConfig, {"masters": "m:7400", "deadline_s": 2}, "extra")
    assert client.masters == (Address("m", 7400),)
    with pytest.raises(ConfigError, match=r"^extra: transprt: unknown key; did you mean transport"):
        parse_section(ClientConfig, {"transprt": "tcp"}, "extra")


def test_a_secret_comes_from_its_file_and_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"hunter2\n")
    by_file = load_config(environ={"HYMCACHE_SECRET_FILE": str(file)})
    by_value = load_config(environ={"HYMCACHE_SECRET": "hunter2"})
    for config in (by_file, by_value):
        assert config.secret_bytes() == b"hunter2"
        assert "hunter2" not in repr(config) + str(config) + configuration_toml(config)


def test_a_wrong_secret_is_told_without_it(tmp_path: Path) -> None:
    assert faults(tmp_path, "secret = 12345678") == ["secret: should be a valid string"]
    with pytest.raises(ConfigError, match="1 to 1024 bytes"):
        load_config(environ={"HYMCACHE_SECRET": "x" * 1025}).secret_bytes()
    with pytest.raises(ConfigError, match=r"secret_file = .*No such file"):
        load_config(environ={"HYMCACHE_SECRET_FILE": str(tmp_path / "absent")}).secret_bytes()


def test_the_printed_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(
        environ={}, settings=["master.http=", 'node.advertise=a"\\b', "client.deadline_s=0.5"]
    )
    path = tmp_path / "printed.toml"
    path.write_text(configuration_toml(config))
    assert tomllib.loads(path.read_text())["master"]["http"] == ""
    assert load_config(path, environ={}) == config


def test_the_reference_in_docs_is_current() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == reference_markdown(), "run: make docs"


def test_the_reference_does_not_depend_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference_markdown()
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    assert reference_markdown() == before


def test_every_key_is_described() -> None:
    text = reference_markdown()
    assert all(f"`{environment_variable(key)}`" in text for key in known_keys(Config))
