"""One test body runs against `miniddp.ring` and `torch.distributed`.

Starting ranks takes longer than what they do, so one launch runs many cases and reports each.
"""

import functools
import itertools
import random
import time
import traceback
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from miniddp import ring
from miniddp.launch import RanksFailed
from miniddp.process import device

from ..parity import row, short
from . import ranks
from .ranks import run

IMPLEMENTATIONS = {"miniddp": ring, "torch": dist}
OPS = [ReduceOp.SUM, ReduceOp.AVG]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-5, torch.complex64: 1e-5}
TOLERANCE[torch.float64] = 1e-12


# The schedule, without any process


@pytest.mark.parametrize("size", range(1, 13))
def test_each_rank_receives_what_its_left_neighbour_sends(size):
    for steps in (ring.reduce_scatter_steps, ring.all_gather_steps):
        for rank in range(size):
            sent = [send for send, _ in steps((rank - 1) % size, size)]
            received = [receive for _, receive in steps(rank, size)]
            assert sent == received
            assert len(received) == size - 1


@pytest.mark.parametrize("size", range(1, 13))
def test_reduce_scatter_completes_chunk_number_rank(size):
    parts = [[{rank} for _ in range(size)] for rank in range(size)]  # parts[rank][chunk]
    for step in range(size - 1):
        moves = [(rank, *ring.reduce_scatter_steps(rank, size)[step]) for rank in range(size)]
        travelling = [set(parts[rank][send]) for rank, send, _ in moves]
        for rank, _, receive in moves:
            arriving = travelling[(rank - 1) % size]
            assert parts[rank][receive].isdisjoint(arriving)  # nothing is added twice
            parts[rank][receive] |= arriving
    assert all(parts[rank][rank] == set(range(size)) for rank in range(size))


@pytest.mark.parametrize("size", range(1, 13))
def test_all_gather_brings_every_chunk_to_every_rank(size):
    complete = [{rank} for rank in range(size)]
    for step in range(size - 1):
        moves = [(rank, *ring.all_gather_steps(rank, size)[step]) for rank in range(size)]
        assert all(send in complete[rank] for rank, send, _ in moves)
        for rank, _, receive in moves:
            complete[rank].add(receive)
    assert all(chunks == set(range(size)) for chunks in complete)


# What travels: the checks run on every rank, against both implementations


def random_tensor(shape, dtype, seed):
    """Values that differ between elements and seeds, so that a mis-routed chunk shows."""
    generator = torch.Generator(device()).manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def reduced(tensors, op):
    """The oracle: all ranks' tensors, reduced in one process and in double precision."""
    dtype = tensors[0].dtype
    exact = not (dtype.is_floating_point or dtype.is_complex)
    wide = dtype if exact else torch.promote_types(dtype, torch.float64)
    result = functools.reduce(torch.add, [tensor.to(wide) for tensor in tensors])
    return (result / len(tensors) if op == ReduceOp.AVG else result).to(dtype)


def assert_same(actual, expected):
    tolerance = TOLERANCE.get(expected.dtype, 0.0)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def legal(dtype, op):
    return dtype.is_floating_point or dtype.is_complex or op != ReduceOp.AVG


def cases():
    """Shapes that do not divide, dtypes and ops; (shape, dtype, op, seed)."""
    size = dist.get_world_size()
    shapes = [(0,), (1,), (size - 1,), (size,), (size + 1,), (97,), (), (3, 5), (10_007,)]
    seeds = itertools.count(1000, 100)
    for shape, op in itertools.product(shapes, OPS):
        yield shape, torch.float32, op, next(seeds)
    for dtype, op in itertools.product(DTYPES, OPS):
        if legal(dtype, op):
            yield (101,), dtype, op, next(seeds)


def check_all_reduce(collectives, rank, size):
    """`all_reduce` of any length and dtype, SUM and AVG; all ranks hold the same, bit for bit."""
    large = (3_000_017,), torch.float32, ReduceOp.SUM, 0
    for shape, dtype, op, seed in [*cases(), large]:
        tensors = [random_tensor(shape, dtype, seed + peer) for peer in range(size)]
        tensor = tensors[rank].clone()
        collectives.all_reduce(tensor, op)
        assert_same(tensor, reduced(tensors, op))
        assert all(torch.equal(copy, tensor) for copy in ranks.all_gather(tensor))  # bit for bit


def check_reduce_scatter(collectives, rank, size):
    """`reduce_scatter`; the input stays as it was."""
    for shape, dtype, op, seed in cases():
        inputs = [
            [random_tensor(shape, dtype, seed + 10 * peer + part) for part in range(size)]
            for peer in range(size)
        ]
        expected = reduced([parts[rank] for parts in inputs], op)
        given = [part.clone() for part in inputs[rank]]
        output = torch.zeros(shape, dtype=dtype)
        collectives.reduce_scatter(output, given, op)
        assert_same(output, expected)
        assert all(map(torch.equal, given, inputs[rank]))  # the input is left as it was


def check_all_gather(collectives, rank, size):
    """`all_gather`, also into the parts of one tensor."""
    for shape, dtype, _, seed in cases():
        tensors = [random_tensor(shape, dtype, seed + peer) for peer in range(size)]
        outputs = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
        collectives.all_gather(outputs, tensors[rank])
        assert all(map(torch.equal, outputs, tensors))
        if shape:
            output = torch.zeros_like(torch.cat(tensors))
            collectives.all_gather(list(output.tensor_split(size)), tensors[rank])
            assert torch.equal(output, torch.cat(tensors))


def check_subgroups(collectives, rank, size):
    """Groups side by side, also without rank 0."""
    groups = [list(range(start, size, 2)) for start in range(min(size, 2))]
    handles = [dist.new_group(members) for members in groups]
    for members, group in zip(groups, handles, strict=True):
        tensors = [random_tensor((13,), torch.float32, peer) for peer in range(size)]
        mine = tensors[rank].clone()
        if rank in members:
            collectives.all_reduce(mine, group=group)
            assert_same(mine, reduced([tensors[member] for member in members], ReduceOp.SUM))
            gathered = [torch.zeros(13) for _ in members]
            collectives.all_gather(gathered, tensors[rank], group)
            assert all(map(torch.equal, gathered, [tensors[member] for member in members]))


def check_tensors_that_require_grad(collectives, rank, size):
    """A parameter can be reduced in place and still requires a gradient."""
    parameter = torch.nn.Parameter(torch.full((7,), float(rank)))
    collectives.all_reduce(parameter)
    assert parameter.tolist() == [sum(range(size))] * 7
    assert parameter.requires_grad


def check_errors(collectives, rank, size):
    """No tensor, no such op for the dtype, another length or dtype: an error of the same kind."""
    ones = torch.ones(2)
    for error, call in [
        (TypeError, lambda: collectives.all_reduce([1.0])),
        (ValueError, lambda: collectives.all_reduce(ones.to(torch.complex64), ReduceOp.MAX)),
        (RuntimeError, lambda: collectives.all_reduce(ones.long(), ReduceOp.AVG)),
        ((ValueError, RuntimeError), lambda: collectives.all_gather([ones] * (size + 1), ones)),
        ((ValueError, RuntimeError), lambda: collectives.all_gather([ones[:1]] * size, ones)),
        (ValueError, lambda: collectives.all_gather([ones.double()] * size, ones)),
    ]:
        with pytest.raises(error):
            call()


by_dtype = ", ".join(f"{str(dtype)[6:]} {short(value)}" for dtype, value in TOLERANCE.items())
BY_DTYPE = f"rtol and atol: {by_dtype}"
CHECKS = {
    check_all_reduce: BY_DTYPE,
    check_reduce_scatter: BY_DTYPE,
    check_all_gather: "exact",
    check_subgroups: BY_DTYPE,
    check_tensors_that_require_grad: "exact",
    check_errors: "",
}


def run_checks(rank, name):
    """The name of each check with the traceback that it ended in, or None."""
    warnings.simplefilter("ignore", FutureWarning)
    results = {}
    for check in CHECKS:
        try:
            check(IMPLEMENTATIONS[name], rank, dist.get_world_size())
            results[check.__name__] = None
        except Exception:
            results[check.__name__] = traceback.format_exc()
    return results


@pytest.fixture(
    scope="module",
    params=[(name, size) for name in IMPLEMENTATIONS for size in (1, 2, 3, 4)],
    ids=lambda param: f"{param[0]}-{param[1]}-ranks",
)
def results(request):
    name, world_size = request.param
    if name == "torch" and ranks.backend == "gloo" and ranks.gpus():
        pytest.skip("gloo gathers no tensors of a GPU")
    return run(run_checks, world_size, name)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check.__name__, marks=row("collectives", tolerance, says=check))
        for check, tolerance in CHECKS.items()
    ],
)
def test_same_as_torch(results, check):
    failures = {rank: result[check] for rank, result in enumerate(results) if result[check]}
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())


# What only the ring promises


def all_reduce_in_segments(rank, seed):
    size = dist.get_world_size()
    choose = random.Random(seed)
    for _ in range(80):
        length, dtype = choose.randrange(400), choose.choice(DTYPES)
        op = choose.choice([op for op in OPS if legal(dtype, op)])
        ring.SEGMENT_BYTES = choose.randrange(1, 500)
        first = choose.randrange(10**6)
        tensors = [random_tensor((length,), dtype, first + peer) for peer in range(size)]
        tensor = tensors[rank].clone()
        ring.all_reduce(tensor, op)
        assert_same(tensor, reduced(tensors, op))
        tensor = tensors[rank].clone()
        ring.root_all_reduce(tensor)
        assert_same(tensor, reduced(tensors, ReduceOp.SUM))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_any_segment_size_gives_the_same_result(world_size, seed):
    run(all_reduce_in_segments, world_size, seed)


def bytes_sent(rank):
    """What each function says that it sent, and what the ring's sends held."""
    held = []
    batch = dist.batch_isend_irecv

    def batch_and_count(operations):
        held.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return batch(operations)

    dist.batch_isend_irecv = batch_and_count
    size = dist.get_world_size()
    tensor = torch.rand(60, dtype=torch.float64)  # 480 bytes, a multiple of 8 N for N = 1 ... 5
    parts = [torch.rand(12) for _ in range(size)]  # 48 bytes each
    sent = {
        "all_reduce": ring.all_reduce(tensor),
        "reduce_scatter": ring.reduce_scatter(torch.empty(12), parts),
        "all_gather": ring.all_gather(parts, torch.rand(12)),
        "uneven": ring.all_reduce(torch.rand(7)),
        "empty": ring.all_reduce(torch.rand(0)),
    }
    root = [ring.root_all_reduce(tensor), ring.root_all_reduce(torch.rand(0))]
    return sent, sum(held), root


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_bytes_sent(world_size):
    n = world_size
    results = run(bytes_sent, n)
    for rank, (sent, held, root) in enumerate(results):
        assert sent["all_reduce"] == 2 * (n - 1) * 480 // n
        assert sent["reduce_scatter"] == sent["all_gather"] == (n - 1) * 48
        assert sent["empty"] == 0
        assert sum(sent.values()) == held
        assert root == [480 * (n - 1) if rank == 0 else 480, 0]
    assert sum(sent["uneven"] for sent, _, _ in results) == 2 * (n - 1) * 7 * 4


def any_strides(rank, size):
    """The gaps between the elements stay as they were."""
    for all_reduce in (ring.all_reduce, ring.root_all_reduce):
        whole = torch.full((3, 4), float(rank + 1))
        all_reduce(whole.t()[::2])
        assert torch.equal(whole[:, ::2], torch.full((3, 2), size * (size + 1) / 2))
        assert torch.equal(whole[:, 1::2], torch.full((3, 2), float(rank + 1)))
    outputs = torch.zeros(4, size)
    ring.all_gather(list(outputs.t()), torch.full((4,), float(rank)))
    assert torch.equal(outputs, torch.arange(float(size)).expand(4, size))


def bad_arguments(rank, size):
    ones = torch.ones(4, 4)
    unlike = "the tensors must be alike"
    for call, message in [
        (lambda: ring.all_reduce(ones, ReduceOp.BAND), "op must be SUM or AVG, not .*BAND"),
        (lambda: ring.reduce_scatter(ones, [ones]), "expected one tensor per rank, 2 in all"),
        (lambda: ring.reduce_scatter(ones, [ones, ones[0]]), unlike),
        (lambda: ring.all_gather([ones, ones.double()], ones), unlike),
        (lambda: ring.all_gather([ones] * 2, ones.to("meta")), unlike),
        (lambda: ring.all_gather([ones] * 3, ones), "expected one tensor per rank, 2 in all"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    counts = torch.ones(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="can't be cast"):
        ring.all_reduce(counts, ReduceOp.AVG)
    assert counts.tolist() == [1, 1]  # nothing has been sent
    ring.all_reduce(ones)
    assert torch.equal(ones, torch.full((4, 4), 2.0))


def test_bad_arguments_are_named_before_anything_is_sent():
    run(bad_arguments, 2, 2)


def test_tensors_of_any_strides_are_reduced_and_gathered_in_place():
    run(any_strides, 2, 2)


def outside_of_the_group(rank):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.warns(UserWarning, match="belong to the"):
            dist.all_reduce(torch.ones(2), group=group)
        with pytest.raises(ValueError, match="rank 1 is not in the group"):
            ring.all_reduce(torch.ones(2), group=group)


@row(
    "differ",
    says="A collective called by a rank outside of the group.",
    torch="A warning, and nothing is sent.",
    miniddp="A `ValueError`, from `miniddp.ring` as from the classes.",
)
def test_a_rank_outside_of_the_group():
    run(outside_of_the_group, 2)


@row(
    "differ",
    says="Reductions other than the sum and the mean.",
    torch="PRODUCT, MIN, MAX and more.",
    miniddp="`miniddp.ring` has SUM and AVG, which divides first.",
)
def test_other_reductions():
    run(other_reductions, 2)


def other_reductions(rank):
    largest = torch.tensor([float(rank)])
    dist.all_reduce(largest, ReduceOp.MAX)
    assert largest == 1
    with pytest.raises(ValueError, match="op must be SUM or AVG"):
        ring.all_reduce(largest, ReduceOp.MAX)


@row("collectives", says="Without a process group: a `ValueError` that says so.")
@pytest.mark.parametrize("collectives", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_without_a_process_group(collectives):
    with pytest.raises(ValueError, match="process group has not been initialized"):
        collectives.all_reduce(torch.ones(2))


def reduce_unless_last(rank, seconds):
    impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    dist.barrier()  # before a rank leaves, let all others be connected
    if rank < dist.get_world_size() - 1:
        ring.all_reduce(torch.rand(1_000_000), group=impatient)
    time.sleep(seconds)


@pytest.mark.parametrize("seconds", [0, 6], ids=["left", "stalls"])
def test_a_neighbour_that_does_not_answer_is_named(seconds):
    with pytest.raises(RanksFailed) as caught:
        run(reduce_unless_last, 2, seconds)
    assert set(caught.value.tracebacks) == {0}
    message = "the ring is broken: rank 0 of 2 could not receive from rank 1 or send to 1"
    assert message in caught.value.tracebacks[0]
