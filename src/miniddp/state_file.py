"""A nested state of tensors and plain values in one file, whole or not there at all.

The format is that of safetensors: 8 bytes with the length of a JSON header, the header, then the
bytes of the tensors. Nothing in it is executed when it is read, and the safetensors library opens
it too. The state's structure, with the names of its tensors, is JSON in the header's metadata,
beside a SHA-256 digest of the whole file.
"""

import contextlib
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

FORMAT = "miniddp state 1"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NO_DIGEST = "0" * 64
"""Stands where the digest comes, while the digest is computed."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used: one line that says which, where and why."""


def write_state(path: Path, state: Any) -> None:
    """Write so that `path` is the new file or, if anything fails, what it was before.

    The file is written beside its place, forced to the disk and renamed; then the folder is forced
    to the disk too, so that the new name survives a power failure.

    A state is a tensor, None, bool, int, float, str, or a list, tuple or dictionary of states.
    Raises `CheckpointError` naming a part that is none of these, `OSError` if writing fails.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = json.dumps(_encode(state, "state", tensors))
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with unfinished.open("wb") as file:
            _write(file, structure, tensors)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read_state(path: Path) -> tuple[Any, str]:
    """The state in a file, its tensors on the CPU, and the file's digest.

    Raises `CheckpointError` for a file that is missing, foreign, cut off or damaged in any byte.
    """
    try:
        with path.open("rb") as file:
            head, structure, layout, digest = _read_header(file)
            tensors, actual = _read_tensors(file, head, layout)
        if actual != digest:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is {actual}, not {digest}")
        return _decode(structure, tensors), digest
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint, or its header is damaged") from error


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON for a value. Its tensors go into `tensors`, under the names that stand in the JSON."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in DTYPES.values() or value.layout != torch.strided or value.is_meta:
            kind = f"{value.dtype}, {value.layout}, on {value.device}"
            raise CheckpointError(f"{name} is a tensor of a kind that cannot be saved: {kind}")
        while name in tensors:
            name += "'"
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, dict):
        pairs = [
            [_encode(key, f"key of {name}", tensors), _encode(item, f"{name}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"{name} is a {type(value).__name__}, which cannot be saved")


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_decode(value["tuple"], tensors))
    return {_decode(key, tensors): _decode(item, tensors) for key, item in value["dict"]}


def _write(file: BinaryIO, structure: str, tensors: dict[str, torch.Tensor]) -> None:
    head = _header(structure, tensors)
    sha = hashlib.sha256(head)
    file.write(head)
    for tensor in tensors.values():
        data = _bytes(tensor.cpu().contiguous())
        sha.update(data)
        file.write(data)
    file.seek(0)
    file.write(head.replace(NO_DIGEST.encode(), sha.hexdigest().encode(), 1))


def _header(structure: str, tensors: dict[str, torch.Tensor]) -> bytes:
    """The beginning of the file. The digest is first in it, before what a user wrote."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    about = {"sha256": NO_DIGEST, "format": FORMAT, "state": structure}
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: BinaryIO) -> tuple[bytes, Any, dict[str, Any], str]:
    """The header as it was before it had a digest, the structure, the tensors' places, the digest.

    Checked as far as it must be before anything is allocated: the digest is checked afterwards.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise CheckpointError(f"{file.name} is no checkpoint, or cut off: it has {size} bytes")
    head = start + file.read(length)
    layout = json.loads(head[8:])
    about = layout.pop("__metadata__")
    digest, form, structure = about["sha256"], about["format"], json.loads(about["state"])
    end = 0
    for place in layout.values():
        begin, end = end, end + math.prod(place["shape"]) * DTYPES[place["dtype"]].itemsize
        if place["data_offsets"] != [begin, end]:
            raise ValueError("the tensors do not follow each other")
    if form != FORMAT:
        raise CheckpointError(f"{file.name} has the format {form!r}, not {FORMAT!r}")
    if len(head) + end != size:
        expected = len(head) + end
        raise CheckpointError(f"{file.name} is cut off: it has {size} bytes, not {expected}")
    head = head.replace(digest.encode(), NO_DIGEST.encode(), 1)
    return head, structure, layout, digest


def _read_tensors(
    file: BinaryIO, head: bytes, layout: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors, each in memory of its own, and the digest of the file as it was read."""
    sha = hashlib.sha256(head)
    tensors = {}
    for name, place in layout.items():
        tensors[name] = torch.empty(place["shape"], dtype=DTYPES[place["dtype"]])
        data = _bytes(tensors[name])
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise CheckpointError(f"{file.name} was cut off while it was read")
        sha.update(data)
    return tensors, sha.hexdigest()


def _bytes(contiguous: torch.Tensor) -> memoryview:
    """The memory of a tensor on the CPU."""
    data: memoryview = contiguous.reshape(-1).view(torch.uint8).numpy().data
    return data


def _sync_folder(folder: Path) -> None:
    """Force a folder's names to the disk, where the system can (Windows opens no folders)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
