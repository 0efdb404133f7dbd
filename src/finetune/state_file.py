"""A state of tensors and plain values in one file, whole or not there at all.

The format is that of safetensors. Its header has room for a text: a SHA-256 of
all that is saved, and what is no tensor, as JSON. Reading executes nothing.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DAMAGE = (LookupError, RuntimeError, TypeError, ValueError, SafetensorError)


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used: which, where and why."""


def write_state(path: Path, state: Any) -> None:
    """Write so that `path` is the new file or, if anything fails, as before.

    A state is a dense tensor, None, bool, int, float, str, or a list, tuple or
    dictionary of states. Raises `CheckpointError` for anything else, `OSError`
    or `SafetensorError` if writing fails.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_pack(state, "state", tensors))
    header = {"state": _digest(structure, tensors) + structure}
    own = f"{path.name}.", path.parent, True  # a folder of no other process
    with TemporaryDirectory(".unfinished", *own) as folder:
        unfinished = Path(folder) / path.name
        safetensors.torch.save_file(tensors, unfinished, header)
        _force_to_disk(unfinished)
        unfinished.replace(path)
    with contextlib.suppress(OSError):  # not every file system does that
        _force_to_disk(path.parent)


def read_state(path: Path) -> tuple[Any, str]:
    """The state in a file, on the CPU, and its SHA-256.

    Raises `CheckpointError` if it is missing, foreign or damaged in any byte.
    """
    try:
        path.open("rb").close()  # says why not, as safetensors does not
        with safe_open(path, "pt") as file:
            names, text = file.keys(), file.metadata()["state"]
            tensors = {name: file.get_tensor(name).clone() for name in names}
        digest, structure = text[:64], text[64:]
        if digest != _digest(structure, tensors):
            raise ValueError("its SHA-256 is another")
        build = functools.partial(_unpack, tensors)
        return json.loads(structure, object_hook=build), digest
    except OSError as error:
        reason = f"cannot read {path}: {error.strerror}"
        raise CheckpointError(reason) from error
    except DAMAGE as error:
        reason = f"{path} is damaged or no checkpoint: {str(error)[:200]}"
        raise CheckpointError(reason) from error


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
        case list() | tuple():
            numbered = enumerate(value)
            parts = [_pack(v, f"{name}.{i}", tensors) for i, v in numbered]
            return parts if isinstance(value, list) else {"tuple": parts}
        case dict():
            keys = _pack(list(value), f"{name}, keys", tensors)
            items = value.items()
            parts = [_pack(v, f"{name}.{k}", tensors) for k, v in items]
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: list(zip(keys, parts, strict=True))}
        case Tensor(layout=torch.strided):
            while name in tensors:
                name += "'"
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": name}
    what = f"a {type(value).__name__}, not a dense tensor or plain value"
    raise CheckpointError(f"{name} cannot be saved: it is {what}")


def _unpack(tensors: dict[str, Tensor], part: dict[str, Any]) -> Any:
    """What a JSON object stands for, when its parts have been unpacked."""
    match part:
        case {"tensor": name}:
            return tensors[name]
        case {"tuple": parts}:
            return tuple(parts)
        case {"dict": items}:
            return dict(items)
        case {"counter": items}:
            return Counter(dict(items))
    raise ValueError("an unknown kind of value")
