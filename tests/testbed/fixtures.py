"""pytest's side of the testbed: `@pytest.mark.testbed("rxe")` and the fixture `testbed`.

The guests of a profile boot for the first test that asks for it and end after the last: tests in
guests come last, one profile after the other.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Generator, Iterator
from typing import NoReturn

import pytest

from tests.testbed.guest_image import GuestImage, cache_folder
from tests.testbed.host_packages import reason_not_to_run
from tests.testbed.profile import PROFILES
from tests.testbed.testbed import Testbed

# Of one test with the boot that it may have to wait for, unless it says otherwise.
_TIMEOUT_S = 420


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-testbed",
        action="store_true",
        help="fail instead of skipping where guests cannot run (as wherever CI is set)",
    )
    parser.addoption(
        "--profile",
        action="append",
        choices=list(PROFILES),
        help="run, of the tests in guests, those with this profile; may be given more than once",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "booted_testbed" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("testbed")
    if marker is None or not marker.args or not set(marker.args) <= PROFILES.keys():
        raise pytest.UsageError(
            f'{metafunc.definition.nodeid}: add @pytest.mark.testbed("PROFILE"), '
            f"with one or more of {', '.join(PROFILES)}"
        )
    metafunc.parametrize("booted_testbed", marker.args, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    profiles = config.getoption("--profile")
    if profiles:
        left_out = [item for item in items if (_profile(item) or profiles[0]) not in profiles]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        in_guest = item.get_closest_marker("testbed") is not None
        if in_guest and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
    items.sort(key=_order)


def _profile(item: pytest.Item) -> str:
    """Of a test in guests, be they shared or its own; empty for others."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "booted_testbed" in callspec.params:
        return str(callspec.params["booted_testbed"])
    marker = item.get_closest_marker("testbed")
    return "" if marker is None else str(marker.args[0])


def _order(item: pytest.Item) -> tuple[bool, str]:
    return item.get_closest_marker("testbed") is not None, _profile(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    testbed = getattr(item, "funcargs", {}).get("booted_testbed")
    if report.failed and isinstance(testbed, Testbed):
        report.sections.append(("guests", testbed.account()))
    return report


def _leave_out(config: pytest.Config, reason: str) -> NoReturn:
    if config.getoption("--require-testbed") or os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def guest_image(request: pytest.FixtureRequest) -> GuestImage:
    """What guests boot from; skips, or fails where it has to run, if packages are missing."""
    reason = reason_not_to_run(cache_folder())
    if reason is not None:
        _leave_out(request.config, reason)
    return GuestImage.cached(cache_folder())


@pytest.fixture(scope="session")
def booted_testbed(
    request: pytest.FixtureRequest,
    guest_image: GuestImage,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Testbed]:
    """The guests that the tests of one profile share; tests ask for `testbed`."""
    profile = PROFILES[request.param]
    for module in profile.python_modules:
        if importlib.util.find_spec(module) is None:
            version = ".".join(map(str, sys.version_info[:2]))
            _leave_out(request.config, f"no {module} for Python {version}: see docs/testbed.md")
    # Guests take the C++ as it is; this brings it up to date.
    import hymcache._core  # noqa: F401  # for its effect

    folder = tmp_path_factory.mktemp(f"testbed-{profile.name}") / "guests"
    with Testbed(profile, folder, guest_image) as testbed:
        yield testbed


@pytest.fixture
def testbed(booted_testbed: Testbed) -> Iterator[Testbed]:
    """Two guests that run and answer, with the devices of their profile.

    Commands that still run in the end are killed. What else a test changes in a guest (files,
    modules, devices) stays for the next: a test that cannot undo it kills the guest, which
    is then started anew.
    """
    booted_testbed.ensure_ready()
    yield booted_testbed
    booted_testbed.end_commands()
