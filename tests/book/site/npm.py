"""Packages of npm that the browser tests use, installed into .venv."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

VENV = Path(__file__).resolve().parents[3] / ".venv"


class UnavailableError(Exception):
    """Why something cannot run here."""


def install(name: str, version: str) -> Path:
    """The folder that holds `node_modules` with the package."""
    folder = VENV / name
    if (folder / "node_modules" / name).is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError("npm is not on PATH")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = f"{name}@{version}"
    command = [npm, "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", wanted]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"npm did not install {wanted} within 60 s") from None
    if done.returncode != 0:
        raise UnavailableError(f"npm could not install {wanted}: {done.stderr.strip()[-200:]}")
    return folder
