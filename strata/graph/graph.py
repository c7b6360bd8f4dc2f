"""ChannelGraph: which channels of a model hang together, and the cuts that can be made of it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from strata.core.errors import BadInput
from strata.graph.batch_norms import BatchNorm, find_batch_norms
from strata.graph.cached import cached_exports
from strata.graph.channels import ALWAYS, Ids
from strata.graph.cut import Cut, Kept
from strata.graph.export import EXAMPLE_BATCH, Exported, check_weights
from strata.graph.ids import tables_of
from strata.graph.inputs import InputsLike, InputSpec
from strata.graph.layers import find_layers
from strata.graph.outputs import further_scores, needed_for
from strata.graph.propagation import Pinned, Propagation
from strata.graph.rows import Rows, Run
from strata.graph.sized import SizedOp, sized_ops, static_of
from strata.graph.stream import stream_nodes
from strata.graph.submodel import SubModel
from strata.graph.tied import own_state
from strata.graph.values import concrete_size
from strata.ops.resize import Along

WIDTHS = ("residual", "inner")


@dataclass(frozen=True)
class Vector:
    """Ids along one dim of a value, as positions in the table of all ids that occur."""

    dim: int
    slots: int  # index into ChannelGraph._vectors
    batched: bool


@dataclass(frozen=True)
class Requirement:
    """An input must be cut along dim from what it has to what the node needs."""

    input: fx.Node
    dim: int
    have: int | None  # vector; None: the input is whole there
    need: int


@dataclass(frozen=True)
class Mode:
    """The training or the evaluation graph with its channels."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]  # in the order of the InputSpec
    outputs: dict[str, fx.Node]  # the first is the one that methods learn from
    vectors: dict[fx.Node, Any]  # Vector | None, or a list of them for operations with several outputs
    requirements: dict[fx.Node, tuple[Requirement, ...]]
    _needed: dict[str, set[fx.Node]] = field(default_factory=dict)

    @property
    def output(self) -> fx.Node:
        return next(iter(self.outputs.values()))

    def needed(self, output: str) -> set[fx.Node]:
        """What this output needs."""
        if output not in self._needed:
            self._needed[output] = needed_for(self.graph, self.outputs[output], len(self.outputs))
        return self._needed[output]


class ChannelGraph:
    def __init__(
        self,
        model: nn.Module,
        input_shape: InputsLike,
        layers: Sequence[Sequence[str]] | None = None,
        strict: bool = False,
        width: str = "residual",
    ) -> None:
        """`input_shape`: the shape of one float input, without the batch; or an InputSpec for others, or several.
        `width`: what prefix, rolling, random and slt cut: "residual", all channels; "inner", all but those of the
        residual stream, which blocks add to."""
        if width not in WIDTHS:
            raise BadInput(f"width is one of {', '.join(WIDTHS)}, not {width!r}")
        self.width = width
        self.inputs = InputSpec.of(input_shape, model)
        check_weights(model)
        state = own_state(model)
        self.state_shapes = {name: tuple(t.shape) for name, t in state.items()}
        self.state_dtypes = {name: t.dtype for name, t in state.items()}
        self.parameter_names = tuple(name for name, _ in model.named_parameters())
        self.fixed = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)  # never trained
        self.buffer_names = tuple(name for name in state if name not in set(self.parameter_names))
        exports = cached_exports(model, self.inputs)
        exported = exports.modes
        # what the model returns, by name: shapes without the batch; the first is what methods learn from
        self.outputs = {name: _per_sample(node) for name, node in exported["train"].outputs.items()}
        _check_scores(model, exported["train"].output)
        self.leaf_outputs, self.constants = exports.leaf_outputs, exports.constants
        shapes = {**self.state_shapes, **{name: tuple(t.shape) for name, t in self.constants.items()}}
        propagation = Propagation(shapes, self.parameter_names)
        for one in exported.values():
            propagation.walk(one.graph, one.output)
            for other in further_scores(one.outputs):
                propagation.pin(other)
        propagation.settle()
        self.pinned: tuple[Pinned, ...] = tuple(propagation.pinned)
        if strict and self.pinned:
            raise BadInput(f"Strata has no rule for {self.pinned[0]}, and strict=True forbids to keep it whole.")
        self._compile(propagation, exported)
        sources = {n: s for n, s in propagation.source_nodes.items() if n.graph is exported["train"].graph}
        free = {node for node in sources if propagation.has_choice(node)}
        found = find_layers(exported["train"].graph, sources, free, self.parameter_names, layers)
        # a parameter of several uses is in the layer of its last one; `layers_of` has all of them
        self.layer_names, self.layer_of, self.layers_of = found.names, found.of_parameter, found.uses
        self._users = found.users
        self._stream = self._stream_classes(exported["train"].graph, sources) if width == "inner" else frozenset()
        self.depth = len(found.names)
        if not self.depth:
            raise BadInput(f"{type(model).__name__} has no layer that can be cut before its classifier.")
        self.hash = self._structural_hash()
        self._full: Cut | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of a model of one input."""
        if not self.inputs.single:
            raise BadInput(f"the model takes {len(self.inputs.inputs)} inputs ({self.inputs}), not one of one shape.")
        return self.inputs.inputs[0].shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of the output that methods learn from, without the batch."""
        return next(iter(self.outputs.values()))

    @property
    def classes(self) -> int:
        """How many scores there are per sample (or per position): the size of the output's last dim, whatever for; of
        pictures, [batch, classes, height, width], the first after the batch."""
        return self.output_shape[0 if len(self.output_shape) == 3 else -1]

    @cached_property
    def ids(self) -> dict[str, tuple[str, int]]:
        """Of each input that is looked up in a table of embeddings, the smallest such table and its rows."""
        mode = self._modes["train"]
        found: dict[str, tuple[str, int]] = {}
        for name, node in zip(self.inputs.names, mode.inputs, strict=True):
            rows = {table: self.state_shapes[table][0] for table in tables_of(node) if table in self.state_shapes}
            if rows:
                smallest = min(rows, key=lambda table: rows[table])
                found[name] = smallest, rows[smallest]
        return found

    @cached_property
    def batch_norms(self) -> tuple[BatchNorm, ...]:
        """Those that use the batch's statistics in training."""
        return find_batch_norms(self._modes["train"].graph, self.parameter_names)

    # --- cuts --------------------------------------------------------------------------------------------------

    def full(self) -> Cut:
        if self._full is None:
            self._full = self._cut(np.ones(self._leaf_count, dtype=bool), frozenset())
        return self._full

    def prefix(self, scale: float) -> Cut:
        """The first floor(s * M) channels everywhere."""
        return self._cut_runs(scale, lambda run, count: run.classes[:count])

    def rolling(self, scale: float, shift: int) -> Cut:
        """A window that starts at shift mod M and wraps round."""
        return self._cut_runs(
            scale, lambda run, count: [run.classes[(shift + i) % len(run.classes)] for i in range(count)]
        )

    def random(self, scale: float, generator: torch.Generator) -> Cut:
        return self._cut_runs(
            scale,
            lambda run, count: [
                run.classes[int(i)] for i in torch.randperm(len(run.classes), generator=generator)[:count]
            ],
        )

    def slt(self, k_frozen: int, k_trained: int, scale: float) -> Cut:
        """Layers up to k_trained whole, those up to k_frozen frozen, the rest (the head) a prefix of floor(s * M)."""
        _check_scale(scale)
        if not 0 <= k_frozen <= k_trained <= self.depth:
            raise BadInput(
                f"k_frozen={k_frozen}, k_trained={k_trained}: need 0 <= k_frozen <= k_trained <= {self.depth} layers."
            )
        wanted: dict[str, Iterable[int]] = {}
        for name, classes in self._source_classes.items():
            if min(self.layers_of[name]) > k_trained:
                row = self._rows.of_source[name]  # channels that meet each other (halves of a gate) count as one
                chosen = {ALWAYS}
                for piece in self._rows.pieces[name]:
                    count = len(piece.classes) if self._stream.intersection(piece.classes) else piece.count(scale)
                    chosen.update(piece.classes[:count])
                wanted[name] = [leaf for leaf, c in zip(classes, row, strict=True) if c in chosen]
        return self._cut(self._choose(wanted), self._layers_up_to(k_frozen))

    def explicit(self, kept: Mapping[str, Sequence[int]], frozen: Iterable[str] = ()) -> Cut:
        """Given output channels of given weights; what hangs together with them (a head, a group) must be kept whole.

        Weights that are not named keep all their channels."""
        wanted: dict[str, Iterable[int]] = {}
        for name, indices in kept.items():
            if name not in self._source_classes:
                raise BadInput(f"{name} is not a weight whose outputs can be chosen; see ChannelGraph.sources.")
            classes = self._source_classes[name]
            if any(not 0 <= i < len(classes) for i in indices) or not len(indices):
                raise BadInput(f"{name} has outputs 0..{len(classes) - 1}; keep at least one, and none beyond.")
            chosen = {classes[i] for i in indices}
            missing = [i for i, c in enumerate(classes) if c in chosen and i not in set(indices)]
            pinned = [i for i, c in enumerate(classes) if c == ALWAYS and i not in set(indices)]
            if missing or pinned:
                raise BadInput(
                    f"output {(missing or pinned)[0]} of {name} hangs together with those kept: keep it too."
                )
            wanted[name] = chosen
        return self._cut(self._choose(wanted), frozenset(frozen))

    def freeze(self, cut: Cut, k_frozen: int) -> Cut:
        """The same cut with layers 1..k_frozen frozen, for methods of your own (docs/methods.md)."""
        return cut.with_frozen((self._layers_up_to(k_frozen) | self.fixed) & cut.parameters)

    def window(self, k_frozen: int, k_trained: int) -> Cut:
        """The whole model, of which layers k_frozen + 1..k_trained and the classifier are trained."""
        if not 0 <= k_frozen <= k_trained <= self.depth:
            raise BadInput(
                f"a window from {k_frozen} to {k_trained}: need 0 <= k_frozen <= k_trained <= {self.depth} layers."
            )
        inside = range(k_frozen + 1, k_trained + 1)
        return self.only(name for name, layers in self.layers_of.items() if any(layer in inside for layer in layers))

    def only(self, names: Iterable[str]) -> Cut:
        """The whole model, of which these parameters and the classifier are trained."""
        trained = {*names, *(name for name, layer in self.layer_of.items() if layer > self.depth)}
        return self.full().with_frozen(self.full().parameters - trained | self.fixed)

    def for_output(self, cut: Cut, output: str) -> Cut:
        """The same cut for one of several `outputs`: what that one does not need is not sent, trained nor counted."""
        name = self.output_named(output)
        if cut.output not in (None, name):
            raise BadInput(f"the cut is already for the output {cut.output}: make it for {name} from the start.")
        absent = self._not_needed(name)
        left = [
            (entry, shape) for entry, shape in zip(cut.entries, cut.full_shapes, strict=True) if entry[0] not in absent
        ]
        made = replace(
            cut,
            entries=tuple(entry for entry, _ in left),
            full_shapes=tuple(shape for _, shape in left),
            parameters=cut.parameters - absent,
            frozen=cut.frozen - absent,
            output=name,
        )
        self._remember(made, self.kept_table(cut))
        return made

    def union(self, cuts: Sequence[Cut]) -> Cut:
        """All that is in one of these cuts, trained if one of them trains it: to send and to receive, not to run."""
        kept = {}
        for name in self.state_shapes:
            held = [cut.kept[name] for cut in cuts if name in cut.kept]
            if held:
                kept[name] = tuple(_either(indices) for indices in zip(*held, strict=True))
        frozen = frozenset(kept) - {name for cut in cuts for name in cut.trained}
        parameters = frozenset(self.parameter_names) & frozenset(kept)
        shapes = tuple(self.state_shapes[name] for name in kept)
        return Cut(self.hash, tuple(kept.items()), shapes, parameters, frozen & parameters)

    @property
    def sources(self) -> tuple[str, ...]:
        """The weights whose output channels a cut may choose."""
        return tuple(self._source_classes)

    @property
    def widths(self) -> tuple[int, ...]:
        """Distinct numbers of choosable outputs of the layers: a scale matters only through floor(s * M)."""
        return self._rows.widths

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for run in self._rows.runs if not self._stream.intersection(run.classes))

    # --- what runs ---------------------------------------------------------------------------------------------

    def submodel(
        self,
        cut: Cut,
        state: Mapping[str, Tensor] | None = None,
        output: str | None = None,
        *,
        zeros: bool = False,
    ) -> SubModel:
        """The small network, with the same parameter names. `state` is what cut.extract(model.state_dict()) gave;
        without it all weights are zero, which is good for measuring alone (`zeros` True: it is meant so).

        It returns the one of `outputs` that is named, or the cut's, or else the first; what only others need does not
        run."""
        if state is None and not zeros:
            warnings.warn(
                "graph.submodel(cut) without a state has zeros for weights: give cut.extract(model.state_dict()), or "
                "zeros=True where they do not matter",
                stacklevel=2,
            )
        return SubModel(self, cut, self.kept_table(cut), state, self.output_named(output or cut.output))

    def sized(self, cut: Cut, batch_size: int, mode: str = "train", output: str | None = None) -> list[SizedOp]:
        """Every value of the cut graph with its shape, in execution order, for counting costs."""
        return sized_ops(self, cut, self.kept_table(cut), batch_size, mode, self.output_named(output or cut.output))

    def output_named(self, name: str | None) -> str:
        """None is the first."""
        if name is None:
            return next(iter(self.outputs))
        if name not in self.outputs:
            raise BadInput(f"the model returns no {name}; it returns {', '.join(self.outputs)}.")
        return name

    def kept_table(self, cut: Cut) -> KeptTable:
        """For each vector of ids, which are kept. Refuses a cut that was not made for this model."""
        if cut.graph_hash != self.hash:
            raise BadInput(f"the cut is for a model of structure {cut.graph_hash}; this one is {self.hash}.")
        if cut not in self._tables:
            wanted = {
                name: [c for c, keep in zip(classes, self._mask_of(cut, name), strict=True) if keep]
                for name, classes in self._source_classes.items()
                if name in cut.kept
            }
            made = self._cut(self._choose(wanted), cut.frozen)
            if cut.output is not None:
                made = self.for_output(made, cut.output)
            if made != cut:
                raise BadInput("the cut keeps channels that do not hang together in this model.")
        return self._tables[cut]

    def detached(self, cut: Cut) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """Operations of the training graph, and the weights that they take without a gradient: trained ones, for their
        use in a higher layer, where all else up to here is frozen. So what a device freezes keeps no activations."""
        found: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for name, users in self._users.items():
            if name in cut.frozen or name not in cut.parameters:
                continue
            for node, layer in users.items():
                if layer < self.layer_of[name] and self._is_frozen_up_to(cut, layer):
                    (own,) = (x for x in node.all_input_nodes if x.op == "get_attr" and x.target == name)
                    found[node] = (*found.get(node, ()), own)
        return found

    def _is_frozen_up_to(self, cut: Cut, layer: int) -> bool:
        """But for weights that are used in other layers too, and for what is never trained. A layer that has nothing
        else counts as trained: whether it is, nobody can see."""
        single = {name: layers[0] for name, layers in self.layers_of.items() if len(layers) == 1}
        others = {name: own for name, own in single.items() if own <= layer and name not in self.fixed}
        return layer in others.values() and cut.frozen.issuperset(others)

    def cut_constants(self, table: KeptTable) -> dict[str, Tensor]:
        """Tensors outside the state dict (a fixed position code), cut: every device can make them itself."""
        cut = {}
        for name, value in self.constants.items():
            for dim, v in enumerate(self._state_vectors[name]):
                if v is not None and not table.masks[v].all():
                    value = value.index_select(dim, torch.from_numpy(np.flatnonzero(table.masks[v])))
            cut[name] = value.clone()
        return cut

    def constant_shape(self, name: str, table: KeptTable) -> tuple[int, ...]:
        shape = self.constants[name].shape
        return tuple(
            size if v is None else table.counts[v] for size, v in zip(shape, self._state_vectors[name], strict=True)
        )

    def static(self, mode: str) -> dict[fx.Node, Any]:
        if mode not in self._static:
            self._static[mode] = static_of(self._modes[mode].graph)
        return self._static[mode]

    # --- channels by id ----------------------------------------------------------------------------------------

    @property
    def output_dims(self) -> Mapping[str, int]:
        """Of each weight that makes channels (the classifier too), the dim along which they lie."""
        return self._source_dims

    @property
    def classifier(self) -> tuple[str, ...]:
        """Its parameters that have an entry for each class along their first dim."""
        last = (name for name, layer in self.layer_of.items() if layer > self.depth)
        return tuple(name for name in last if self.state_shapes[name][:1] == (self.classes,))

    def channel_ids(self, name: str) -> tuple[np.ndarray | None, ...]:
        """Per dim of a state entry, the id of the channel at each index; None: no cut can shorten it."""
        return tuple(None if vector is None else self._vectors[vector] for vector in self._state_vectors[name])

    def leaves_of(self, identity: int) -> tuple[int, ...]:
        """The outputs of weights that this channel is made of: itself, or the operands of a sum."""
        if identity < self._leaf_count:
            return (identity,) if identity != ALWAYS else ()
        return tuple(self._meets[identity - self._leaf_count].tolist())

    def channel_of(self, leaves: frozenset[int]) -> int | None:
        """The other way round; None where these do not meet."""
        if len(leaves) == 1:
            return next(iter(leaves))
        return self._meet_numbers.get(leaves)

    @cached_property
    def _meet_numbers(self) -> dict[frozenset[int], int]:
        return {frozenset(meet.tolist()): self._leaf_count + number for number, meet in enumerate(self._meets)}

    # --- inside ------------------------------------------------------------------------------------------------

    def _compile(self, propagation: Propagation, exported: Mapping[str, Exported]) -> None:
        """Number all ids that occur: leaves first (slot 0 is ALWAYS), then meets, which list their leaves."""
        channels = propagation.channels
        table = _VectorTable()
        self._modes: dict[str, Mode] = {}
        self._state_vectors: dict[str, tuple[int | None, ...]] = {}
        for name, shape in propagation.state_shapes.items():
            along = propagation.state_ids.get(name, {})
            self._state_vectors[name] = tuple(
                table.add(channels.canonical(along[dim])) if dim in along else None for dim in range(len(shape))
            )
        for mode, one in exported.items():
            self._modes[mode] = _compile_mode(one, propagation, table)
        sources = {
            name: channels.canonical(np.array(source.ids, dtype=np.int64))
            for name, source in propagation.sources.items()
        }
        everything = [*table.vectors, *sources.values()]
        ids = sorted({int(i) for vector in everything for i in np.unique(vector)})
        leaves = sorted({leaf for i in ids for leaf in channels.leaves(i)} | {ALWAYS})
        slot = {leaf: position for position, leaf in enumerate(leaves)}
        meets = [i for i in ids if len(channels.leaves(i)) > 1]
        slot.update({i: len(leaves) + position for position, i in enumerate(meets)})
        self._leaf_count = len(leaves)
        self._meets = [np.array([slot[leaf] for leaf in channels.leaves(i)]) for i in meets]
        self._meet_edges = np.concatenate([[0], np.cumsum([len(m) for m in self._meets])]).astype(np.int64)
        self._meet_leaves = np.concatenate(self._meets) if self._meets else np.zeros(0, dtype=np.int64)
        self._vectors = [np.array([slot[int(i)] for i in vector]) for vector in table.vectors]
        self._source_classes = {name: tuple(slot[int(i)] for i in ids) for name, ids in sources.items()}
        self._source_dims = {name: source.dim for name, source in propagation.sources.items()}
        concatenations = [
            found[1] for found in (propagation.vector(labels) for labels in propagation.concatenations) if found
        ]
        joined = [np.array([slot[int(i)] for i in vector]) for vector in concatenations]
        self._source_leaves = {name: np.array(own, dtype=int) for name, own in self._source_classes.items()}
        self._unowned = np.ones(self._leaf_count, dtype=bool)
        for own in self._source_leaves.values():
            self._unowned[own] = False
        self._rows = Rows(self._source_classes, self._leaf_count, self._meets, self._vectors, joined)
        self._tables: dict[Cut, KeptTable] = {}
        self._static: dict[str, dict[fx.Node, Any]] = {}

    def _stream_classes(self, graph: fx.Graph, sources: Collection[fx.Node]) -> frozenset[int]:
        """Coupled classes (rows.py) of the channels of the residual stream."""
        vectors = [self._modes["train"].vectors.get(node) for node in stream_nodes(graph, sources)]
        ids = {int(one) for vector in vectors if isinstance(vector, Vector) for one in self._vectors[vector.slots]}
        leaves = {leaf for one in ids for leaf in self.leaves_of(one)}
        return frozenset(c for c, members in self._rows.members.items() if leaves.intersection(members))

    def _cut_runs(self, scale: float, pick: Any) -> Cut:
        _check_scale(scale)
        if scale == 1:
            return self.full()
        leaves = np.ones(self._leaf_count, dtype=bool)
        for run in self.runs:
            chosen = set(pick(run, run.count(scale)))
            for c in run.classes:
                if c not in chosen:
                    leaves[self._rows.members[c]] = False
        return self._cut(leaves, frozenset())

    def _choose(self, wanted: Mapping[str, Iterable[int]]) -> np.ndarray:
        """A leaf is kept if any weight that has it keeps it; weights that are not named keep all."""
        kept = self._unowned.copy()
        for name, own in self._source_leaves.items():
            kept[np.array(list(wanted[name]), dtype=int) if name in wanted else own] = True
        kept[ALWAYS] = True
        return kept

    def _evaluate(self, leaves: np.ndarray) -> list[np.ndarray]:
        if len(self._meets):
            meets = np.logical_and.reduceat(leaves[self._meet_leaves], self._meet_edges[:-1])
            leaves = np.concatenate([leaves, meets])
        return [leaves[vector] for vector in self._vectors]

    def _cut(self, leaves: np.ndarray, frozen: frozenset[str]) -> Cut:
        masks = self._evaluate(leaves)
        indices: dict[int, Kept] = {}
        for v, mask in enumerate(masks):
            if not mask.any():
                raise BadInput("the cut leaves a value without channels.")
            indices[v] = None if mask.all() else tuple(np.flatnonzero(mask).tolist())
        entries = tuple(
            (name, tuple(None if v is None else indices[v] for v in self._state_vectors[name]))
            for name in self.state_shapes
        )
        shapes = tuple(self.state_shapes.values())
        cut = Cut(self.hash, entries, shapes, frozenset(self.parameter_names), frozen | self.fixed)
        self._remember(cut, KeptTable(masks))
        return cut

    def _remember(self, cut: Cut, table: KeptTable) -> None:
        if len(self._tables) >= 64:  # random cuts come without end
            self._tables.pop(next(iter(self._tables)))
        self._tables[cut] = table

    def _not_needed(self, output: str) -> frozenset[str]:
        """What only other outputs than this one use, of the parameters and buffers."""
        used: dict[bool, set[str]] = {True: set(), False: set()}
        for mode in self._modes.values():
            needed = mode.needed(output)
            for node in mode.graph.nodes:
                if node.op == "get_attr":
                    used[node in needed].add(str(node.target))
        return frozenset(used[False] - used[True])

    def _layers_up_to(self, k: int) -> frozenset[str]:
        return frozenset(name for name, layer in self.layer_of.items() if layer <= k)

    def _mask_of(self, cut: Cut, source: str) -> np.ndarray:
        dim = self._source_dims[source]
        kept = cut.kept[source][dim]
        mask = np.ones(self.state_shapes[source][dim], dtype=bool)
        if kept is not None:
            mask[:] = False
            mask[list(kept)] = True
        return mask

    def _structural_hash(self) -> str:
        digest = hashlib.sha256()
        for mode in self._modes.values():
            for node in mode.graph.nodes:
                digest.update(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}\n".encode())
        for name, shape in self.state_shapes.items():
            digest.update(f"{name} {shape} {self.state_dtypes[name]} {self.layer_of.get(name)}\n".encode())
        if self.fixed:
            digest.update(f"fixed {sorted(self.fixed)}\n".encode())
        return digest.hexdigest()[:16]

    def mode(self, name: str) -> Mode:
        return self._modes[name]


def _either(indices: Sequence[Kept]) -> Kept:
    """Kept along a dim by one of them."""
    some = [one for one in indices if one is not None]
    return tuple(sorted({index for one in some for index in one})) if len(some) == len(indices) else None


class KeptTable:
    """Masks of one cut, one per vector of ids."""

    def __init__(self, masks: list[np.ndarray]) -> None:
        self.masks = masks
        self.counts = [int(np.count_nonzero(mask)) for mask in masks]
        self._positions: dict[tuple[int | None, int], np.ndarray | None] = {}

    def along(self, vector: Vector | None) -> Along | None:
        if vector is None:
            return None
        mask = self.masks[vector.slots]
        return Along(vector.dim, mask, vector.batched, self.counts[vector.slots] == len(mask))

    def positions(self, requirement: Requirement) -> np.ndarray | None:
        """Where, in what the input has kept, the node's needs are; None if it needs all."""
        key = requirement.have, requirement.need
        if key not in self._positions:  # many nodes need the same
            need = self.masks[requirement.need]
            needed = need if requirement.have is None else need[self.masks[requirement.have]]
            self._positions[key] = None if needed.all() else np.flatnonzero(needed)
        return self._positions[key]


class _VectorTable:
    def __init__(self) -> None:
        self.vectors: list[Ids] = []
        self._known: dict[bytes, int] = {}

    def add(self, ids: Ids) -> int:
        key = np.ascontiguousarray(ids, dtype=np.int64).tobytes()
        if key not in self._known:
            self._known[key] = len(self.vectors)
            self.vectors.append(ids)
        return self._known[key]


def _compile_mode(exported: Exported, propagation: Propagation, table: _VectorTable) -> Mode:
    vectors: dict[fx.Node, Any] = {}
    requirements: dict[fx.Node, tuple[Requirement, ...]] = {}

    def vector_of(labels: Any, value: Any) -> Vector | None:
        found = propagation.vector(labels) if isinstance(labels, Tensor) else None
        if found is None:
            return None
        dim, ids = found
        batched = concrete_size(value.shape[dim], 2) != concrete_size(value.shape[dim], 3)
        return Vector(dim, table.add(ids), batched)

    for node in exported.graph.nodes:
        if node in propagation.values:
            labels, value = propagation.values[node], node.meta.get("val")
            if isinstance(labels, (list, tuple)):
                vectors[node] = [vector_of(one, v) for one, v in zip(labels, value, strict=False)]
            else:
                vectors[node] = vector_of(labels, value)
    for node, needs in propagation.required.items():
        if node.graph is not exported.graph:
            continue
        wanted = []
        for x, labels in needs:
            need = propagation.vector(labels)
            if need is None:
                continue
            have = vectors[x]
            if have is not None and have.dim != need[0]:
                raise AssertionError(f"{node} needs {x} cut along dim {need[0]}, but it varies along {have.dim}")
            requirement = Requirement(x, need[0], None if have is None else have.slots, table.add(need[1]))
            if requirement.have != requirement.need:
                wanted.append(requirement)
        requirements[node] = tuple(wanted)
    return Mode(exported.graph, tuple(exported.inputs.values()), exported.outputs, vectors, requirements)


def _per_sample(node: fx.Node) -> tuple[int, ...]:
    return tuple(concrete_size(size, EXAMPLE_BATCH) for size in node.meta["val"].shape[1:])


def _check_scores(model: nn.Module, output: fx.Node) -> None:
    batch, *sizes = output.meta["val"].shape
    if concrete_size(batch, 2) == 2 and concrete_size(batch, 3) == 3 and 1 <= len(sizes) <= 3:
        return
    first = "batch" if concrete_size(batch, 2) == 2 else str(batch)
    returned = ", ".join([first, *map(str, sizes)])
    raise BadInput(
        f"{type(model).__name__} returns [{returned}]; Strata needs class scores: [batch, classes], "
        "[batch, positions, classes] or [batch, classes, height, width]."
    )


def _check_scale(scale: float) -> None:
    if not 0 < scale <= 1:
        raise BadInput(f"scale {scale} is not a share of the width: give more than 0 and at most 1.")
