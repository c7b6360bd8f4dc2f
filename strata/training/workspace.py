"""What one process has built and found out for the cuts of one graph, kept for the next task.

One object per process and graph: whoever trains or evaluates holds it and passes it on. Nothing in it changes a
result; it only saves building the same submodel, choosing the same places and measuring the same bytes again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from strata.execution.kept_outputs import KeptOutputs, digest_of
from strata.execution.norm_statistics import fixed_norms
from strata.execution.placement import forward_of, placement_for
from strata.execution.segments import Placement, Segmented
from strata.training import kernels
from strata.training.shortened import forward_in_groups, parts_may_join
from strata.training.submodels import BuiltSubmodel, build, structure_digest
from strata.training.vectorised import Grouped, NotVectorisable
from strata.training.vectorised.width import suits_kernels

if TYPE_CHECKING:
    from strata.execution import Execution
    from strata.graph import ChannelGraph, Cut
    from strata.training.settings import LocalTraining

SUBMODELS_KEPT = 32  # the levels of a fleet and what is evaluated, with room to spare
SUBMODEL_BYTES_KEPT = 256 * 2**20  # of their weights, in all; at least two submodels stay
STRUCTURES_KEPT = 1024  # random cuts come without end
NETWORKS_KEPT = 8  # of several devices

Forward = Callable[..., Tensor]  # a batch's inputs -> the network's outputs


class Workspace:
    def __init__(self, graph: ChannelGraph) -> None:
        self.graph = graph
        self._structures: OrderedDict[str, str] = OrderedDict()
        self._submodels: OrderedDict[tuple[str, str, bool], BuiltSubmodel] = OrderedDict()
        self._placements: dict[tuple[str, int | str | None, int, int | None, str | None], Placement | None] = {}
        self._networks: OrderedDict[tuple[str, int, str, bool, int | None], Grouped | None] = OrderedDict()
        self._measured: dict[Hashable, int] = {}
        self._joinable: dict[str, bool] = {}

    def structure(self, cut: Cut) -> str:
        """Equal for cuts whose submodels differ in weights only: tasks that share it share one module."""
        if cut.hash not in self._structures:
            self._structures[cut.hash] = structure_digest(self.graph, cut)
            if len(self._structures) > STRUCTURES_KEPT:
                self._structures.popitem(last=False)
        return self._structures[cut.hash]

    def submodel(self, cut: Cut, device: str = "cpu", maps: bool = False) -> BuiltSubmodel:
        """The module for this cut, with whatever weights it had last: `load` comes next. `maps`: frozen weights are in
        a mapped file."""
        key = (self.structure(cut), device, maps)
        if key not in self._submodels:
            self._submodels[key] = build(self.graph, cut, device, maps)
        self._submodels.move_to_end(key)
        while self._too_many():
            self._submodels.popitem(last=False)
        return self._submodels[key]

    def _too_many(self) -> bool:
        kept = self._submodels.values()
        return len(kept) > SUBMODELS_KEPT or (len(kept) > 2 and sum(one.bytes for one in kept) > SUBMODEL_BYTES_KEPT)

    def forward(self, cut: Cut, settings: LocalTraining, group: int | None = None, disk: Path | None = None) -> Forward:
        """How a device runs the cut's submodel in training: as a whole, in segments that are computed anew, or with
        frozen layers in chunks. `group`: samples that batch norms take together (shortened.py). `disk`: the device's
        folder for what frozen layers put out, where that is kept; by the weights that the submodel has now."""
        built = self.submodel(cut, settings.device, settings.maps)
        placement = self.placement(cut, settings)
        fixed = fixed_norms(self.graph, cut, settings)
        key = (placement, fixed, group)
        if key not in built.forwards:
            if group is None:
                built.forwards[key] = forward_of(built.module, placement, fixed)
            else:
                built.forwards[key] = forward_in_groups(built.module, fixed, group)
        found = built.forwards[key]
        if found is None:
            return built.module
        if not isinstance(found, Segmented):
            return partial(found, built.module)
        segmented = found
        kept = None
        if disk is not None and settings.cache_prefix is not None and segmented.frozen_names is not None:
            assert placement is not None
            how = (self.structure(cut), placement.order[: placement.chunked], sorted(fixed), settings.kernels)
            digest = digest_of(built.module, segmented.frozen_names, *how)
            kept = KeptOutputs(disk, digest, settings.cache_prefix)

        def forward(*inputs: Tensor) -> Tensor:
            # the second run, within backward, has to round like the first
            alike = partial(kernels.own_convolutions, kernels.in_use())
            return segmented(built.module, *inputs, surroundings=alike, kept=kept)

        return forward

    def placement(self, cut: Cut, settings: Execution) -> Placement | None:
        """Where activation checkpointing cuts the forward pass, and what runs in chunks; None: nowhere, nothing."""
        segments, chunk = settings.activation_checkpointing, settings.frozen_at_once
        if segments is None and chunk is None:
            return None
        constant = settings.norm_statistics if settings.caches else None
        key = (self.structure(cut), segments, settings.at_once, chunk, constant)
        if key not in self._placements:
            self._placements[key] = placement_for(self.graph, cut, settings)
        return self._placements[key]

    def parts_may_join(self, cut: Cut) -> bool:
        """Whether a batch in parts may be simulated as a whole."""
        key = self.structure(cut)
        if key not in self._joinable:
            self._joinable[key] = parts_may_join(self.graph, cut)
        return self._joinable[key]

    def recomputed_flops(self, cut: Cut, settings: Execution) -> int:
        """Per sample, what activation checkpointing adds to training the cut."""
        placement = self.placement(cut, settings)
        return 0 if placement is None else placement.recomputed_flops

    def network(self, cut: Cut, devices: int, settings: LocalTraining, group: int | None = None) -> Grouped | None:
        """So many devices' submodels as one; None where the cut has no such form. `group`: as in `forward`."""
        key = (self.structure(cut), devices, settings.device, bool(settings.kernels), group)
        if key not in self._networks:
            try:
                own_kernels = bool(settings.kernels) and suits_kernels(self.graph, cut)
                self._networks[key] = Grouped(self.graph, cut, devices, settings.device, own_kernels, group)
            except NotVectorisable:
                self._networks[key] = None
            while len(self._networks) > NETWORKS_KEPT:
                self._networks.popitem(last=False)
        self._networks.move_to_end(key)
        return self._networks[key]

    def measured(self, kind: Hashable, measure: Callable[[], int]) -> int:
        """Bytes of this kind of step, measured the first time."""
        if kind not in self._measured:
            self._measured[kind] = measure()
        return self._measured[kind]
