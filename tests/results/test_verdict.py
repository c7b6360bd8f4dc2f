from __future__ import annotations

from strata.results.appearance import colour_of, shades_of
from strata.results.verdict import Candidate, frontier, in_words, is_tie

MIB = 2**20


def one(label: str, accuracy: float, mib: float, std: float | None = None, seeds: int = 1) -> Candidate:
    return Candidate(label, accuracy, std, seeds, mib * MIB)


def test_who_leads_within_which_cost() -> None:
    ways = [one("slt", 0.56, 10.6), one("small", 0.50, 6.5), one("lean", 0.66, 8.0), one("fedavg", 0.71, 51.2)]
    assert [[c.label for c in best.leaders] for best in frontier(ways)] == [["small"], ["lean"], ["fedavg"]]
    assert in_words(ways, "within {}") == [
        "Within 6.50 MiB, small is the most accurate (50.0 %).",
        "Within 8.00 MiB, lean is the most accurate (66.0 %).",
        "Within 51.20 MiB, fedavg is the most accurate (71.0 %).",
    ]


def test_ties_are_said_as_ties() -> None:
    ways = [one("a", 0.600, 4), one("b", 0.603, 4.05), one("c", 0.500, 4)]  # 4.05 is as good as 4
    assert in_words(ways, "within {}") == ["Within 4.05 MiB, b and a tie (60.3 and 60.0 %)."]
    dearer = [one("a", 0.600, 4), one("b", 0.603, 9)]  # more cost buys nothing that can be told
    assert in_words(dearer, "within {}") == ["Within 4.00 MiB, a is the most accurate (60.0 %)."]


def test_seeds_say_how_far_accuracies_scatter() -> None:
    assert is_tie(one("a", 0.60, 1, 0.02, 3), one("b", 0.63, 1, 0.02, 3))  # 3 points, two standard errors are 3.27
    assert not is_tie(one("a", 0.60, 1, 0.005, 3), one("b", 0.63, 1, 0.005, 3))
    assert not is_tie(one("a", 0.60, 1), one("b", 0.606, 1)) and is_tie(one("a", 0.60, 1), one("b", 0.604, 1))


def test_a_colour_says_the_method() -> None:
    slt, fedavg, again, third = shades_of(["slt", "fedavg", "fedavg", "fedavg"])
    assert (slt, fedavg) == (colour_of("slt"), colour_of("fedavg"))
    assert len({fedavg, again, third}) == 3
    assert again == "#" + "".join(f"{round(0.6 * int(fedavg[p : p + 2], 16)):02x}" for p in (1, 3, 5))
