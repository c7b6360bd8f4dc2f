"""A run as the command line asks for it: plain values only, so config.json can hold it and --resume rebuild it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from strata.core.errors import BadInput
from strata.core.files import read_json, read_object, said_plainly
from strata.core.seeds import derive
from strata.data import FederatedData, Samples, hold_out, load
from strata.engines import Engine
from strata.engines.ray import Ray
from strata.federation.aggregation import ServerOptimizer
from strata.graph import ChannelGraph
from strata.methods import method_class
from strata.methods.choice import check_levels, method_named
from strata.methods.heads import prepared
from strata.models.loading import load_model
from strata.planning.schedules import DEFAULT_PATIENCE
from strata.runs.folder import differences, has_checkpoint, is_finished, refuse_used
from strata.runs.options import LATER, Common, Options
from strata.runs.progress import display
from strata.runs.running import complete, make_engine, run
from strata.runs.session import Result
from strata.training import LocalTraining

if TYPE_CHECKING:
    from torch import nn

    from strata.methods import Method


@dataclass(frozen=True)
class Request(Common):
    model: str = "resnet20"
    classes: int | None = None  # None: the data's
    input: tuple[int, ...] | None = None  # None: the data's
    data: str = "digits"
    data_dir: str | None = None
    partition: str = "iid"
    method: str = "slt"
    variant: str | None = None
    pool: int | None = None
    constraints: tuple[float, ...] = ()
    budgets: tuple[int, ...] = ()
    accounting: str | None = None
    schedule: str = "cumulative"
    patience: int = DEFAULT_PATIENCE
    head_fraction: float = 1.0
    init: str | None = None
    batch: int = 32
    epochs: int = 1
    momentum: float = 0.9
    weight_decay: float = 1e-5
    proximal: float = 0.0
    augmentation: str | None = None  # None: what suits the data
    micro_batch: int | None = None
    activation_checkpointing: int | str | None = None
    server_optimizer: str = "none"
    server_lr: float | None = None  # None: 1, or 0.01 with adam
    server_momentum: float = 0.9
    device: str = "cpu"
    kernels: str = "auto"

    def __post_init__(self) -> None:
        check_levels(self.method, self.constraints, self.budgets, needed=False)

    def to_json(self) -> dict[str, Any]:
        """What came later and was not asked for is left out: folders of older versions must compare equal."""
        defaults = type(self).__dataclass_fields__
        order = (*Request.__annotations__, *Common.__annotations__)  # model, data and method first, for readers
        values = {name: getattr(self, name) for name in order}
        return {k: v for k, v in values.items() if k not in LATER or v != defaults[k].default}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Request:
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise BadInput(f"the run was started by another version of Strata, with {', '.join(unknown)}")
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)

    @classmethod
    def of_folder(cls, folder: Path, given: Mapping[str, Any]) -> Request:
        """What the folder's run was asked for; `given` now may repeat it, but not change it."""
        with said_plainly(folder):
            if not (folder / "config.json").exists():
                raise BadInput(f"there is no run to resume in {folder}")
        saved = read_object(folder / "config.json").get("request")
        if not isinstance(saved, dict):
            raise BadInput(f"{folder} was started from Python: resume it there, with strata.run(..., resume=True)")
        request = cls.from_json(saved)
        changed = replace(request, **given)
        if changed != request:
            raise BadInput(
                f"{folder} was started with other settings: {'; '.join(differences(saved, jsonable(changed)))}. "
                "Resume with the same ones (or none), or start another run in another folder"
            )
        return request

    # --- the parts of a run ------------------------------------------------------------------------------------

    def load_data(self) -> FederatedData:
        data = load(self.data, self.data_dir)
        if self.classes is not None and self.classes != data.classes:
            raise BadInput(
                f"--classes is {self.classes} and {data.name} has {data.classes} classes: give the same or none"
            )
        if self.input is not None and tuple(self.input) != tuple(data.input_shape):
            ours, theirs = ("x".join(map(str, shape)) for shape in (self.input, data.input_shape))
            raise BadInput(f"--input is {ours} and the images of {data.name} are {theirs}: give the same or none")
        return data

    def make_model(self, data: FederatedData, with_weights: bool = True) -> nn.Module:
        """Initialised from the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(self.seed, "init"))
            model = load_model(self.model, data.classes, data.input_shape)
        if self.init is not None and with_weights:
            load_weights(model, Path(self.init))
        return model

    def prepared(self, model: nn.Module, data: FederatedData) -> nn.Module:
        """The model that devices train parts of: as the method wants it."""
        return prepared(method_class(self.method), model, data.inputs, self.seed)

    def make_training(self, data: FederatedData) -> LocalTraining:
        return complete(self._local(data.augmentation if self.augmentation is None else self.augmentation), data)

    @property
    def may_use_kernels(self) -> bool:
        """Our own code in C, where there is a compiler for it."""
        return self.kernels != "off" and not self.exact

    def _local(self, augmentation: str) -> LocalTraining:
        return LocalTraining(
            self.batch, self.epochs, self.momentum, self.weight_decay, self.proximal, augmentation,
            micro_batch=self.micro_batch, activation_checkpointing=self.activation_checkpointing, device=self.device,
            kernels=None if self.may_use_kernels else False,
        )  # fmt: skip

    def make_method(self, graph: ChannelGraph) -> Method:
        named: list[tuple[str, Any]] = [("variant", self.variant), ("pool", self.pool)]
        return method_named(
            self.method, graph, constraints=self.constraints, budgets=self.budgets, batch_size=self.batch,
            micro_batch=self.micro_batch, rounds=self.rounds, seed=self.seed, accounting=self.accounting,
            schedule=self.schedule, head_fraction=self.head_fraction, patience=self.patience, model_name=self.model,
            training=self._local("none"),
            **{name: value for name, value in named if value is not None},
        )  # fmt: skip

    def run_options(self) -> dict[str, Any]:
        names = [field.name for field in fields(Common) if field.name not in ("rounds", "devices")]
        lr = self.server_lr if self.server_lr is not None else 0.01 if self.server_optimizer == "adam" else 1.0
        server = ServerOptimizer(self.server_optimizer, lr, self.server_momentum)
        own = {name: getattr(self, name) for name in names}
        return {**own, "server": server, "pretrained": self.init is not None}

    def check_options(self) -> None:
        """What the run itself would say of them, but before anything is written or sent."""
        options = {name: value for name, value in self.run_options().items() if name != "pretrained"}
        Options(**options, rounds=self.rounds, devices=self.devices).fleet()

    def split(self, data: FederatedData) -> tuple[FederatedData, Samples | None]:
        return hold_out(data, self.validation, self.seed) if self.validation else (data, None)

    def load_split(self) -> tuple[FederatedData, Samples | None]:
        return self.split(self.load_data())


def jsonable(request: Request) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in request.to_json().items()}


def load_weights(model: nn.Module, path: Path) -> None:
    """From a .safetensors file, or one that torch.save wrote of a state dict (read without running code in it)."""
    try:
        if path.suffix == ".safetensors":
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(weights)
    except FileNotFoundError:
        raise BadInput(f"there is no file {path} to start from") from None
    except Exception as error:
        text = " ".join(str(error).split())
        raise BadInput(f"{path} does not hold weights for this model: {text[:300]}") from error


def launch(
    request: Request,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    timeout: float | None = None,
    checkpoint_every: int = 1,
    progress: bool = True,
    tensorboard: bool = False,
    mlflow: bool = False,
    ray: Ray | None = None,
) -> Result:
    """The run that was asked for. Workers prepare themselves while the plan is made."""
    request.check_options()
    check_levels(request.method, request.constraints, request.budgets)
    if not resume:
        refuse_used(out)  # before the slow part; checked again, under the lock, when the run begins
    elif is_finished(out):
        display(progress).say(f"{out} is finished: nothing to do")
        return Result(out, read_json(out / "summary.json"))
    data = request.load_data()
    model = request.make_model(data, with_weights=not has_checkpoint(out))
    training = request.make_training(data)
    rest, held = request.split(data)
    whole = request.prepared(model, data)
    engine: Engine = make_engine(whole, rest, training, workers, held=held, timeout=timeout, ray=ray,
                                 source=request.load_split)  # fmt: skip
    try:
        method = request.make_method(ChannelGraph(whole, data.inputs))
        return run(
            model, data, method, out=out, rounds=request.rounds, devices=request.devices, partition=request.partition,
            training=training, engine=engine, checkpoint_every=checkpoint_every, resume=resume, progress=progress,
            tensorboard=tensorboard, mlflow=mlflow, request=jsonable(request), **request.run_options(),
        )  # fmt: skip
    finally:
        engine.close()
