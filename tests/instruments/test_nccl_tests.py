"""Pasted output of nccl-tests: several versions, and what is refused."""

import re

import pytest

from instruments.measurements import read
from instruments.network import Measured, read_nccl_tests, volume
from instruments.predictions import curve_of

NOW = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
BEFORE = "size count type redop time algbw busbw error time algbw busbw error"


def output(ranks: int, columns: str, rows: dict[int, float]) -> str:
    """What all_reduce_perf prints; out of place it takes a microsecond longer."""
    values = {"type": "float", "redop": "sum", "root": "-1", "#wrong": "0", "error": "1e-07"}
    lines = ["# nThread 1 nGpus 1 minBytes 8 maxBytes 128 step: 2(factor)", "#", "# Using devices"]
    lines += [f"#  Rank {rank:2} Group  0 Pid 9 on node device 0 NVIDIA" for rank in range(ranks)]
    lines += ["#", f"#   {columns}", "#   (B)  (elements)  (us)  (GB/s)"]
    for size, time in rows.items():
        row = values | {"size": str(size), "count": str(size // 4)}
        late = time + 1.0
        cells = []
        for name in columns.split():
            algbw = size / late / 1e3
            row |= {"time": f"{late:.2f}", "algbw": f"{algbw:.2f}"}
            row |= {"busbw": f"{algbw * volume('ring', ranks):.2f}"}
            cells.append(row[name])
            if name in ("#wrong", "error"):
                late = time
        lines.append("  ".join(cells))
    lines += ["node:9:9 [0] NCCL INFO comm 0x5 - Destroy COMPLETE", "# Avg bus bandwidth : 1.0"]
    return "\n".join(lines)


ROWS = {0: 5.0, 2**20: 26.93, 2**21: 42.09, 2**25: 198.9, 2**30: 4016.4}


@pytest.mark.parametrize("columns", [NOW, BEFORE])
def test_the_shorter_time_of_each_size_is_read(columns: str) -> None:
    found = read_nccl_tests(output(8, columns, ROWS))
    assert found == Measured(
        num_bytes=(2**20, 2**21, 2**25, 2**30),
        seconds=pytest.approx((26.93e-6, 42.09e-6, 198.9e-6, 4016.4e-6)),
        world_size=8,
    )


TAGGED = [
    "\n".join(f"{tag}{line}" for line in output(8, NOW, ROWS).splitlines())
    for tag in ("[1,0]<stdout>:", "[prterun-node-7@1,0]<stdout>: ", "0: ")
]


@pytest.mark.parametrize("text", TAGGED, ids=["Open MPI 4", "Open MPI 5", "srun --label"])
def test_lines_may_say_which_rank_printed_them(text: str) -> None:
    assert read_nccl_tests(text) == read_nccl_tests(output(8, NOW, ROWS))


def test_a_published_table_comes_back_from_its_output() -> None:
    rows = {row["size_bytes"]: row["time_in_place_us"] for row in read("allreduce_h100_8gpu")}
    large = {size: time for size, time in rows.items() if size >= 2**20}
    found = read_nccl_tests(output(8, NOW, large))
    link = curve_of("h100_8gpu").link()
    for size in (25 * 2**20, 2**28):
        seconds = link.all_reduce_seconds(size)
        assert found.all_reduce_seconds(size) == pytest.approx(seconds, rel=0.01)


GOOD = output(8, NOW, ROWS)
REFUSED = {
    "": 'no line "# size count type redop',
    "hello\nworld": 'no line "# size count type redop',
    re.sub(r"#  Rank.*\n", "", GOOD): 'of the lines "# Rank 0 …" 0 found',
    output(1, NOW, ROWS): 'of the lines "# Rank 0 …" 1 found',
    output(8, NOW, {2**20: 26.93}): "two sizes or more needed, 1 found",
    GOOD.replace("#wrong time", "#wrong extra time"): "line 15 has 13 columns, the header 14",
    GOOD.replace("198.90", "N/A").replace("199.90", "N/A"): "line 18 has no time",
    output(16, NOW, ROWS).replace("Rank  9", "Rank  8"): "not of an all-reduce of 15 ranks",
}


@pytest.mark.parametrize("text", REFUSED)
def test_another_output_gets_one_line_that_says_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[text]) as error:
        read_nccl_tests(text)
    assert str(error.value).startswith("expected all that nccl-tests' all_reduce_perf prints")
    assert "\n" not in str(error.value)
