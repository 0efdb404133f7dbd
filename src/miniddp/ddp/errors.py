"""The errors of a backward pass whose mean would be wrong, each a sentence."""

from collections.abc import Container, Sequence

import torch.distributed as dist

CURES = (
    "Cure it by making sure all `forward` function outputs participate in "
    "calculating loss, by freezing what is unused before wrapping, or by "
    "passing the keyword argument `find_unused_parameters=True`."
)
CURES_OF_SEARCH = (
    "`find_unused_parameters=True` has found them in the graph of forward's "
    "output, but the loss does not use them: make sure that all `forward` "
    "function outputs participate in calculating loss."
)


def converted_back(name: str) -> RuntimeError:
    """The error of a parameter whose gradient comes past its hook."""
    return RuntimeError(
        f"{name!r} was converted or moved since it was wrapped, and back, so "
        "its gradient no longer comes here: convert the module, then wrap it"
    )


def used_up(name: str) -> RuntimeError:
    """The error of a gradient that is missing when its bucket is filled."""
    return RuntimeError(
        f"gradient of {name!r} was there and is gone before it was averaged: a "
        "hook of another parameter, or an optimizer that steps in backward, "
        "has used it up; step after backward"
    )


def ready_twice(name: str, in_another_pass: bool) -> RuntimeError:
    """The error of a parameter whose gradient came twice after one forward."""
    twice = (
        "Expected to mark a variable ready only once: "
        f"{name!r} got its gradient twice "
    )
    if in_another_pass:
        return RuntimeError(
            f"{twice}after one forward, in two backward passes: add the losses "
            "and call backward once, or give each loss a forward of its own "
            "and run all but the last inside no_sync()"
        )
    return RuntimeError(
        f"{twice}in one backward pass: a part of the model runs in a "
        "re-entrant checkpoint (pass use_reentrant=False), or uses the "
        "parameter outside of what forward returns"
    )


def not_found(name: str) -> RuntimeError:
    """The error of a gradient that the search had given up."""
    return RuntimeError(
        "Expected to mark a variable ready only once: "
        f"{name!r} was not found in what forward returned, and yet got a "
        "gradient: use parameters in forward alone, return all tensors of the "
        "loss, in lists, tuples, mappings or dataclasses, pass "
        "use_reentrant=False to a checkpoint, and call backward after each "
        "forward"
    )


def averaged_already() -> RuntimeError:
    """The error of a backward pass whose gradients nobody would average."""
    return RuntimeError(
        "backward ran again through a forward pass whose gradients are "
        "averaged already: add the losses and call backward once, or run all "
        "but the last forward and backward inside no_sync()"
    )


def not_the_view(name: str) -> RuntimeError:
    """The error of a gradient that is no longer a view of its bucket."""
    return RuntimeError(
        f"gradient of {name!r} is not the expected DDP bucket view with "
        "gradient_as_bucket_view=True: another wrapper has the same parameter, "
        "a hook has replaced .grad during backward, or it lies in another "
        "parameter's place"
    )


def not_finished(
    names: Sequence[str], ready: Container[int], cures: str
) -> RuntimeError:
    """The error of a forward pass after a backward that left gradients out."""
    missing = [name for i, name in enumerate(names) if i not in ready]
    return RuntimeError(
        "Expected to have finished reduction in the prior iteration before "
        "starting a new one: parameters which did not receive grad for rank "
        f"{dist.get_rank()}: {shortened(missing)}. {cures}"
    )


def left_out(
    names: Sequence[str], counts: Sequence[int], world_size: int
) -> RuntimeError:
    """The error of a backward pass that left gradients out on some rank."""
    missing = [
        f"{name!r} (on {world_size - count} of {world_size} ranks)"
        for name, count in zip(names, counts, strict=True)
        if count < world_size
    ]
    return RuntimeError(
        f"{len(missing)} parameter(s) got no gradient in this backward pass: "
        f"{shortened(missing)}. {CURES}"
    )


def shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
