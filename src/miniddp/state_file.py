"""A state of tensors and plain values in one file, whole or not there at all.

The format is that of safetensors. Its header has room for a text: the SHA-256
of the file, with zeros in the place of itself, and what is no tensor, as JSON.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, is_complex

NO_DIGEST = b"0" * 64
DAMAGE = (LookupError, RuntimeError, TypeError, ValueError, SafetensorError)


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used: which, where and why."""


def write_state(path: Path, state: Any) -> None:
    """Write so that `path` is the new file or, if anything fails, as before.

    A state is a tensor, None, bool, int, float, str, or a list, tuple or
    dictionary of states. Raises `CheckpointError` for anything else, `OSError`
    if writing fails.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_encode(state, "state", tensors))
    header = {"state": NO_DIGEST.decode() + structure}
    data = safetensors.torch.save(tensors, header)
    digest = hashlib.sha256(data).hexdigest().encode()
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(data.replace(NO_DIGEST, digest, 1))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    names = os.open(path.parent, os.O_RDONLY)  # the new name, to the disk too
    os.fsync(names)
    os.close(names)


def read_state(path: Path) -> tuple[Any, str]:
    """The state in a file, on the CPU, and the file's digest.

    Raises `CheckpointError` if it is missing, foreign or damaged in any byte.
    """
    try:
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        text = header["__metadata__"]["state"]
        digest, structure = text[:64], text[64:]
        blank = data.replace(digest.encode(), NO_DIGEST, 1)
        if hashlib.sha256(blank).hexdigest() == digest:
            tensors = safetensors.torch.load(data)
            return _decode(json.loads(structure), tensors), digest
        raise CheckpointError(f"{path} is damaged: its SHA-256 is another")
    except CheckpointError:
        raise
    except OSError as error:
        reason = f"cannot read {path}: {error.strerror}"
        raise CheckpointError(reason) from error
    except DAMAGE as error:
        raise CheckpointError(f"{path} is no checkpoint, or cut") from error


def on_cpu(state: Any) -> Any:
    """A copy to send: a GPU's tensors would be rebuilt on that GPU."""
    tensors: dict[str, Tensor] = {}
    return _decode(_encode(state, "state", tensors), tensors)


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for a value. Copies of its tensors go into `tensors`, by name."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            numbered = enumerate(value)
            return [_encode(v, f"{name}.{i}", tensors) for i, v in numbered]
        case tuple():
            return {"tuple": _encode(list(value), name, tensors)}
        case dict():
            keys = _encode(list(value), f"{name}, keys", tensors)
            items = value.items()
            parts = [_encode(v, f"{name}.{k}", tensors) for k, v in items]
            return {"keys": keys, "values": parts}
        case Tensor(layout=torch.strided, is_meta=False) if not is_complex(
            value
        ):
            while name in tensors:
                name += "'"
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": name}
    kind = type(value).__name__
    if isinstance(value, Tensor):
        kind += f" of {value.layout}, {value.dtype}, on {value.device}"
    raise CheckpointError(f"{name} cannot be saved: it is a {kind}")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    match value:
        case list():
            return [_decode(part, tensors) for part in value]
        case {"tuple": parts}:
            return tuple(_decode(parts, tensors))
        case {"keys": keys, "values": parts}:
            pairs = zip(_decode(keys, tensors), parts, strict=True)
            return {key: _decode(part, tensors) for key, part in pairs}
        case {"tensor": name}:
            return tensors[name]
    return value
