"""The bytes of a region are those of docs/region-format.md, and what else is there is refused."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hymcache.chm_device.region import Region, RegionFormat
from hymcache.errors import ConfigError, Corrupt, DeviceError, Unavailable
from hymcache.lookup import object_key
from hymcache.lookup.namespace import Fingerprint
from hymcache.lookup.region_directory import RegionDirectory
from tests.chm_device.region_reader import RegionBytes, crc32c

FORM = RegionFormat(5000, {"model": "tiny", "block_size": 16}, 4, 9, 1.5)
SIZE = 4 << 20
KEY = object_key(Fingerprint(7), b"block")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "region"


def head(path: Path) -> RegionBytes:
    return RegionBytes(path.read_bytes())


def test_the_headers_are_as_written_down(path: Path) -> None:
    region = Region.open(path, FORM, size_bytes=SIZE)
    raw = path.read_bytes()
    assert raw[:8].hex() == "48594d4352474e01"
    # region_bytes, slot_bytes, data_offset; slots, config_bytes, lease_ms, participants, pins, ...
    assert raw[16:40].hex() == "000040000000000000200000000000000000200000000000"
    assert raw[40:60].hex() == "0001000020000000dc0500000400090020000000"
    assert raw[60:64].hex() == "5817bbbb"
    assert raw[64:96] == b'{"block_size":16,"model":"tiny"}'

    read = head(path)
    assert read.header_checksum == read.crc32c
    assert read.claim & 0xFFFF == 2
    assert read.claim >> 16 != 0
    assert region.geometry == {
        "version": 1,
        "region_bytes": SIZE,
        "slot_bytes": 8192,
        "slots": 256,
        "data_offset": 2 << 20,
        "participants": 4,
        "pins": 9,
        "lease_ms": 1500,
        "probe_slots": 32,
        "claim": read.claim,
    }
    # 192 bytes a participant: a header and 9 pins, to the next 64.
    assert read.words_at == 64 + 64 + 64 + 4 * 192
    assert set(raw[96 : 2 << 20]) == {0}


def test_an_object_is_as_written_down(path: Path) -> None:
    before_ms = int(time.time() * 1000)
    content = bytes(range(250)) * 20
    with RegionDirectory(Region.open(path, FORM, size_bytes=SIZE), name="me") as directory:
        directory.put([KEY], [content], name_space=7)
        with directory.pinned([KEY]):
            read = head(path)
    index = read.home(KEY)
    slot = read.slot(index)
    tag = int.from_bytes(KEY, "little") >> 64 & 0xFFF
    assert (slot.state, slot.referenced, slot.held) == (2, True, True)
    assert (slot.owner, slot.epoch, slot.tag, slot.generation) == (0, 1, tag, 1)
    assert (slot.key, slot.name_space, slot.length, slot.flags) == (KEY, 7, 5000, 1)
    assert before_ms <= slot.stored_at_ms <= time.time() * 1000
    assert slot.entry_reserved == bytes(16)
    assert slot.data[:5000] == content
    assert slot.crc32c == read.object_checksum(slot)
    state, epoch, beats, used, name = read.participant(0)
    assert (state, epoch, used, name) == (1, 1, 1, "me")
    assert beats >= 1
    assert read.pins_of(0) == [(index, 1)]
    # Everything else is as it was formatted.
    assert all(read.slot(i).generation == 0 for i in range(read.slots) if i != index)

    left = head(path)
    assert left.participant(0)[0] == 0
    assert left.pins_of(0) == []


def test_the_words_are_to_the_byte_as_written_down(path: Path) -> None:
    """Against literals, so that a mistake which reader and writer share is seen."""
    with RegionDirectory(Region.open(path, FORM, size_bytes=SIZE), name="me") as directory:
        directory.put([KEY], [b"abc"], name_space=0x0102030405060708)
        with directory.pinned([KEY]):
            raw = path.read_bytes()
    assert KEY.hex() == "ed9f2316f296e331436a33e420620ff2"
    slot, words, entries, participant = 49, 960, 960 + 8 * 256, 192
    # Valid, referenced, held, owner 0; epoch 1, tag; generation 1.
    assert raw[words + 8 * slot :][:8].hex() == "0e1030a401000000"
    entry = raw[entries + 64 * slot :][:64]
    assert entry[:40].hex() == (
        "ed9f2316f296e331436a33e420620ff2"  # key
        "0807060504030201"  # name_space
        "03000000" "72436002"  # length, crc32c
        "0100000000000000"  # flags
    )  # fmt: skip
    assert entry[48:] == bytes(16)
    record = raw[participant:][:192]
    assert record[:8].hex() == "0101000000000000"  # epoch 1, active
    assert record[16:24].hex() == "0100000000000000"  # pins_used
    assert record[24:64] == b"me" + bytes(38)
    assert record[64:72].hex() == "3200000001000000"  # slot + 1, generation
    assert record[72:] == bytes(120)
    # The neighbours of all these are as they were formatted.
    assert not any(raw[words : words + 8 * slot] + raw[words + 8 * slot + 8 : entries])


def test_a_slot_that_is_free_again_keeps_its_generation(path: Path) -> None:
    with RegionDirectory(Region.open(path, FORM, size_bytes=SIZE)) as directory:
        for generation in (1, 2):
            directory.put([KEY], [b"x"])
            directory.remove([KEY])
            slot = head(path).slot(head(path).home(KEY))
            assert slot.generation == generation
            assert (slot.state, slot.tag, slot.owner, slot.referenced) == (0, 0, 0, False)


def test_several_regions_lie_in_one_file(path: Path) -> None:
    path.write_bytes(bytes(2 * SIZE))
    first = Region.open(path, FORM, size_bytes=SIZE)
    second = Region.open(path, FORM, offset=SIZE)
    with RegionDirectory(first) as one, RegionDirectory(second) as two:
        one.put([KEY], [b"in the first"])
        assert one.leading_hits([KEY]) == 1
        assert two.leading_hits([KEY]) == 0
    with pytest.raises(ConfigError, match="offset 4096 is not a multiple of 2 MiB"):
        Region.attach(path, offset=4096)


def test_a_region_behind_the_end_of_a_file_lets_it_grow(path: Path) -> None:
    with RegionDirectory(Region.open(path, FORM, size_bytes=SIZE)) as directory:
        directory.put([KEY], [b"in the first"])
        assert Region.open(path, FORM, offset=SIZE, size_bytes=SIZE).formatted_here
        assert path.stat().st_size == 2 * SIZE
        assert directory.leading_hits([KEY]) == 1
    with pytest.raises(ConfigError, match="has 4194304 bytes, the region is to have 4194305"):
        Region.open(path, FORM, offset=SIZE, size_bytes=SIZE + 1)
    assert path.stat().st_size == 2 * SIZE


@pytest.mark.parametrize("force", [False, True])
def test_a_region_inside_another_is_refused(path: Path, force: bool) -> None:
    path.write_bytes(bytes(3 * SIZE))
    Region.open(path, FORM, size_bytes=SIZE)
    Region.open(path, FORM, offset=SIZE)  # all the rest
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"lies inside the region at {SIZE}, which ends at"):
        Region.open(path, FORM, offset=2 * SIZE, force=force)
    with pytest.raises(ConfigError, match="lies inside the region at 0, which ends at"):
        Region.open(path, FORM, offset=SIZE // 2, force=force)
    assert path.read_bytes() == before


def test_a_device_that_is_not_there_does_not_become_a_file() -> None:
    missing = Path("/dev/hymcache-no-such-dax")
    with pytest.raises(ConfigError, match="there is no such device, and no file is made"):
        Region.open(missing, FORM, size_bytes=SIZE)
    assert not missing.exists()


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    path = Path("/dev/shm", f"hymcache-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def more_than_all(path: Path) -> int:
    """The size of a region that no file system of that size can hold, without filling it."""
    status = os.statvfs(path.parent)
    assert status.f_blocks, "/dev/shm has no limit"
    return status.f_blocks * status.f_frsize + SIZE


@pytest.mark.parametrize("sparse", [False, True])
def test_a_file_system_without_room_is_told(shared_memory: Path, sparse: bool) -> None:
    wanted = more_than_all(shared_memory)
    if sparse:  # by somebody's truncate: touching it would be a SIGBUS one day
        with shared_memory.open("wb") as file:
            file.truncate(wanted)
    with pytest.raises(DeviceError, match=f"needs {wanted} bytes, the file system has .* free"):
        Region.open(shared_memory, FORM, size_bytes=wanted)
    assert shared_memory.stat().st_size == (wanted if sparse else 0)
    assert shared_memory.stat().st_blocks * 512 <= 4096  # nothing but what was looked at


def test_who_formats_takes_all_of_a_files_room(shared_memory: Path) -> None:
    Region.open(shared_memory, FORM, size_bytes=SIZE)
    assert shared_memory.stat().st_blocks * 512 == SIZE


def test_who_comes_second_attaches(path: Path) -> None:
    first = Region.open(path, FORM, size_bytes=SIZE)
    second = Region.open(path, FORM)
    assert (first.formatted_here, second.formatted_here) == (True, False)
    assert second.facts == FORM.facts
    assert Region.attach(path).geometry == first.geometry


def test_of_many_at_once_exactly_one_formats(path: Path) -> None:
    program = (
        "import sys; from hymcache.chm_device.region import Region, RegionFormat\n"
        "sys.stdin.readline()\n"
        "form = RegionFormat(5000, {'model': 'tiny', 'block_size': 16}, 4, 9, 1.5)\n"
        f"print(Region.open({str(path)!r}, form, size_bytes={SIZE}).formatted_here)"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    printed = [""] * len(racers)

    def finish(place: int) -> None:
        printed[place] = racers[place].communicate("\n", timeout=50)[0].strip()

    threads = [threading.Thread(target=finish, args=(place,)) for place in range(len(racers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(printed) == ["False", "False", "False", "True"]
    assert head(path).header_checksum == head(path).crc32c


def test_a_mismatch_names_both_sides(path: Path) -> None:
    Region.open(path, FORM, size_bytes=SIZE)
    other = RegionFormat(5000, {"model": "huge", "block_size": 16, "dtype": "bf16"})
    with pytest.raises(ConfigError) as refused:
        Region.open(path, other)
    assert (
        f"{path} was formatted for dtype=(none) model=tiny, this process has dtype=bf16 model=huge"
        in str(refused.value)
    )
    with pytest.raises(ConfigError, match="has slots of 8192 bytes, this process needs 9000"):
        Region.open(path, RegionFormat(9000, FORM.facts))


def test_another_version_is_refused_with_both_named(path: Path) -> None:
    Region.open(path, FORM, size_bytes=SIZE)
    with path.open("r+b") as file:
        file.seek(7)
        file.write(b"\x02")
    with pytest.raises(ConfigError, match="has region format 2, this is 1"):
        Region.open(path, FORM)


def test_what_is_not_a_region_is_never_formatted(path: Path) -> None:
    content = b"somebody's thesis" + bytes(SIZE)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="holds something that is not a region"):
        Region.open(path, FORM)
    assert path.read_bytes() == content
    assert Region.open(path, FORM, force=True).formatted_here


def test_a_damaged_header_is_told(path: Path) -> None:
    Region.open(path, FORM, size_bytes=SIZE)
    with path.open("r+b") as file:
        file.seek(50)
        file.write(b"\xff")
    with pytest.raises(Corrupt, match="its header is damaged"):
        Region.attach(path)


def test_a_blank_region_is_not_attached_to(path: Path) -> None:
    path.write_bytes(bytes(SIZE))
    with pytest.raises(ConfigError, match="is not formatted"):
        Region.attach(path)
    with pytest.raises(ConfigError, match="does not exist"):
        Region.attach(path.with_name("nowhere"))
    with pytest.raises(ConfigError, match="is empty: give the size"):
        Region.open(path.with_name("new"), FORM)
    with pytest.raises(ConfigError, match="have no room for a slot"):
        Region.open(path, RegionFormat(3 << 20, {}))


def test_a_claim_whose_owner_died_is_taken_over(path: Path) -> None:
    Region.open(path, FORM, size_bytes=SIZE)
    raw = bytearray(path.read_bytes())
    # In the middle of formatting: the magic is there, the claim says so, the rest is not.
    raw[8:16] = (0x1234 << 16 | 5 << 2 | 1).to_bytes(8, "little")
    raw[16:60] = bytes(44)
    path.write_bytes(raw)
    with pytest.raises(Unavailable, match="has begun to format it and does not end"):
        Region.attach(path, wait_s=0.1)
    began = time.monotonic()
    assert Region.open(path, FORM).formatted_here
    assert time.monotonic() - began >= 2
    assert head(path).header_checksum == head(path).crc32c


def test_who_formats_is_killed_and_another_takes_over(path: Path) -> None:
    size = 48 << 20
    form = RegionFormat(5000, {}, 256, 16_000, 1.5)  # 32 MiB in front of the data slots
    program = (
        "import sys; from hymcache.chm_device.region import Region, RegionFormat\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "form = RegionFormat(5000, {}, 256, 16_000, 1.5)\n"
        f"Region.open({str(path)!r}, form)"
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        path.write_bytes(bytes(size))
        with (
            path.open("r+b") as file,
            mmap.mmap(file.fileno(), 4096) as first_page,
            subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.stdin.write("\n")
            process.stdin.flush()
            while first_page[8] & 3 == 0 and process.poll() is None:
                pass
            process.kill()
            process.wait(30)
            if first_page[8] & 3 == 1:  # else it was faster than we
                break
    else:
        pytest.fail("it was never seen to format")
    assert Region.open(path, form, wait_s=30).formatted_here
    assert head(path).header_checksum == head(path).crc32c
    with RegionDirectory(Region.open(path, form)) as directory:
        directory.put([KEY], [b"kept"])
        assert directory.leading_hits([KEY]) == 1


@pytest.mark.parametrize("config", [b"no JSON", b'{"model":"\xff\xfe"}', b"[1]"])
def test_a_configuration_that_is_no_object_is_refused(path: Path, config: bytes) -> None:
    Region.open(path, FORM, size_bytes=SIZE)
    raw = bytearray(path.read_bytes())
    raw[44:48] = struct.pack("<I", len(config))
    raw[64:96] = config.ljust(32, b"\0")
    raw[60:64] = struct.pack("<I", crc32c(bytes(raw[:8] + raw[16:60] + config)))
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="its configuration is not a JSON object"):
        Region.open(path, FORM)


def test_a_region_formatted_anew_tells_those_that_are_attached(path: Path) -> None:
    directory = RegionDirectory(Region.open(path, FORM, size_bytes=SIZE))
    Region.open(path, FORM, force=True)
    with pytest.raises(Unavailable, match="was formatted anew; restart this process"):
        directory.lookup([KEY])
    directory.close()


def test_without_data_only_the_directory_is_mapped(path: Path) -> None:
    Region.open(path, FORM, size_bytes=SIZE)
    with (
        RegionDirectory(Region.open(path, FORM)) as worker,
        RegionDirectory(Region.open(path, FORM, map_data=False)) as scheduler,
    ):
        worker.put([KEY], [b"x" * 100])
        assert scheduler.leading_hits([KEY]) == 1
        with scheduler.pinned([KEY]) as pinned:
            assert [status.name for status in pinned] == ["OK"]
        with pytest.raises(ConfigError, match="the data slots are not mapped"):
            scheduler.get([KEY], [bytearray(100)])
        lines = Path("/proc/self/maps").read_text().splitlines()
        sizes = [
            int(line.split()[0].split("-")[1], 16) - int(line.split()[0].split("-")[0], 16)
            for line in lines
            if line.endswith(str(path))
        ]
        # The worker's maps all, the scheduler's what lies in front of the data slots.
        assert sorted(sizes) == [2 << 20, SIZE]


def test_a_durable_file_is_written_and_prefault_touches_all(path: Path) -> None:
    region = Region.open(path, FORM, size_bytes=SIZE, durable=True, prefault=True)
    assert region.core.prefault() == SIZE
    with RegionDirectory(region) as directory:
        directory.put([KEY], [b"kept"])
    assert path.stat().st_blocks * 512 >= SIZE
