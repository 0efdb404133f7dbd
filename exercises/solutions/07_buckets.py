"""Exercise 7, solved."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def plan(num_bytes: Sequence[int], cap_bytes: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    held = cap_bytes
    for i in reversed(range(len(num_bytes))):
        if held >= cap_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += num_bytes[i]
    return buckets


class Bucket:
    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
        sizes = [p.numel() for p in parameters]
        self.views = dict(zip(parameters, self.flat.split(sizes), strict=True))
        self.waits_for = set(parameters)

    def put(self, parameter: Tensor) -> None:
        self.views[parameter].copy_(parameter.grad.flatten() / dist.get_world_size())
        self.waits_for.remove(parameter)

    def give_back(self) -> None:
        for parameter, view in self.views.items():
            parameter.grad.copy_(view.view_as(parameter))
        self.waits_for = set(self.parameters)


def average_in_buckets(module: nn.Module, cap_bytes: int) -> Callable[[], None]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    indices = plan([p.nbytes for p in parameters], cap_bytes)
    buckets = [Bucket([parameters[i] for i in bucket]) for bucket in indices]
    bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
    works: list[dist.Work] = []

    def put(parameter: Tensor) -> None:
        bucket_of[parameter].put(parameter)
        while len(works) < len(buckets) and not buckets[len(works)].waits_for:
            works.append(dist.all_reduce(buckets[len(works)].flat, async_op=True))

    def finish() -> None:
        for bucket, work in zip(buckets, works, strict=True):
            work.wait()
            bucket.give_back()
        works.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(put)
    return finish
