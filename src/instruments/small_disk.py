"""A small disk at a folder, which can be filled, and be forbidden to write to."""

import subprocess
from pathlib import Path
from types import TracebackType

SIZE = 64 * 2**20


class SmallDisk:
    """A tmpfs of 64 MiB while it is entered, if this process may mount one.

    `is_mounted` says whether it may. Otherwise the folder stays on the disk that it is
    on: `forbid` then takes its permissions, and `fill` does nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_mounted = False
        self.is_covered = False

    def __enter__(self) -> "SmallDisk":
        self.is_mounted = self._mount("-t", "tmpfs", "-o", f"size={SIZE}", "none")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.allow()
        if self.is_mounted:
            self._unmount()

    def fill(self, room: int) -> None:
        """Leave so many bytes in all; no less than what is written already."""
        if self.is_mounted:
            self._mount("-o", f"remount,size={room}")

    def free(self) -> None:
        if self.is_mounted:
            self._mount("-o", f"remount,size={SIZE}")

    def forbid(self) -> None:
        """Let nobody write, who has no file open to write.

        By a mount over it: the disk itself is busy while somebody has such a file.
        """
        if self.is_mounted:
            self.is_covered = self._mount("--bind", str(self.folder))
            self._mount("-o", "remount,bind,ro")
        else:
            self.folder.chmod(0o555)

    def allow(self) -> None:
        if self.is_covered:
            self._unmount()
            self.is_covered = False
        elif not self.is_mounted:
            self.folder.chmod(0o755)

    def _mount(self, *options: str) -> bool:
        mounted = subprocess.run(["mount", *options, self.folder], capture_output=True)
        return mounted.returncode == 0

    def _unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=True)
