"""Evaluation where the server has no data: every device on what it holds out, what they found summed at the server.

First the devices measure batch norm's statistics of the model on some of their training images, and the server pools
them; then all evaluate with the same statistics, which are also those of the final model.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strata.core.seeds import derive
from strata.data.objectives import Classification, Objective
from strata.engines.base import EngineFailed, Outcome
from strata.federation.checking import is_count
from strata.federation.jobs import EvaluateJob, FinishJob, StatisticsJob
from strata.fleet.pooled_statistics import pooled
from strata.fleet.protocol import codec
from strata.fleet.protocol.failures import sentence
from strata.fleet.server.messages import plain
from strata.fleet.server.native_devices import Wanted
from strata.training.evaluation import EvaluatedBatch
from strata.training.statistics import CALIBRATION_IMAGES, plain_state

if TYPE_CHECKING:
    from strata.fleet.server.engine import FlowerEngine
    from strata.fleet.server.members import Device
    from strata.graph import ChannelGraph, Cut

Read = Callable[[codec.Packet, "Device"], Any]


class DeviceEvaluation:
    """`robust`: no single device may set batch norm's statistics."""

    def __init__(
        self, engine: FlowerEngine, graph: ChannelGraph, robust: bool = False, objective: Objective | None = None
    ) -> None:
        self._engine, self._graph, self._robust = engine, graph, robust
        self._objective = objective or Classification()
        self._measured: tuple[Mapping[str, Tensor], Cut, tuple[str, ...], dict[str, Tensor]] | None = None

    def run(self, jobs: Sequence[EvaluateJob | FinishJob], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        for index, job in enumerate(jobs):
            tensors = job.cut.extract(state)
            if isinstance(job, StatisticsJob):
                yield Outcome(index, self._statistics(job, tensors, state))
                continue
            if isinstance(job, FinishJob):
                tensors |= self._statistics(job, tensors, state)
                yield Outcome(index, plain_state(job.cut, state, tensors))
                continue
            if job.bn == "re-estimated":
                tensors |= self._statistics(job, tensors, state)
            found = self._ask(
                "evaluate",
                job.cut,
                {"cut": job.cut.to_json(), "bn": job.bn, "fixed": list(job.fixed)},
                tensors,
                self._sums,
                lambda device: device.held > 0,
            )
            if not found:
                raise EngineFailed("no device could evaluate the model: resume the run when devices are there")
            yield Outcome(index, [replace(one, number=number) for number, one in sorted(found.items())])

    def _statistics(
        self, job: EvaluateJob | FinishJob, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if not self._graph.buffer_names:
            return {}
        key = (job.cut, job.fixed)
        if self._measured is None or self._measured[0] is not state or self._measured[1:3] != key:
            seed = derive(job.seed, "statistics on devices")  # the run's own is not for them
            meta = {"cut": job.cut.to_json(), "seed": seed, "fixed": list(job.fixed)}
            found = self._ask(
                "statistics", job.cut, meta, tensors, lambda packet, who: self._buffers(packet, who, tensors)
            )
            if not found:
                raise EngineFailed(
                    "no device could measure batch norm's statistics: resume the run when devices are there"
                )
            made = pooled([found[number] for number in sorted(found)], self._robust)
            held = [norm for norm in self._graph.batch_norms if norm.mean in job.fixed]
            made |= {name: tensors[name] for norm in held for name in (norm.mean, norm.variance)}  # no device's word
            self._measured = (state, *key, made)
        return self._measured[3]

    def _buffers(
        self, packet: codec.Packet, device: Device, tensors: Mapping[str, Tensor]
    ) -> tuple[int, dict[str, Tensor]]:
        """With the weight of as many images as it can have used."""
        images: Any = packet.meta.get("images")
        if packet.meta.get("what") != "statistics" or not is_count(images) or images < 1:
            raise codec.Malformed("sent no statistics")
        if len(packet.body) != sum(tensors[name].nbytes for name in self._graph.buffer_names):
            raise codec.Malformed("sent statistics of another size than it was asked for")
        made = packet.tensors()
        if set(made) != set(self._graph.buffer_names):
            raise codec.Malformed("sent other statistics than it was asked for")
        for name, value in made.items():
            if value.dtype != tensors[name].dtype or value.shape != tensors[name].shape:
                raise codec.Malformed(f"sent {name} in another form")
            if not bool(torch.isfinite(value).all()):
                raise codec.Malformed(f"sent {name} with values that are not finite")
            if name.endswith("running_var") and bool((value < 0).any()):
                raise codec.Malformed(f"sent {name} with negative variances")
        return min(images, CALIBRATION_IMAGES, device.samples), made

    def _sums(self, packet: codec.Packet, device: Device) -> EvaluatedBatch:
        sums, loss = packet.meta.get("sums"), packet.meta.get("loss_sum")
        if not isinstance(sums, dict) or not all(isinstance(values, list) for values in sums.values()):
            raise codec.Malformed("sent no sums")
        if not all(is_count(value) or type(value) is float for values in sums.values() for value in values):
            raise codec.Malformed("sent counts that are none")
        found = {str(name): tuple(values) for name, values in sums.items()}
        try:
            self._objective.check_sums(found, device.held, self._graph.output_shape)
        except ValueError as error:
            raise codec.Malformed(f"sent {error}") from None
        if loss is not None and not (is_count(loss) or isinstance(loss, float)):
            raise codec.Malformed("sent no loss")
        return EvaluatedBatch(0, device.held, math.nan if loss is None else float(loss), found)

    def _ask(
        self,
        what: str,
        cut: Cut,
        meta: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        read: Read,
        who: Callable[[Device], bool] = lambda device: True,
    ) -> dict[int, Any]:
        """What each device that is free answers, by number; who cannot or does not is left out, and named."""
        engine = self._engine
        engine.await_devices(engine.names, 1)
        until = engine.until()
        asked: dict[str, tuple[int, Device, str]] = {}
        taking_part = [(number, device) for number, device in engine.free_devices() if who(device)]
        native = {device.name: device for _, device in taking_part if device.native is not None}
        if native and engine.native is not None:
            engine.native.offer([Wanted(device, cut, engine.training) for device in native.values()])
        for number, device in taking_part:
            other = engine.native.named(device, cut, engine.training) if device.name in native and engine.native else {}
            if isinstance(other, str):
                engine.say(f"{device.name} takes no part in this evaluation: {other}")
                continue
            token = secrets.token_hex(16)
            left = None if until == math.inf else max(0.001, until - time.monotonic())
            said = {"what": what, "model": engine.model, "token": token, "training": engine.training, "deadline": left}
            due = sum(tensors[name].nbytes for name in self._graph.buffer_names if name in tensors)
            id = engine.messenger.send(
                device.node, what, codec.encode({**said, **meta, **other}, tensors), 0, left, due
            )
            if id is not None:
                asked[id] = (number, device, token)
        found: dict[int, Any] = {}
        while asked and time.monotonic() < until:
            for answer in engine.hear():
                if answer.id not in asked:
                    continue
                number, device, token = asked.pop(answer.id)
                try:
                    if answer.packet is None:
                        raise codec.Malformed(answer.error)
                    if answer.packet.meta.get("what") == "failure":
                        raise codec.Malformed(sentence(answer.packet.meta.get("kind")))
                    if answer.packet.meta.get("token") != token:
                        raise codec.Malformed("answered another message")
                    found[number] = read(answer.packet, device)
                except Exception as error:  # what one device writes never ends the run
                    reason = str(error) if isinstance(error, codec.Malformed) else repr(error)
                    engine.say(f"{device.name} takes no part in this evaluation: {plain(reason)}")
            asked = {id: one for id, one in asked.items() if id in engine.messenger.open}
            if asked:
                engine.messenger.pause()
        for _, device, _ in asked.values():
            engine.say(f"{device.name} takes no part in this evaluation: no answer in time")
        return found
