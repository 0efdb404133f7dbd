"""What the timeline of a backward pass must show, whatever the machine's speed."""

import json
from typing import Any

import torch
from torch import nn

import miniddp
from instruments.timeline import Timeline
from miniddp.launch import run_ranks


def record(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    ddp = miniddp.DistributedDataParallel(model, bucket_cap_mb=0.03)
    timeline = Timeline(ddp)
    for _ in range(3):
        ddp.zero_grad()
        loss = ddp(torch.randn(4, 64)).square().mean()
        timeline.note("backward")
        loss.backward()
        timeline.note("end")
    return json.loads(timeline.to_json())


def test_buckets_become_ready_are_launched_and_done() -> None:
    for timeline in run_ranks(record, 2):
        events, marks = timeline["events"], timeline["marks"]
        assert {event["step"] for event in events} == {1, 2, 3}
        for step in (1, 2, 3):
            rows = [event for event in events if event["step"] == step]
            assert [row["bucket"] for row in rows] == list(range(len(rows)))
            assert (len(rows) > 2) == (step > 1), "the first pass has one bucket"
            assert sum(row["bytes"] for row in rows) == 8 * (64 * 64 + 64) * 4
            launched = [row["launched"] for row in rows]
            assert launched == sorted(launched), "buckets are launched in order"
            begin, end = (mark["time"] for mark in marks[2 * step - 2 : 2 * step])
            for row in rows:
                assert begin <= row["ready"] <= row["launched"] <= row["done"]
                assert row["launched"] <= end
        assert any(row["launched"] < marks[3]["time"] for row in events if row["step"] == 2), (
            "communication starts during backward"
        )
