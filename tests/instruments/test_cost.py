"""The cost model against byte counters, real tensors, simulations and published numbers."""

from itertools import combinations, pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import miniddp
from instruments import bench_ring, cost, learning_rate, memory, scaling
from instruments.cost import Link
from instruments.held import optimizer_state, storage_bytes
from miniddp import ring
from miniddp.launch import run_ranks

settings.register_profile("a busy machine", deadline=None)
settings.load_profile("a busy machine")

NOTHING = Link(0, 0)
ANY_LINK = st.builds(
    Link, alpha=st.floats(0, 1e-2, allow_subnormal=False), beta=st.floats(1e-12, 1e-6)
)
ANY_BYTES = st.floats(0, 1e12, allow_subnormal=False)
ANY_SIZE = st.integers(1, 64)


# Bytes


def count_bytes(rank: int, lengths: list[int]) -> list[dict[str, int]]:
    """What the collectives themselves say that this rank sent, for float32 tensors."""
    size = dist.get_world_size()
    counted = []
    for length in lengths:
        tensor = torch.rand(length)
        parts = list(torch.rand(size, length))
        counted.append(
            {
                "all_reduce": ring.all_reduce(tensor.clone()),
                "reduce_scatter": ring.reduce_scatter(torch.empty(length), parts),
                "all_gather": ring.all_gather(parts, tensor),
                "root_all_reduce": ring.root_all_reduce(tensor.clone()),
            }
        )
    return counted


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_are_those_that_the_ring_counts(size: int) -> None:
    lengths = [0, 1, 7, 12, 1000, 1200]
    by_rank = run_ranks(count_bytes, size, lengths)
    for index, length in enumerate(lengths):
        num_bytes, gathered = 4 * length, 4 * length * size
        sent = {name: [rank[index][name] for rank in by_rank] for name in by_rank[0][index]}
        expected = cost.ring_all_reduce_bytes(num_bytes, size)
        assert sum(sent["all_reduce"]) == pytest.approx(size * expected)
        for rank in range(size):
            # chunks differ by one element where N does not divide, in each of the two phases
            slack = 0 if length % size == 0 else 2 * 4
            assert abs(sent["all_reduce"][rank] - expected) <= slack
            assert sent["reduce_scatter"][rank] == cost.ring_reduce_scatter_bytes(gathered, size)
            assert sent["all_gather"][rank] == cost.ring_all_gather_bytes(gathered, size)
            root = cost.root_all_reduce_bytes(num_bytes, size, rank)
            assert sent["root_all_reduce"][rank] == root * (size > 1)


def buckets_of_a_model(rank: int) -> list[tuple[int, int]]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 6))
    ddp = miniddp.DistributedDataParallel(model, bucket_cap_mb=0.0003)
    for _ in range(2):  # the first pass has one bucket
        ddp(torch.rand(2, 8)).sum().backward()
    buckets = [bucket.buffer() for bucket in ddp.reducer.buckets]
    assert sum(b.nbytes for b in buckets) == sum(p.nbytes for p in model.parameters())
    return [(buffer.nbytes, ring.all_reduce(buffer)) for buffer in buckets]


def test_buckets_send_what_the_whole_gradient_would() -> None:
    buckets = run_ranks(buckets_of_a_model, 2)[0]
    assert len(buckets) > 2
    for num_bytes, sent in buckets:
        assert sent == cost.ring_all_reduce_bytes(num_bytes, 2)


def simulate_tree(size: int) -> tuple[list[int], int]:
    """How often each rank sends in a reduce and a broadcast by recursive halving; the rounds."""
    sent, rounds = [0] * size, 0
    distance = 1
    while distance < size:
        for rank in range(distance, size, 2 * distance):
            sent[rank] += 1  # up, to rank - distance
            sent[rank - distance] += 1  # and later down again
        rounds += 2
        distance *= 2
    return sent, rounds


@pytest.mark.parametrize("size", range(1, 20))
def test_tree_is_the_one_that_is_simulated(size: int) -> None:
    sent, rounds = simulate_tree(size)
    counted = [cost.tree_all_reduce_bytes(10, size, rank) for rank in range(size)]
    assert counted == [10 * times for times in sent]
    assert sum(counted) == 2 * (size - 1) * 10
    link = Link(3.0, 0.5)
    assert cost.tree_all_reduce_seconds(10, size, link) == rounds * link.seconds(10)


def total_sent_by(formula: str, num_bytes: float, size: int) -> float:
    count = getattr(cost, formula)
    return sum(count(num_bytes, size, rank) for rank in range(size))


@given(ANY_BYTES, st.integers(2, 64))
def test_every_all_reduce_moves_the_same_number_of_bytes_in_total(size_s: float, n: int) -> None:
    everything = 2 * (n - 1) * size_s
    assert n * cost.ring_all_reduce_bytes(size_s, n) == pytest.approx(everything)
    assert total_sent_by("root_all_reduce_bytes", size_s, n) == pytest.approx(everything)
    assert total_sent_by("tree_all_reduce_bytes", size_s, n) == pytest.approx(everything)


# Seconds


@given(st.integers(1, 12), ANY_LINK)
def test_ring_seconds_are_the_steps_of_the_ring(size: int, link: Link) -> None:
    chunk = 100
    steps = [*ring.reduce_scatter_steps(0, size), *ring.all_gather_steps(0, size)]
    expected = sum(link.seconds(chunk) for _ in steps)
    assert cost.ring_all_reduce_seconds(chunk * size, size, link) == pytest.approx(expected)


@given(ANY_BYTES, ANY_SIZE, ANY_LINK)
def test_the_phases_make_the_all_reduce(num_bytes: float, size: int, link: Link) -> None:
    phases = cost.ring_reduce_scatter_seconds(num_bytes, size, link)
    phases += cost.ring_all_gather_seconds(num_bytes, size, link)
    assert cost.ring_all_reduce_seconds(num_bytes, size, link) == pytest.approx(phases)


ALGORITHMS = [
    cost.ring_all_reduce_seconds,
    cost.root_all_reduce_seconds,
    cost.tree_all_reduce_seconds,
]


@pytest.mark.parametrize("seconds", ALGORITHMS)
@given(num_bytes=ANY_BYTES, size=ANY_SIZE, link=ANY_LINK)
def test_more_bytes_ranks_and_latency_never_take_less(seconds, num_bytes, size, link) -> None:
    now = seconds(num_bytes, size, link)
    allowed = now * (1 - 1e-12)
    assert seconds(num_bytes, 1, link) == 0
    assert seconds(num_bytes + 1e6, size, link) >= allowed
    assert seconds(num_bytes, size + 1, link) >= allowed
    assert seconds(num_bytes, size, Link(link.alpha + 1, link.beta)) >= allowed


@given(ANY_BYTES, ANY_SIZE, ANY_LINK)
def test_ring_stays_below_two_tensors_and_root_does_not(
    num_bytes: float, size: int, link: Link
) -> None:
    without_latency = Link(0, link.beta)
    limit = 2 * num_bytes * link.beta
    assert cost.ring_all_reduce_seconds(num_bytes, size, without_latency) <= limit
    assert cost.ring_all_reduce_seconds(num_bytes, 10**9, without_latency) == pytest.approx(limit)
    rooted = cost.root_all_reduce_seconds(num_bytes, size, without_latency)
    assert rooted == pytest.approx((size - 1) * limit)


def test_tree_wins_for_a_small_tensor_and_ring_for_a_large_one() -> None:
    link = Link(1e-5, 1e-10)
    for num_bytes, tree_wins in ((1e3, True), (1e9, False)):
        tree = cost.tree_all_reduce_seconds(num_bytes, 64, link)
        assert (tree < cost.ring_all_reduce_seconds(num_bytes, 64, link)) is tree_wins


# Bandwidth and fit


@given(st.floats(1, 1e12), st.integers(2, 64), st.floats(1e-12, 1e-6))
def test_bus_bandwidth_of_a_ring_is_the_links(num_bytes: float, size: int, beta: float) -> None:
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        seconds = getattr(cost, f"ring_{collective}_seconds")(num_bytes, size, Link(0, beta))
        bus = cost.bus_bandwidth(num_bytes, seconds, size, collective)
        assert bus == pytest.approx(1 / beta)
        assert cost.algorithm_bandwidth(num_bytes, seconds) == pytest.approx(num_bytes / seconds)


def test_bus_bandwidth_factors_of_nccl_tests() -> None:
    factors = {"all_reduce": 1.75, "reduce_scatter": 0.875, "all_gather": 0.875, "broadcast": 1}
    for collective, factor in factors.items():
        assert cost.bus_bandwidth(100, 2, 8, collective) == 50 * factor


@given(ANY_LINK, st.integers(2, 16))
def test_fit_finds_the_link_that_made_the_times(link: Link, size: int) -> None:
    sizes = [1e3, 1e5, 1e7, 1e9]
    times = [cost.ring_all_reduce_seconds(s, size, link) for s in sizes]
    found = cost.fit_ring_all_reduce(sizes, times, size)
    assert found.beta == pytest.approx(link.beta, rel=1e-6)
    assert found.alpha == pytest.approx(link.alpha, rel=1e-6, abs=1e-8 * times[0])
    timings = [
        bench_ring.Timing("ring", "gloo", size, int(s), (t,))
        for s, t in zip(sizes, times, strict=True)
    ]
    again = bench_ring.fit_ring(timings)
    assert (again.alpha, again.beta) == pytest.approx(
        (found.alpha, found.beta), rel=1e-5, abs=1e-8 * times[0]
    )


@given(st.lists(st.floats(0.8, 1.25), min_size=5, max_size=5))
def test_fit_stays_near_under_noise(noise: list[float]) -> None:
    link, sizes = Link(1e-4, 1e-9), [1e2, 1e3, 1e6, 1e8, 1e9]
    times = [link.seconds(s) * factor for s, factor in zip(sizes, noise, strict=True)]
    found = cost.fit_link(sizes, times)
    assert 0.6 < found.alpha / link.alpha < 1.6
    assert 0.6 < found.beta / link.beta < 1.6


def test_disturbed_times_change_nothing() -> None:
    """Two of seven times are many times too long, whichever they are."""
    link, sizes = Link(1e-4, 1e-9), [10.0**power for power in range(3, 10)]
    times = [link.seconds(size) for size in sizes]
    for disturbed in combinations(range(7), 2):
        noisy = [time * (5 if i in disturbed else 1) for i, time in enumerate(times)]
        found = cost.fit_link(sizes, noisy)
        assert (found.alpha, found.beta) == pytest.approx((link.alpha, link.beta), rel=1e-6)


def test_fit_is_never_negative() -> None:
    """Times that grow too fast ask for a negative alpha, times that fall for a negative beta."""
    assert cost.fit_link([1, 2, 4], [1.0, 2.2, 4.8]).alpha == 0
    assert cost.fit_link([1, 2, 4], [1.0, 2.2, 4.8]).beta == pytest.approx(1.1, rel=0.1)
    assert cost.fit_link([1, 2, 4], [3.0, 2.0, 1.0]).beta == 0
    assert cost.fit_link([1, 2, 4], [3.0, 2.0, 1.0]).alpha == 1, "what disturbs adds time"


# Scaling


def test_scaling_efficiency() -> None:
    assert scaling.scaling_efficiency(1.0, 1.25) == 0.8


def test_smallest_batch_of_the_scaling_book() -> None:
    """TPU v5p, one axis: 2,550 tokens, as published for gradients of 2 bytes."""
    assert scaling.smallest_batch_per_rank(4.6e14, 2 * 9e10, 2) == pytest.approx(2550, rel=0.01)


def test_a_node_of_h100_needs_an_eighth_of_what_one_of_its_cards_would() -> None:
    """All eight cards carry the ring: 400 GB/s, and 4,950 tokens of float32 gradients."""
    node = scaling.smallest_batch_per_rank(989.5e12, 8 * 50e9)
    assert node == pytest.approx(4947.5)
    assert scaling.smallest_batch_per_rank(989.5e12, 50e9) == 8 * node


@given(st.floats(1, 1e6), st.floats(1e9, 1e15), st.floats(1e6, 1e12), st.sampled_from([2, 4]))
def test_above_the_smallest_batch_backward_hides_the_ring(
    batch: float, flops: float, bandwidth: float, gradient_bytes: int
) -> None:
    parameters = 10**9
    backward = 4 * batch * parameters / flops
    ring_seconds = cost.ring_all_reduce_seconds(
        gradient_bytes * parameters, 10**9, Link(0, 1 / bandwidth)
    )
    if backward == pytest.approx(ring_seconds):
        return
    smallest = scaling.smallest_batch_per_rank(flops, bandwidth, gradient_bytes)
    assert (batch > smallest) is (backward > ring_seconds)


# Memory


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "mixed", "mixed_fp32_gradients"])
def test_memory_is_that_of_real_tensors(name: str, precision: str) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 7))
    count = sum(p.numel() for p in model.parameters())
    masters: list[torch.Tensor] = []
    if precision != "fp32":
        masters = [p.detach().clone() for p in model.parameters()]
        model.bfloat16()
    parameters = list(model.parameters())
    model(torch.rand(4, 20, dtype=parameters[0].dtype)).sum().backward()
    for master, parameter in zip(masters, parameters, strict=False):
        master.grad = parameter.grad.float()
    optimizer = OPTIMIZERS[name](masters or parameters)
    optimizer.step()
    gradients = storage_bytes(p.grad for p in parameters)
    if precision == "mixed_fp32_gradients":
        gradients += storage_bytes(master.grad for master in masters)
    measured = memory.Memory(
        storage_bytes(parameters),
        gradients,
        storage_bytes([*masters, *optimizer_state(optimizer)]),
    )
    per_parameter = memory.bytes_per_parameter(name, precision)
    assert memory.memory_per_rank(count, 1, 0, per_parameter) == measured


def test_published_bytes_per_parameter() -> None:
    totals = {"fp32": 16, "mixed": 16, "mixed_fp32_gradients": 20}
    for precision, total in totals.items():
        assert memory.bytes_per_parameter("adam", precision).total == total
    assert memory.bytes_per_parameter("adam", "mixed") == memory.Memory(2, 2, 12)


def test_figure_1_of_the_zero_paper() -> None:
    """7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB."""
    per_parameter = memory.bytes_per_parameter("adam", "mixed")
    totals = [
        memory.memory_per_rank(7_500_000_000, 64, stage, per_parameter).total for stage in range(4)
    ]
    assert [round(total / 1e9, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]


@given(st.integers(0, 10**11), st.integers(1, 4096), st.sampled_from(["sgd", "momentum", "adam"]))
def test_sharding_more_never_takes_more(count: int, size: int, optimizer: str) -> None:
    per_parameter = memory.bytes_per_parameter(optimizer, "mixed")
    totals = [memory.memory_per_rank(count, size, stage, per_parameter).total for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == per_parameter.total * count
    assert size * totals[3] >= totals[0]
    assert totals[3] - totals[0] / size < per_parameter.total
    assert memory.memory_per_rank(count, 1, 3, per_parameter).total == totals[0]


@pytest.mark.parametrize(("stage", "transfers"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_communication_elements(stage: int, transfers: int) -> None:
    assert memory.communication_elements(1000, 1, stage) == 0
    assert memory.communication_elements(1000, 4, stage) == transfers * 750
    assert memory.communication_elements(1000, 10**9, stage) == pytest.approx(transfers * 1000)


# Learning rate


def test_the_numbers_of_imagenet_in_one_hour() -> None:
    """0.1 for 256 images, 256 workers of 32: 3.2 for 8192, after a warm-up from 0.1."""
    target = learning_rate.linear_scaling(0.1, 256, 256 * 32)
    assert target == pytest.approx(3.2)
    rates = [learning_rate.warmup(step, 10, 0.1, target) for step in range(13)]
    assert rates[0] == 0.1
    assert rates[10:] == [target] * 3
    steps = [later - earlier for earlier, later in pairwise(rates[:11])]
    assert steps == pytest.approx([0.31] * 10)
    assert learning_rate.warmup(0, 0, 0.1, target) == target


@given(st.floats(0, 10, allow_subnormal=False), st.integers(1, 10**6), st.integers(1, 10**6))
def test_scaling_rules(rate: float, base: int, batch_size: int) -> None:
    linear = learning_rate.linear_scaling(rate, base, batch_size)
    root = learning_rate.square_root_scaling(rate, base, batch_size)
    assert learning_rate.linear_scaling(linear, batch_size, base) == pytest.approx(rate)
    assert root**2 == pytest.approx(rate * linear)


# Bad input

BAD = {
    "alpha must be a finite number of at least 0, not -1": lambda: Link(-1, 0),
    "beta must be": lambda: Link(0, float("nan")),
    "num_bytes must be a finite number of at least 0, not -4": lambda: NOTHING.seconds(-4),
    "num_bytes must be": lambda: cost.ring_all_reduce_seconds(-1, 2, NOTHING),
    "world_size must be an integer of at least 1, not 0": lambda: cost.ring_all_reduce_bytes(1, 0),
    "world_size must be an integer of at least 1, not 2.0": (
        lambda: cost.root_all_reduce_seconds(1, 2.0, NOTHING)
    ),
    "world_size must be an integer of at least 1, not -1": (
        lambda: cost.tree_all_reduce_seconds(1, -1, NOTHING)
    ),
    "rank must be from 0 to 2, not 3": lambda: cost.tree_all_reduce_bytes(1, 3, 3),
    "seconds must be more than 0": lambda: cost.algorithm_bandwidth(1, 0),
    "collective must be one of all_reduce, reduce_scatter": (
        lambda: cost.bus_bandwidth(1, 1, 2, "gossip")
    ),
    "fit_link needs one time per size": lambda: cost.fit_link([1, 2], [1.0]),
    "two different sizes at least, not 2 sizes \\(1 different\\)": (
        lambda: cost.fit_link([1, 1], [1.0, 2.0])
    ),
    "smallest_size must be": lambda: cost.fit_link([-1, 1], [1.0, 2.0]),
    "every time must be more than 0 seconds, not 0.0": lambda: cost.fit_link([1, 2], [0.0, 2.0]),
    "an all-reduce of one rank uses no link": (
        lambda: cost.fit_ring_all_reduce([1, 2], [1.0, 2.0], 1)
    ),
    "seconds_on_all must be more than 0": lambda: scaling.scaling_efficiency(1, 0),
    "bytes_per_second must be more than 0": lambda: scaling.smallest_batch_per_rank(1, 0),
    "gradient_bytes must be": lambda: scaling.smallest_batch_per_rank(1, 1, -1),
    "optimizer must be one of sgd, momentum, adam, not 'lion'": (
        lambda: memory.bytes_per_parameter("lion")
    ),
    "precision must be one of fp32, mixed": lambda: memory.bytes_per_parameter("adam", "fp8"),
    "stage must be 0 \\(DDP\\), 1, 2 or 3, not 4": (
        lambda: memory.memory_per_rank(1, 1, 4, memory.Memory(4, 4, 8))
    ),
    "parameter_count must be": lambda: memory.communication_elements(-1, 2, 0),
    "batch_size must be an integer of at least 1, not 0": (
        lambda: learning_rate.linear_scaling(0.1, 2, 0)
    ),
    "base_batch_size must be": lambda: learning_rate.linear_scaling(0.1, 0, 2),
    "learning_rate must be": lambda: learning_rate.square_root_scaling(-0.1, 1, 2),
    "step must be": lambda: learning_rate.warmup(-1, 10, 0, 1),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_gets_one_clear_line(message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        BAD[message]()
    assert "\n" not in str(error.value)


# What a step moves through memory


def test_adamw_moves_each_tensor_that_it_keeps() -> None:
    """Parameter and both moments are read and written, the gradient is read."""
    parameter = nn.Parameter(torch.rand(1000))
    parameter.grad = torch.rand(1000)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    moments = [kept.nbytes for kept in optimizer.state[parameter].values() if kept.numel() > 1]
    written = parameter.nbytes + sum(moments)
    read = written + parameter.grad.nbytes
    assert cost.adamw_seconds(1000, 1.0) == written + read
    assert cost.adamw_seconds(1000, 2e3) == (written + read) / 2e3


def test_a_copied_byte_is_read_and_written() -> None:
    assert cost.copy_seconds_per_byte(4.0) == 0.5
    with pytest.raises(ValueError, match="bytes_per_second must be more than 0"):
        cost.copy_seconds_per_byte(0)
