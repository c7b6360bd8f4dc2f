"""What a device does with a message: says what it has, trains, evaluates. Runs in a child that ends afterwards."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strata import __version__
from strata.core.errors import BadInput
from strata.core.processes import parent_of
from strata.core.settings import settings_of
from strata.core.sizes import show_bytes
from strata.execution.execution import Execution
from strata.federation.kept_prefixes import FOLDER
from strata.fleet.device import available_memory as limits
from strata.fleet.device.frozen_store import FrozenLayers
from strata.fleet.device.memory_cap import MemoryCap, OutOfMemory
from strata.fleet.device.own_data import OwnData, load_own_data
from strata.fleet.device.secure_work import SecureWork
from strata.fleet.pooled_statistics import pooled
from strata.fleet.protocol import codec
from strata.fleet.protocol.failures import failure
from strata.fleet.protocol.model_text import read_model
from strata.fleet.protocol.settings import DeviceSettings
from strata.graph import ChannelGraph, Cut
from strata.graph.inputs import taken_by
from strata.methods import METHODS
from strata.methods.base import Phase, Task
from strata.methods.heads import prepared_model
from strata.models.loading import BUILT_IN, load_model
from strata.planning.runtime import resident_bytes, tiny_step
from strata.planning.verify import MARGIN
from strata.training import (
    EvaluatedBatch,
    LocalTraining,
    Workspace,
    calibration_indices,
    evaluate_units,
    reestimated,
    train_device,
)
from strata.training.evaluation import added
from strata.training.loop import TaskSeeds
from strata.training.memory import peak_bytes

if TYPE_CHECKING:
    from strata.fleet.protocol.codec import Packet

# what of a LocalTraining a device is sent
PLAIN = (*settings_of(Execution), "epochs", "fixed_after", "augmentation", "mean", "std")
NARROW = 0.05  # of the width: enough to load what every training loads
# For what no tensor accounts for, of which oneDNN's compiled code is most: for ResNet20 9 MiB for each size of a batch,
# and there are two where the last one is smaller.
LEAST_MARGIN = 24 * limits.MIB
TOLERANCE = 0.01  # of the budget: so far measured tensors may lie above counted ones


class ModelNotAgreed(BadInput):
    """The run's model is not one that this device was told to build."""


@dataclass
class PreparedDevice:
    """A device with its data and the model ready, which answers the server's messages."""

    settings: DeviceSettings
    workspace: Workspace
    dtypes: dict[str, torch.dtype]
    own_data: OwnData
    baseline: int  # resident bytes of this process before any training
    left: int = 0  # bytes that the system had left then: the same for every message, as what a device can hold must be

    @classmethod
    def of(cls, text: str, settings: DeviceSettings) -> PreparedDevice:
        """`text`: the model, as a message has it."""
        model, method, options = read_model(text)
        if model not in BUILT_IN and model not in settings.models:
            raise ModelNotAgreed(
                f"device {settings.name} is not told to build {model!r}: install its package there and start the "
                f"device with --model {model}"
            )
        tiny_step()
        own_data = load_own_data(settings, model)
        task = own_data.objective.name
        shape, vocabulary = tuple(own_data.input_shape), own_data.vocabulary
        network = load_model(model, own_data.classes, shape, vocabulary, task, padding=own_data.padding)
        own_data = own_data.only(taken_by(network, own_data.train.spec.names))
        if method is not None:
            network = _prepared(network, own_data, method, options)
        graph = ChannelGraph(network, own_data.train.spec)
        dtypes = {name: tensor.dtype for name, tensor in network.state_dict().items()}
        device = cls(settings, Workspace(graph), dtypes, own_data, 0)
        narrow = graph.prefix(NARROW)
        training = LocalTraining(objective=own_data.objective)
        device._warm_up(Task(0, 0, narrow), narrow.extract(network.state_dict()), training)
        device.baseline, device.left = resident_bytes(), limits.memory_left()
        return device

    @property
    def graph(self) -> ChannelGraph:
        return self.workspace.graph

    def answer(self, packet: Packet, client: int) -> bytes:
        work = {
            "hello": self._hello,
            "train": self._train,
            "secure": self._secure,
            "statistics": self._statistics,
            "evaluate": self._evaluate,
        }
        what = packet.meta.get("what")
        if what not in work:
            raise BadInput(f"the server asks for {what!r}: is it of another version of Strata?")
        if self.settings.only_sums is not None and (
            what in ("statistics", "evaluate") or (what == "train" and not packet.meta.get("secure"))
        ):
            raise BadInput(f"the server asks for {what} in the clear, and this device was started with --only-sums")
        try:
            meta, tensors = work[what](packet, client)
        except OutOfMemory as error:
            print(error, flush=True)
            return failure("memory")
        return codec.encode({"token": packet.meta.get("token"), **meta}, tensors)

    def budget(self, client: int) -> int:
        """Bytes for tensors: as told, or what the system's limit leaves beside the runtime and Flower's processes, and
        not more than others left free."""
        if self.settings.budget is not None:
            return self.settings.budget
        held = self.baseline
        pid: int | None = client
        for _ in range(3):  # the client app, the SuperExec that started it where there is one, the SuperNode
            if pid is None or pid <= 1:
                break
            held += limits.resident_bytes_of(pid)
            pid = parent_of(pid)
        return limits.budget_left(limits.memory_limit(), held, self.left)

    def _hello(self, packet: Packet, client: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        own, settings = self.own_data, self.settings
        return {
            "what": "device",
            "name": settings.name,
            "budget": self.budget(client),
            "baseline": self.baseline,
            "samples": len(own.train),
            "held": 0 if own.held is None else len(own.held),
            "classes": own.classes,
            "input": list(own.input_shape),
            "mean": list(own.mean),
            "std": list(own.std),
            "augmentation": own.augmentation,
            "labels": own.labels,
            "structure": self.graph.hash,
            "holds": FrozenLayers(settings.folder).digests(),
            "versions": {"strata": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }, {}

    def _train(self, packet: Packet, client: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        meta = packet.meta
        round, device, lr = int(meta["round"]), int(meta["device"]), float(meta["lr"])
        seeds = TaskSeeds(*map(int, meta["seeds"]))
        cut = self._cut(meta["cut"])
        task = Task(round, device, cut, (Phase(cut, levels=tuple(map(self._cut, meta["levels"]))),))
        training = self._training(meta["training"])
        kept = FrozenLayers(self.settings.folder)
        tensors, lacking = kept.completed(task.cut, packet.tensors(), meta["frozen"])
        if lacking:
            return {"what": "lacks", "holds": kept.digests()}, {}
        self._check(task.cut, tensors)
        kept.keep(task.cut, tensors, meta["frozen"])
        secure = meta.get("secure") or {}
        member, wrong = self._sums.receive(secure) if secure else (None, [])
        self._warm_up(task, tensors, training)
        with self._cap(training, client, counted=self.workspace.submodel(task.cut, maps=training.maps).bytes):
            self._check_tensors(task, training, client)
            disk = self.settings.folder / FOLDER
            update = train_device(self.workspace, task, tensors, self.own_data.train, training, lr, seeds, disk)
        said = {
            "round": update.round,
            "device": update.device,
            "cut": update.cut_hash,
            "samples": update.samples,
            "peak_bytes": update.peak_bytes,
            "holds": kept.digests(),
        }
        if member is not None:
            masked = self._sums.masked(secure, member, task.cut, tensors, update)
            return {"what": "masked", **said, "wrong": wrong}, {"masked": masked}
        loss = update.loss if math.isfinite(update.loss) else None
        return {"what": "update", **said, "loss": loss}, update.tensors

    @property
    def _sums(self) -> SecureWork:
        return SecureWork(self.settings.folder, self.settings.only_sums)

    def _secure(self, packet: Packet, client: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The stages of a secure sum around training."""
        return self._sums.answer(packet.meta), {}

    def _statistics(self, packet: Packet, client: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Batch norm's statistics of the cut on some of the device's training images, a batch at a time."""
        cut, tensors = self._whole(packet)
        training = self._training(packet.meta["training"])
        own = self.own_data.train
        chosen = own.subset(calibration_indices(len(own), int(packet.meta["seed"])))
        fixed = self._fixed(packet, cut)
        found: list[tuple[int, dict[str, Tensor]]] = []
        with self._cap(training, client):
            for batch in chosen.split(training.batch_size):
                made = reestimated(self.workspace, cut, tensors, batch, training, fixed)
                found.append((len(batch), {name: made[name] for name in self.graph.buffer_names}))
        return {"what": "statistics", "images": len(chosen)}, pooled(found)

    def _evaluate(self, packet: Packet, client: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Sums over what the device holds out."""
        cut, tensors = self._whole(packet)
        training, bn = self._training(packet.meta["training"]), str(packet.meta["bn"])
        held, fixed = self.own_data.held, self._fixed(packet, cut)
        found: list[EvaluatedBatch] = []
        if held is not None:
            with self._cap(training, client):
                for number, part in enumerate(held.split(training.batch_size)):
                    (one,) = evaluate_units(self.workspace, cut, tensors, part, training, bn, [0], fixed)
                    found.append(replace(one, number=number))
        loss = sum((one.loss_sum for one in found), 0.0)
        sums = added([one.sums for one in found])
        return {
            "what": "sums",
            "sums": {name: list(values) for name, values in sums.items()},
            "loss_sum": loss if math.isfinite(loss) else None,
        }, {}

    def _fixed(self, packet: Packet, cut: Cut) -> list[str]:
        """The batch norms that use the statistics they were sent with."""
        names = packet.meta["fixed"]
        known = {norm.mean for norm in self.graph.batch_norms if norm.mean in cut.shapes}
        if not isinstance(names, list) or not all(isinstance(name, str) and name in known for name in names):
            raise BadInput("the server fixes statistics of batch norms that its cut does not have")
        return names

    def _training(self, values: Any) -> LocalTraining:
        return replace(training_of(values), objective=self.own_data.objective)

    def _whole(self, packet: Packet) -> tuple[Cut, dict[str, Tensor]]:
        cut, tensors = self._cut(packet.meta["cut"]), packet.tensors()
        self._check(cut, tensors)
        return cut, tensors

    def _cut(self, value: Any) -> Cut:
        cut = Cut.from_json(value)
        if cut.graph_hash != self.graph.hash:
            raise BadInput(
                f"the server's model has structure {cut.graph_hash} and this device's {self.graph.hash}: install the "
                "same version of the model's package on both"
            )
        names = tuple(name for name, _ in cut.entries)
        if dict(zip(names, cut.full_shapes, strict=True)) != dict(self.graph.state_shapes):
            raise BadInput("the server's cut does not have this model's shapes")
        return cut

    def _check(self, cut: Cut, tensors: Mapping[str, Tensor]) -> None:
        if set(tensors) != set(cut.shapes):
            raise BadInput("the server's message does not hold the tensors of its cut")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != tuple(cut.shapes[name]) or tensor.dtype != self.dtypes[name]:
                raise BadInput(f"the server sent {name} as {tensor.dtype} {tuple(tensor.shape)}, which does not fit")

    def _warm_up(self, task: Task, tensors: Mapping[str, Tensor], training: LocalTraining) -> None:
        """A step on two images, without the limit: what torch and oneDNN load and compile once for a network is the
        runtime's, not the model's (as in planning/trials.py). It needs no more than the task itself: one image where
        that takes one at a time."""
        at_once = min(2, training.micro_batch or training.batch_size, len(self.own_data.train))
        small = replace(training, batch_size=at_once, epochs=1, micro_batch=None)
        index = torch.tensor([0, len(self.own_data.train) - 1][:at_once])
        train_device(self.workspace, task, tensors, self.own_data.train.subset(index), small, lr=0.01, seed=0)

    def _check_tensors(self, task: Task, training: LocalTraining, client: int) -> None:
        """The kernel's limit has a margin for code and scratch, and a task's tensors would use it up as well. They are
        measured anyway, in two steps of the task's own size: where they are above the budget, nothing is trained."""
        if not self.settings.hard_limit:
            return
        taken, budget = peak_bytes(self.workspace, task, self.own_data.train, training), self.budget(client)
        if taken > (1 + TOLERANCE) * budget:
            raise OutOfMemory(
                f"out of memory: the task's tensors take {show_bytes(taken)}, more than this device's budget of "
                f"{show_bytes(budget)}"
            )

    def _cap(self, training: LocalTraining, client: int, counted: int = 0) -> MemoryCap:
        if not self.settings.hard_limit:
            return MemoryCap(None)
        from strata.execution import memory

        full = memory(self.graph, self.graph.full(), Execution(training.batch_size)).total
        return MemoryCap(self.budget(client), max(LEAST_MARGIN, int(MARGIN * full)), counted)


def _prepared(network: nn.Module, own_data: OwnData, method: str, options: Mapping[str, Any]) -> nn.Module:
    """The model as a method of Strata's own wants it; its weights come from the server."""
    if method not in METHODS or not set(options) <= set(METHODS[method].card.options):
        raise BadInput(f"the server's model is prepared by {method!r}, which this device does not know")
    return prepared_model(METHODS[method], network, own_data.train.spec, 0, options)


def training_of(values: Any) -> LocalTraining:
    known = {field.name for field in fields(LocalTraining)} & set(PLAIN)
    if not isinstance(values, dict) or set(values) - known:
        raise BadInput("the server's settings for training are of another version of Strata")
    try:
        return LocalTraining(**values)
    except (TypeError, ValueError) as error:
        raise BadInput(f"the server's settings for training do not fit: {error}") from None
