"""The network model against simulations, links that are known, and what others measured."""

import doctest
import re
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instruments import cost, network, predictions
from instruments.cost import Link
from instruments.network import ALGORITHMS, NODES, Network, fit_table, steps, volume
from instruments.predictions import GIB, MIB

SLOW = Link(1e-5, 1e-9)
ANY_SIZE = st.floats(0, 1e11, allow_subnormal=False)
ANY_NODE = st.sampled_from(list(NODES.values()))
RANKS = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 24, 64, 1024])
DOUBLINGS = [2**power for power in range(3, 34)]


# What the busiest port sends


def two_trees(size: int) -> float:
    """Tensors that the busiest rank sends: each tree carries one half, up and then down.

    The first tree is a heap; in the second the ranks stand in the opposite order, so that who has
    children in one is a leaf in the other.
    """
    sent = [0.0] * size
    for tree in (list(range(size)), list(reversed(range(size)))):
        for place, rank in enumerate(tree):
            children = [child for child in (2 * place + 1, 2 * place + 2) if child < size]
            sent[rank] += 0.5 * ((place > 0) + len(children))
    return max(sent)


@pytest.mark.parametrize("size", range(2, 65))
def test_volume_and_steps_are_those_that_are_counted(size: int) -> None:
    assert volume("ring", size) == pytest.approx(cost.ring_all_reduce_bytes(1, size))
    assert volume("tree", size) >= two_trees(size)
    assert size < 6 or volume("tree", size) == two_trees(size)
    assert steps("ring", size) == cost.ring_all_reduce_seconds(0, size, Link(1, 0))
    assert steps("tree", size) == cost.tree_all_reduce_seconds(0, size, Link(1, 0))


def test_a_switch_that_adds_sends_a_tensor_up_and_a_part_down() -> None:
    """By hand for 4 ranks: the switch reads 4 quarters from each, and takes one sum back."""
    assert volume("switch", 4) == 4 / 4 + 1 / 4
    assert volume("switch", 8) / volume("ring", 8) == pytest.approx((8 + 1) / (2 * (8 - 1)))
    assert all(volume(name, 1) == steps(name, 1) == 0 for name in ALGORITHMS)


# From the hardware


def long_message_beta(node: Network, world_size: int, algorithm: str | None = None) -> float:
    """Seconds per byte when nothing but bytes matters."""
    return node.all_reduce_seconds(1e15, world_size, algorithm) / 1e15


def test_all_cards_of_a_node_send_together() -> None:
    """Eight cards of 50 GB/s make 400 GB/s: one ring through 64 GPUs runs at that, not at 50."""
    fast = Link(0, 1e-13)
    one, eight = (Network(8, fast, Link(0, 1 / 50e9), rails=rails) for rails in (1, 8))
    assert long_message_beta(one, 64, "ring") == pytest.approx(volume("ring", 64) / 50e9)
    assert long_message_beta(eight, 64, "ring") == pytest.approx(volume("ring", 64) / 400e9)


def test_of_two_nodes_a_tree_sends_half_of_what_a_ring_does() -> None:
    node = Network(8, Link(0, 1e-13), Link(0, 1e-10), rails=4)
    assert long_message_beta(node, 16) == pytest.approx(1e-10 / 4 / network.TREE)
    assert long_message_beta(node, 16, "ring") == pytest.approx(volume("ring", 16) * 1e-10 / 4)
    assert long_message_beta(node, 32) == pytest.approx(volume("ring", 32) * 1e-10 / 4)


def test_the_slower_of_node_and_cards_counts() -> None:
    node = Network(4, Link(0, 2e-10), Link(0, 1e-10), rails=4)
    assert long_message_beta(node, 16, "ring") == pytest.approx(volume("ring", 16) * 2e-10)


def test_hops_are_counted_where_they_are() -> None:
    """Two nodes of four: of the ring's 14 hops, 2/8 leave a node; a tree chains 3 and crosses 1."""
    node = Network(4, Link(1e-3, 0), Link(1.0, 0))
    at_rest = {
        name: node.all_reduce_seconds(0, 8, name) - network.LAUNCH for name in ("ring", "tree")
    }
    assert at_rest == pytest.approx({"ring": 3.5 + 10.5e-3, "tree": 2 + 6e-3})
    assert node.all_reduce_seconds(0, 4, "ring") == pytest.approx(6e-3 + network.LAUNCH)


def test_chunks_cost_most_where_latency_and_transfer_are_equal() -> None:
    node = Network(2, Link(0.5, 1.0))
    latency = 1 + network.LAUNCH
    assert node.all_reduce_seconds(latency, 2, "ring") == pytest.approx(4 * latency)
    far = 1e6
    extra = node.all_reduce_seconds(far, 2, "ring") - far - latency
    assert extra == pytest.approx(network.FILL * latency)


@given(ANY_SIZE, ANY_NODE, st.sampled_from([2, 8, 16, 64]))
def test_the_parts_make_the_whole(num_bytes: float, node: Network, world_size: int) -> None:
    whole = node.all_reduce_seconds(num_bytes, world_size)
    parts = node.parts(num_bytes, world_size)
    assert sum(parts) == pytest.approx(whole)
    assert parts.latency >= network.LAUNCH


def test_the_parts_of_a_ring_by_hand() -> None:
    """Latency and transfer of 1.5 s each: the chunks cost twice that, at most."""
    node = Network(2, Link(0.75 - network.LAUNCH / 2, 1e-9))
    latency, transfer, chunks = node.parts(1.5e9, 2)
    assert (latency, transfer, chunks) == pytest.approx((1.5, 1.5, 3.0), rel=1e-3)


@given(ANY_SIZE, ANY_NODE, RANKS)
def test_the_fastest_algorithm_is_chosen(num_bytes: float, node: Network, world_size: int) -> None:
    names = [name for name in ALGORITHMS if name != "switch" or node.switch]
    fastest = min(node.all_reduce_seconds(num_bytes, world_size, name) for name in names)
    assert node.all_reduce_seconds(num_bytes, world_size) == fastest
    assert (fastest == 0) is (world_size == 1)


@given(ANY_SIZE, ANY_SIZE, ANY_NODE, RANKS)
def test_more_bytes_never_take_less(a: float, b: float, node: Network, world_size: int) -> None:
    small, large = sorted((a, b))
    assert node.all_reduce_seconds(small, world_size) <= node.all_reduce_seconds(large, world_size)


@given(ANY_SIZE, RANKS, st.floats(1e-12, 1e-8), st.floats(1e-12, 1e-8), st.integers(1, 8))
def test_two_levels_lie_between_the_larger_and_the_sum(
    num_bytes: float, world_size: int, inside: float, card: float, rails: int
) -> None:
    node = Network(8, Link(0, inside), Link(0, card), rails)
    low, high = node.two_level_bounds(num_bytes, world_size)
    assert low <= high <= 2 * low
    per_node = min(8, world_size)
    nodes = max(1, world_size // 8)
    within = cost.ring_all_reduce_seconds(num_bytes, per_node, node.inside)
    share_of_cards = Link(0, card * per_node / rails)
    between = cost.ring_all_reduce_seconds(num_bytes / per_node, nodes, share_of_cards)
    assert high == pytest.approx(within + between)
    assert low == pytest.approx(max(within, between))


def test_four_nodes_of_b200_lie_within_their_bounds() -> None:
    low, high = (1e3 * time for time in predictions.two_levels())
    assert (round(low, 1), round(high, 1)) == (16.1, 24.5)
    measured = 1e3 * predictions.curve_of("b200_32gpu").seconds[4 * GIB]
    assert measured == pytest.approx(22.05, abs=0.01)
    assert low < measured < high


# From a table


def all_reduces(link: Link, world_size: int, sizes: list[int]) -> list[float]:
    return [cost.ring_all_reduce_seconds(size, world_size, link) for size in sizes]


@given(
    st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8), st.integers(2, 64), st.integers(2, 64), ANY_SIZE
)
def test_a_link_is_found_at_any_size_and_for_any_number_of_ranks(
    alpha: float, beta: float, known: int, asked: int, num_bytes: float
) -> None:
    """From 1 KiB to 64 TiB in steps of 8, so that bytes rule the last time and alpha the first."""
    link, sizes = Link(alpha, beta), [2**power for power in range(10, 47, 3)]
    measured = fit_table(sizes, all_reduces(link, known, sizes), known)
    exact = cost.ring_all_reduce_seconds(num_bytes, known, link)
    assert measured.all_reduce_seconds(num_bytes) == pytest.approx(exact, rel=1e-6)
    elsewhere = cost.ring_all_reduce_seconds(num_bytes, asked, link)
    assert measured.all_reduce_seconds(num_bytes, asked) == pytest.approx(elsewhere, rel=0.02)


@given(st.lists(st.floats(1e-6, 10), min_size=2, max_size=31), ANY_SIZE, ANY_SIZE, RANKS)
def test_time_never_falls_with_the_size(
    times: list[float], a: float, b: float, world_size: int
) -> None:
    measured = fit_table(DOUBLINGS[: len(times)], times, 8)
    small, large = sorted((a, b))
    first, second = (measured.all_reduce_seconds(size, world_size) for size in (small, large))
    assert 0 <= first <= second * (1 + 1e-12)


@given(st.lists(st.floats(1e-6, 10), min_size=2, max_size=31))
def test_a_table_that_never_falls_is_kept(times: list[float]) -> None:
    measured = fit_table(DOUBLINGS[: len(times)], sorted(times), 8)
    assert measured.seconds == tuple(sorted(times))


def test_one_outlier_changes_nothing_else() -> None:
    times = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert fit_table(DOUBLINGS[:5], [1.0, 50.0, 3.0, 4.0, 5.0], 8).seconds == (1, 3, 3, 4, 5)
    assert fit_table(DOUBLINGS[:5] * 3, [*times, *times, 9.0, 0.1, 90.0, 0.1, 9.0], 8).seconds == (
        1, 2, 3, 4, 5,
    )  # fmt: skip


def test_beyond_the_table_the_last_doubling_goes_on() -> None:
    measured = fit_table([100, 200, 400], [10.0, 11.0, 15.0], 2)
    assert measured.all_reduce_seconds(800) == 15 + 400 * 4 / 200
    assert measured.all_reduce_seconds(0) == 9
    flat = fit_table([100, 200], [10.0, 10.0], 2)
    assert flat.all_reduce_seconds(2000) == 100, "a bandwidth without end is none"
    steep = fit_table([100, 200], [10.0, 40.0], 2)
    assert steep.all_reduce_seconds(50) == 5


def test_other_numbers_of_ranks_follow_the_algorithm() -> None:
    """All of the first time is latency, all that is more in the second is transfer."""
    for algorithm in ALGORITHMS:
        measured = fit_table([1, 10**12], [1.0, 1001.0], 8, algorithm)
        later = steps(algorithm, 4) / steps(algorithm, 8)
        longer = volume(algorithm, 4) / volume(algorithm, 8)
        assert measured.all_reduce_seconds(1, 4) == pytest.approx(later, rel=1e-3)
        assert measured.all_reduce_seconds(10**15, 4) == pytest.approx(1e6 * longer, rel=2e-3)
        assert measured.all_reduce_seconds(10**6, 1) == 0
        assert measured.on(8) == measured


def test_the_examples_of_the_module_hold() -> None:
    found = doctest.testmod(network)
    assert found.attempted == 3
    assert not found.failed


# What others measured


def test_every_published_all_reduce_is_predicted() -> None:
    lines, _ = predictions.report()
    sizes = [line for line in lines if re.match(r" *\d+ +[\d.]+ +[\d.]+ +[+-]", line)]
    points = [size for curve in predictions.curves() for size in curve.seconds]
    assert len(sizes) == len(points) > 480
    assert len({(curve.table, curve.setup) for curve in predictions.curves()}) > 20


def test_no_size_sees_itself() -> None:
    curve = predictions.curve_of("h100_8gpu")
    changed = replace(curve, seconds=curve.seconds | {GIB: 1.0})
    honest, same = (predictions.from_other_sizes(seen)[GIB] for seen in (curve, changed))
    assert (honest.predicted, same.measured) == (same.predicted, 1.0)


def test_predictions_are_within_their_bounds() -> None:
    """Per set-up a median of 5 % and a worst of 25 % from 1 MiB up, 50 % below; training 10 %."""
    assert predictions.report()[1] == []


def test_a_set_up_with_a_bound_of_its_own_needs_it_and_its_table_does_not() -> None:
    for setup, bound in predictions.MEDIANS.items():
        table = predictions.curve_of(setup).table
        errors = {
            curve.setup: [
                abs(found.error)
                for size, found in predictions.from_other_sizes(curve).items()
                if size >= MIB
            ]
            for curve in predictions.curves()
            if curve.table == table
        }
        assert predictions.MEDIAN < median(errors[setup]) <= bound
        together = [error for of_setup in errors.values() for error in of_setup]
        assert median(together) <= predictions.MEDIAN


@pytest.mark.parametrize("setup", predictions.ASSUMED)
def test_infiniband_nodes_that_are_taken_for_a_dgx(setup: str) -> None:
    """From 1 GiB up right to a tenth, but for one table, whose nodes cannot be such."""
    found = predictions.from_hardware(predictions.curve_of(setup))
    errors = [prediction.error for size, prediction in found.items() if size >= GIB]
    assert len(errors) >= 2
    if setup in predictions.NO_DGX:
        assert max(errors) < -0.35
    else:
        assert max(map(abs, errors)) < 0.10


def test_what_is_no_dgx_is_faster_than_its_four_cards() -> None:
    """Bus bandwidth over the wire: a ring of four nodes, and more so a tree, would stay below."""
    curve = predictions.curve_of("a100_32gpu_sharp")
    rates = [size * volume("ring", 32) / time for size, time in curve.seconds.items()]
    assert max(rates) > 4 * 200e9 / 8
    assert volume("tree", 4) > volume("ring", 4)


def test_below_a_gibibyte_all_reduces_take_longer_than_data_sheets_promise() -> None:
    by_size = {
        (curve.setup, size): found
        for curve in predictions.curves()
        for size, found in predictions.from_hardware(curve).items()
        if MIB <= size < GIB
    }
    longest = max(found.measured / found.predicted for found in by_size.values())
    assert predictions.times_promised(MIB) == pytest.approx(longest)
    assert 1 < predictions.times_promised(32 * MIB) < longest


def test_sparse_tables_are_worse() -> None:
    errors = [abs(found.error) for half in predictions.half_tables() for found in half]
    broken = [
        half
        for half in predictions.half_tables()
        if not predictions.within(half, predictions.WORST, predictions.MEDIAN)
    ]
    assert len(predictions.half_tables()) == 36
    assert 0 < len(broken) < 18
    assert median(errors) < 0.04
    assert predictions.WORST < max(errors) < 0.5


@pytest.mark.parametrize("bound", ["MEDIAN", "WORST", "WORST_BELOW", "WORST_TRAINING"])
def test_a_bound_that_is_broken_is_an_error(
    bound: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predictions, bound, 0.001)
    assert predictions.main() == 1
    assert "Out of bounds:\n" in capsys.readouterr().out


@pytest.mark.parametrize("first", [0, 1])
def test_every_other_size_is_enough(first: int) -> None:
    """Of each table from 1 MiB up, half of the sizes predict the other half."""
    errors = []
    for curve in predictions.curves():
        sizes = sorted(curve.seconds)
        left_out = [size for size in sizes[1:-1][first::2] if size >= MIB]
        measured = curve.link(*left_out)
        errors += [
            abs(measured.all_reduce_seconds(size) / curve.seconds[size] - 1) for size in left_out
        ]
    assert len(errors) > 100
    assert median(errors) < 0.03
    assert max(errors) < 0.25


def test_the_largest_sizes_are_foreseen() -> None:
    """A table that ends at a quarter of its last size, if that is 64 MiB at least, predicts it."""
    errors = {}
    for curve in predictions.curves():
        *known, _, last = sorted(curve.seconds)
        if known[-1] >= 64 * MIB:
            time = curve.link(last // 2, last).all_reduce_seconds(last)
            errors[curve.table, curve.setup] = abs(time / curve.seconds[last] - 1)
    assert len(errors) > 15
    assert median(errors.values()) < 0.03
    assert max(errors.values()) < 0.20


def test_eighteen_trainings_without_overlap() -> None:
    """One GPU's time and the link of the same hosts: 8, 16 and 32 GPUs, three models, two links."""
    found = predictions.plain_training()
    assert len(found) == 18
    assert max(abs(training.error) for training in found) < 0.10


def test_the_parameters_of_the_trainings_are_counted() -> None:
    """`BertForPreTraining`: embeddings, layers, pooler, and the two heads; weights of the decoder
    are those of the embedding."""

    def bert(layers: int, width: int, vocabulary: int = 30528) -> int:
        norm, square = 2 * width, width * width + width
        embeddings = (vocabulary + 512 + 2) * width + norm
        layer = (
            4 * square + norm + (4 * width * width + 4 * width) + (4 * width * width + width) + norm
        )
        heads = square + norm + vocabulary + 2 * width + 2
        return embeddings + layers * layer + square + heads

    assert predictions.GRADIENTS["BERT-Base"] == bert(12, 768)
    assert predictions.GRADIENTS["BERT-Large"] == bert(24, 1024)


def test_the_switch_explains_what_fewer_gpus_reach() -> None:
    errors = [abs(found.error) for found in predictions.switch_that_adds()]
    assert len(errors) == 16
    assert max(errors) < 0.07


def test_latency_alone_explains_the_decay_but_for_its_end() -> None:
    by_setup = {found.setup: found.error for found in predictions.playbook()}
    assert max(abs(by_setup[f"{gpus} GPUs"]) for gpus in (8, 16, 32, 64)) < 0.02
    assert by_setup["256 GPUs"] == pytest.approx(0.13, abs=0.005)


def test_neighbouring_sizes_say_what_25_mib_reach() -> None:
    """About half of the peak inside a node, about a fifth across four."""
    for setup, share in (("h100_8gpu", 0.57), ("h200_8gpu", 0.54), ("b200_32gpu", 0.21)):
        measured = predictions.curve_of(setup).link()
        rates = [size / measured.all_reduce_seconds(size) for size in (25 * MIB, 16 * GIB)]
        assert rates[0] / rates[1] == pytest.approx(share, abs=0.01)


def test_larger_nodes_are_faster() -> None:
    for slower, faster in pairwise(["p4de", "DGX A100", "DGX H100", "DGX B200"]):
        for world_size in (8, 16, 64):
            times = [NODES[name].all_reduce_seconds(GIB, world_size) for name in (slower, faster)]
            assert times[0] >= times[1]


# Bad input

BAD = {
    "20 ranks do not fill nodes of 8": lambda: NODES["p5"].all_reduce_seconds(1, 20),
    "the switch of these nodes does not add": (
        lambda: NODES["DGX A100"].all_reduce_seconds(1, 8, "switch")
    ),
    "algorithm must be one of ring, tree, switch, not 'gossip'": lambda: volume("gossip", 2),
    "not 'flood'": lambda: NODES["p5"].all_reduce_seconds(1, 8, "flood"),
    "num_bytes must be a finite number of at least 0, not -1": (
        lambda: NODES["p5"].two_level_bounds(-1, 8)
    ),
    "world_size must be an integer of at least 1, not 0": (
        lambda: NODES["p5"].all_reduce_seconds(1, 0)
    ),
    "ranks_per_node must be": lambda: Network(0, SLOW),
    "16 ranks need several nodes, which need a rail": (
        lambda: Network(8, SLOW).all_reduce_seconds(1, 16)
    ),
    "rails must be an integer of at least 1, not 0": lambda: Network(8, SLOW, SLOW, 0),
    "fit_table needs one time per size": lambda: fit_table([1, 2], [1.0], 2),
    "two different sizes at least, not 2 sizes \\(1 different\\)": lambda: fit_table(
        [1, 1], [1, 2], 2
    ),
    "every size and every time must be more than 0": lambda: fit_table([0, 1], [1, 2], 2),
    "shortest_time must be a finite number of at least 0, not -1": lambda: fit_table(
        [1, 2], [-1, 2], 2
    ),
    "an all-reduce of one rank uses no link": lambda: fit_table([1, 2], [1, 2], 1),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_gets_one_clear_line(message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        BAD[message]()
    assert "\n" not in str(error.value)
