"""A state of tensors and plain values in one file, whole or not there at all.

The format is that of safetensors. Its header has room for a text: a SHA-256 of
all that is saved, and what is no tensor, as JSON. Reading executes nothing.
"""

import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used: which, where and why."""


class DamagedError(CheckpointError):
    """The bytes of a file are not those of a checkpoint that was written."""


def write_state(path: Path, state: Any) -> None:
    """Write so that `path` is the new file or, if anything fails, as before.

    A state is a dense tensor, None, bool, int, float, str, or a list, tuple or
    dictionary of states. Raises `CheckpointError` for anything else, `OSError`
    or `SafetensorError` if writing fails.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_pack(state, "state", tensors))
    header = {"state": _digest(structure, tensors) + structure}
    with TemporaryDirectory(
        prefix=f"{path.name}.",
        suffix=".unfinished",
        dir=path.parent,
        ignore_cleanup_errors=True,
    ) as folder:
        unfinished = Path(folder) / path.name
        safetensors.torch.save_file(tensors, unfinished, header)
        _force_to_disk(unfinished)
        unfinished.replace(path)
    with contextlib.suppress(OSError):  # not every file system does that
        _force_to_disk(path.parent)


def read_state(path: Path) -> tuple[Any, str]:
    """The state in a file, and its SHA-256. The tensors are a map of the file.

    Raises `DamagedError` for a foreign file and for damage in any byte. What
    else goes wrong, such as `OSError` or too little memory, is no damage.
    """
    path.open("rb").close()  # says why not, as safetensors does not
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("state", "")
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise _damaged(path, str(error)) from error
    digest = text[:64]
    structure = text[64:]
    if digest != _digest(structure, tensors):
        raise _damaged(path, "its SHA-256 is another")
    unpack = functools.partial(_unpack, tensors)
    try:
        return json.loads(structure, object_hook=unpack), digest
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> DamagedError:
    return DamagedError(f"{path} is damaged or no checkpoint: {reason[:200]}")


def _digest(structure: str, tensors: dict[str, Tensor]) -> str:
    sha = hashlib.sha256(structure.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for a value. Copies of its tensors go into `tensors`, by name."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_pack(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        case tuple():
            return {"tuple": _pack(list(value), name, tensors)}
        case dict():
            keys = _pack(list(value), f"{name}, keys", tensors)
            values = [_pack(v, f"{name}.{k}", tensors) for k, v in value.items()]
            return {"dict": list(zip(keys, values, strict=True))}
        case Tensor(layout=torch.strided):
            while name in tensors:
                name += "'"
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": name}
    what = f"a {type(value).__name__}, not a dense tensor or plain value"
    raise CheckpointError(f"{name} cannot be saved: it is {what}")


def _unpack(tensors: dict[str, Tensor], packed: dict[str, Any]) -> Any:
    """What a JSON object stands for, when what is in it has been unpacked."""
    match packed:
        case {"tensor": name}:
            return tensors[name]
        case {"tuple": values}:
            return tuple(values)
        case {"dict": items}:
            return dict(items)
    raise ValueError("an unknown kind of value")
