"""Worlds for the tests of the whole driver. Tests share them: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dra.system.world import World, real_cluster


class Worlds:
    """One of each sort. A test that leaves something behind spoils its world: it is replaced."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._worlds: dict[tuple[str, int], World] = {}

    def get(self, dialect: str, minor: int = 36) -> World:
        """A world in which nothing has happened, or nothing is left of it."""
        key = (dialect, minor)
        if key not in self._worlds:
            self.make_way()
            folder: Path = self._folders.mktemp(f"{dialect}-1.{minor}-")
            self._worlds[key] = World(folder, dialect=dialect, minor=minor)
        return self._worlds[key]

    def make_way(self) -> None:
        """Before another world is made: in a real cluster there is room for one."""
        if real_cluster():
            self.close()

    def give_back(self, world: World) -> None:
        """Ends what the test started."""
        world.stop_controllers()
        if not world.is_pristine():
            self._worlds.pop((world.dialect, world.minor), None)
            world.close()

    def close(self) -> None:
        while self._worlds:
            self._worlds.popitem()[1].close()


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made = Worlds(tmp_path_factory)
    yield made
    made.close()


@pytest.fixture(params=["paper", "public"])
def dialect(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def world(worlds: Worlds, dialect: str) -> Iterator[World]:
    """A world in each dialect, without a controller yet."""
    made = worlds.get(dialect)
    yield made
    worlds.give_back(made)


@pytest.fixture
def paper_world(worlds: Worlds) -> Iterator[World]:
    """A world whose fabric manager speaks the paper's dialect."""
    made = worlds.get("paper")
    yield made
    worlds.give_back(made)


@pytest.fixture
def public_world(worlds: Worlds) -> Iterator[World]:
    """A world whose fabric manager speaks the public dialect."""
    made = worlds.get("public")
    yield made
    worlds.give_back(made)


@pytest.fixture
def old_world(worlds: Worlds) -> Iterator[World]:
    """Kubernetes 1.34: neither consumable capacity nor binding conditions nor taints."""
    if real_cluster():
        pytest.skip("needs Kubernetes 1.34")
    made = worlds.get("paper", 34)
    yield made
    worlds.give_back(made)


@pytest.fixture
def two_blades(worlds: Worlds, tmp_path: Path) -> Iterator[World]:
    """A world with the blades blade-0 and blade-1."""
    worlds.make_way()
    with World(tmp_path, blades=2) as made:
        yield made


@pytest.fixture
def own_world(worlds: Worlds, tmp_path: Path) -> Iterator[World]:
    """A world for a test that leaves it broken."""
    worlds.make_way()
    with World(tmp_path) as made:
        yield made
