"""What a run's files do not say but its request does: the network, who holds which data, the bytes of a width.

A run folder may come from anybody, so nothing it names is imported: only Strata's own networks and data sets are
rebuilt, and only where they are proven to be those of the run. Otherwise a sentence says why a picture is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import PosixPath
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput, Infeasible, one_line
from strata.results.reading import RecordedRun, listed, mapping, number, whole

if TYPE_CHECKING:
    from strata.data import FederatedData
    from strata.graph import ChannelGraph

SHOWN_DEVICES = 120
SHOWN_CLASSES = 200
MOST_CLASSES, LARGEST_SIDE = 20_000, 512  # a damaged run must not make us build a network of gigabytes
# what settings that were never checked may bring about, here or in torch and numpy
UNFIT = (BadInput, Infeasible, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, MemoryError)


def _sentence(error: BaseException) -> str:
    return one_line(error, 200).rstrip(".")


class Missing(Exception):
    """Cannot be rebuilt; the text says why."""


class _ReadOnly(PosixPath):
    """A folder that a run chose. Loaders read it, but pictures that were not decoded there before are not now."""

    def mkdir(self, *_: Any, **__: Any) -> None:
        raise Missing("the data set has not been decoded yet, and a report writes nothing where a run tells it to")


def _load(name: str, place: str | None) -> FederatedData:
    from strata.data import CATALOGUE, default_root

    try:
        root = _ReadOnly(default_root() if place is None else place).expanduser()
        found = CATALOGUE[name].find(root)
        if found is None:
            raise Missing(f"the data is not here ({name} is not in {root})")
        return CATALOGUE[name].load(found)
    except (*UNFIT, OSError) as error:
        raise Missing(f"the data is not here ({_sentence(error)})") from error


@dataclass
class Reconstruction:
    """Rebuilds things once, however many runs share them."""

    _graphs: dict[tuple[Any, ...], ChannelGraph] = field(default_factory=dict)
    _data: dict[tuple[Any, ...], FederatedData] = field(default_factory=dict)
    _holdings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def graph(self, run: RecordedRun) -> ChannelGraph:
        from strata.graph import ChannelGraph
        from strata.models.loading import BUILT_IN, load_model

        name = run.request.get("model")
        if not isinstance(name, str) or name not in BUILT_IN:
            raise Missing("the network is not one of Strata's own, and a report imports no code that a run names")
        classes = whole(mapping(run.settings.get("data")).get("classes"))
        shape = self._shape(run)
        width = "inner" if run.settings.get("width") == "inner" else "residual"
        key = (name, classes, shape, width)
        if key not in self._graphs:
            if not 1 <= (classes or 0) <= MOST_CLASSES or max(shape) > LARGEST_SIDE:
                raise Missing("its class count or input shape is not one of a network of Strata's")
            try:
                self._graphs[key] = ChannelGraph(load_model(name, classes, shape), shape, width=width)
            except UNFIT as error:
                raise Missing(_sentence(error)) from error
        graph = self._graphs[key]
        if mapping(run.settings.get("model")).get("structure") != graph.hash:
            raise Missing(f"{name} is another network in this version of Strata than in the run's")
        return graph

    def _shape(self, run: RecordedRun) -> tuple[int, ...]:
        given = run.plan.get("input") or run.request.get("input")
        if isinstance(given, list) and given and all(whole(side) for side in given):
            return tuple(int(side) for side in given)
        return tuple(self.data(run).input_shape)

    def data(self, run: RecordedRun) -> FederatedData:
        from strata.data import CATALOGUE
        from strata.runs.folder import describe_data

        name, place = run.request.get("data"), run.request.get("data_dir")
        if not isinstance(name, str):
            raise Missing("the run was started from Python with data of its own")
        if name not in CATALOGUE:
            raise Missing("the data is not one of Strata's data sets, and a report opens no pictures that a run names")
        if CATALOGUE[name].read is not None or run.request.get("objective") is not None:
            raise Missing("text, and data learnt by an objective of its own, is not read again for a report")
        place = place if isinstance(place, str) else None
        key = (name, place)
        if key not in self._data:
            self._data[key] = _load(name, place)
        data = self._data[key]
        if describe_data(data)["sha256"] != mapping(run.settings.get("data")).get("sha256"):
            raise Missing(f"the data set {name} here is not the one the run used")
        return data

    def holdings(self, run: RecordedRun) -> dict[str, Any]:
        """Samples per device (rows) and class (columns), of the first devices."""
        from strata.data import hold_out, parse_partition
        from strata.data.distribution import holdings

        text = run.settings.get("partition")
        if not isinstance(text, str) or text.startswith(("own:", "file:")):
            raise Missing("the run was given a partition of its own, which its folder does not hold")
        data = self.data(run)
        devices, validation = whole(run.settings.get("devices")) or 0, run.settings.get("validation")
        key = repr(
            (text, run.settings.get("sizes"), devices, run.seed, validation, data.name, run.request.get("data_dir"))
        )
        if key not in self._holdings:
            try:
                if isinstance(validation, float) and validation:
                    data, _ = hold_out(data, validation, run.seed)
                sizes = run.settings.get("sizes")
                partition = parse_partition(text, data, devices, run.seed, sizes if isinstance(sizes, str) else None)
                counts = holdings(partition, data.train.targets, data.classes, SHOWN_DEVICES)
            except UNFIT as error:
                raise Missing(_sentence(error)) from error
            names = [str(name) for name in data.class_names] or [str(c) for c in range(data.classes)]
            self._holdings[key] = {
                "partition": text,
                "seed": run.seed,
                "devices": devices,
                "classes": names[:SHOWN_CLASSES],
                "counts": counts[:, :SHOWN_CLASSES].tolist(),
                "all_classes": data.classes,
            }
        return self._holdings[key]

    def accounted(self, run: RecordedRun) -> dict[str, Any]:
        """What a method that scales width needs at its widest device, in the accounting that set its budget."""
        from strata.execution import Execution, memory

        graph = self.graph(run)
        ratios = mapping(run.settings.get("method")).get("constraints")
        scales = [ratio for ratio in map(number, listed(ratios)) if ratio is not None]
        training = mapping(run.settings.get("training"))
        batch, micro_batch = whole(training.get("batch_size")), whole(training.get("micro_batch"))
        given = scales
        if run.method == "fedavg":
            scales = [1.0]
        elif run.method == "small" and scales:
            scales = [min(scales)]
        if not scales or not batch:
            raise Missing("the run does not say its width")
        budgets = [size for size in map(number, listed(run.request.get("budgets"))) if size is not None]
        accounting = run.request.get("accounting") or ("peak" if run.request.get("budgets") else "paper")
        segments = training.get("activation_checkpointing")
        if segments is not None and accounting == "paper":
            raise Missing("the paper's accounting does not know what activation checkpointing saves")
        try:
            execution = Execution(batch, micro_batch, segments)
            cost = partial(memory, graph, execution=execution, accounting=accounting)
            need = cost(graph.prefix(max(scales)))
            if not budgets and run.method != "fedavg":  # a constraint means: what the model of this width needs
                budgets = [cost(graph.prefix(s)).total for s in set(given)]
        except UNFIT as error:
            raise Missing(_sentence(error)) from error
        parts: Mapping[str, int] = {
            "weights_bytes": need.weights,
            "gradients_bytes": need.gradients,
            "activations_bytes": need.activations,
        }
        return {"step": 0, "memory_bytes": need.total, "accounting": accounting, "budgets": sorted(budgets), **parts}
