"""Whether two states are equal to the last bit, told by a short text of each."""

import hashlib
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path


def digest_of(state: Any) -> str:
    """The SHA-256 of all that is in nested dicts, lists and tuples: tensors, numbers, texts.

    Of a tensor its type, shape and bytes, of other values what `repr` says, and of each
    the way to it.
    """
    sha = hashlib.sha256()
    for path, value in tree_leaves_with_path(state):
        sha.update(keystr(path).encode())
        if isinstance(value, Tensor):
            sha.update(f"{value.dtype} {list(value.shape)}".encode())
            sha.update(value.cpu().numpy().tobytes())
        else:
            sha.update(repr(value).encode())
    return sha.hexdigest()
