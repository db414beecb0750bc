from __future__ import annotations

import pytest

from hymcache.address import Address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7400", "127.0.0.1", 7400),
        ("node-3.example:0", "node-3.example", 0),
        ("[::1]:65535", "::1", 65535),
    ],
)
def test_an_address_reads_and_prints_the_same(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "write host:port"),
        ("localhost", "write host:port"),
        (":7400", "write host:port"),
        ("a b:1", "write host:port"),
        ("http://host:1", "IPv6 address goes in brackets"),
        ("::1:7400", "IPv6 address goes in brackets"),
        ("host:", "not a port"),
        ("host:65536", "not a port"),
        ("host:-1", "not a port"),
        ("host:http", "not a port"),
        ("host:²", "not a port"),  # a digit to str.isdigit(), not to int()
    ],
)
def test_what_is_no_address_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Address.parse(text)


def test_wildcards_are_told_apart() -> None:
    assert Address.parse("0.0.0.0:1").is_wildcard
    assert Address.parse("[::]:1").is_wildcard
    assert not Address.parse("127.0.0.1:1").is_wildcard
