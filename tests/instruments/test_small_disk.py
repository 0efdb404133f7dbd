import os
import sys

import pytest

from instruments.small_disk import SmallDisk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts are Linux's")


@pytest.fixture
def disk(tmp_path):
    with SmallDisk(tmp_path) as disk:
        yield disk


def write(folder, num_bytes):
    (folder / "file").write_bytes(bytes(num_bytes))


def test_a_full_disk_takes_no_more_until_there_is_room(disk):
    if not disk.is_mounted:
        pytest.skip("this process may not mount a disk")
    disk.fill(room=100_000)
    with pytest.raises(OSError, match="No space left"):
        write(disk.folder, 200_000)
    disk.free()
    write(disk.folder, 200_000)


def test_who_may_not_write_can_again_when_it_is_allowed(disk):
    if not disk.is_mounted and os.geteuid() == 0:
        pytest.skip("root may write everywhere but on a read-only disk")
    write(disk.folder, 10)
    disk.forbid()
    with pytest.raises(OSError, match=r"Read-only|Permission denied"):
        (disk.folder / "other").touch()
    disk.allow()
    (disk.folder / "other").touch()


def test_nothing_is_left_of_it(tmp_path):
    with SmallDisk(tmp_path) as disk:
        was_mounted = disk.is_mounted
        write(tmp_path, 10)
        disk.forbid()
    assert not os.path.ismount(tmp_path)
    assert (tmp_path / "file").exists() != was_mounted
    (tmp_path / "other").touch()
