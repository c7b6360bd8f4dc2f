"""From a RunConfig to a run: the one way for `strata run`, `compare`, `experiment` and `fleet`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strata.core.errors import BadInput
from strata.core.paths import expanded
from strata.core.seeds import derive
from strata.data import FederatedData, Reading, Samples, hold_out, load
from strata.data.tokenizers import reading_for
from strata.engines import Engine
from strata.graph import ChannelGraph
from strata.graph.inputs import InputSpec, same_inputs, taken_by
from strata.methods import Method, method_class
from strata.methods.choice import method_named
from strata.methods.heads import is_prepared, prepared_model
from strata.models.huggingface import PREFIX, load_onto
from strata.models.loading import load_model
from strata.runs.allowance import Allowance
from strata.runs.callbacks import Callback, trackers
from strata.runs.config import RunConfig
from strata.runs.folder import has_checkpoint, is_finished, read_summary, refuse_used
from strata.runs.progress import display
from strata.runs.running import Prepared, carry_out, complete, settled
from strata.runs.session import Result
from strata.runs.unused import of_some_methods
from strata.runs.workers import make_engine, ray_of
from strata.training import LocalTraining


def launch(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    from_round: int | None = None,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    tensorboard: bool = False,
    mlflow: bool = False,
    resources: Resources | None = None,
    prepared: Prepared | None = None,
) -> Result:
    """The run that was asked for. `resources`: of several runs that follow each other. `prepared`: what a fleet makes
    of the config itself."""
    config.check()
    if not resume:
        refuse_used(out)  # before the slow part; checked again, under the lock, when the run begins
    elif is_finished(out):
        refuse_going_back(out, from_round)
        display(progress).say(f"{out} is finished: nothing to do")
        return Result(out, read_summary(out))
    listeners = [*callbacks, *trackers(tensorboard, mlflow)]
    shared = Resources() if resources is None else resources
    try:
        return carry_out(
            prepared or shared.prepare(config, with_weights=not has_checkpoint(out)),
            out,
            checkpoint_every=config.machine.checkpoint_every,
            resume=resume,
            from_round=from_round,
            progress=progress,
            callbacks=listeners,
            request=config.to_json(),
        )
    finally:
        if resources is None:
            shared.close()


def refuse_going_back(out: Path, from_round: int | None) -> None:
    """In a finished run."""
    if from_round is not None:
        raise BadInput(
            f"{out} is finished: to go back in it, move its model.safetensors and summary.json elsewhere first"
        )


class Resources:
    """Data, network and workers, kept from one run to the next where both need the same."""

    def __init__(self) -> None:
        self._data: tuple[Any, FederatedData] | None = None
        self._graph: tuple[Any, ChannelGraph] | None = None
        self._engine: tuple[Any, Engine] | None = None
        self._methods: dict[RunConfig, Method] = {}

    def prepare(self, config: RunConfig, with_weights: bool = True) -> Prepared:
        """Workers prepare themselves while the plan is made."""
        notes: list[str] = []
        model = make_model(config, self.data(config), with_weights, notes)
        data = self.given_to(model, config)
        whole = self._whole(config, model)
        training = make_training(config, data)
        engine = self.engine(config, whole, training)
        method = self._methods.pop(config) if config in self._methods else None
        method = method or make_method(config, self.graph(config, whole))
        return Prepared(
            model=whole,
            plain=model,
            data=data,
            method=method,
            options=config.options,
            training=training,
            server=config.server.optimizer(),
            partition=config.problem.partition,
            sizes=config.problem.sizes,
            engine=engine,
            pretrained=config.pretrained,
            notes=tuple(notes),
            allowance=allowance_of(config, method, training),
        )

    def prepare_methods(self, configs: Sequence[RunConfig]) -> None:
        """Of runs with the same model and data, before the first begins: what cannot be done is said at once."""
        first = configs[0]
        model = make_model(first, self.data(first))
        data = self.given_to(model, first)
        self.engine(first, self._whole(first, model), make_training(first, data))
        for config in configs:
            self._methods[config] = make_method(config, self.graph(config, self._whole(config, model)))

    def _whole(self, config: RunConfig, model: nn.Module) -> nn.Module:
        """The model that devices train parts of: as the method wants it."""
        method, inputs = method_class(config.approach.method), self.data(config).inputs
        return prepared_model(method, model, inputs, config.course.seed, own_options(config))

    def data(self, config: RunConfig) -> FederatedData:
        key = (config.problem.data, config.problem.data_dir, reading_of(config))
        if self._data is None or self._data[0] != key:
            self._data = None  # two data sets need not be in memory at once
            self._data = (key, load_data(config))
        return self._data[1]

    def given_to(self, model: nn.Module, config: RunConfig) -> FederatedData:
        """The data with those of its inputs that the model takes, from here on."""
        data = self.data(config)
        assert self._data is not None
        self._data = (self._data[0], data.only(taken_by(model, data.inputs.names)))
        return self._data[1]

    def graph(self, config: RunConfig, model: nn.Module) -> ChannelGraph:
        where = (config.problem.data, config.problem.data_dir, config.reading)
        key = (config.problem.model, *where, _own_model(config), config.approach.width)
        if self._graph is None or self._graph[0] != key:
            self._graph = (key, ChannelGraph(model, self.data(config).inputs, width=config.approach.width))
        return self._graph[1]

    def engine(self, config: RunConfig, model: nn.Module, training: LocalTraining) -> Engine:
        """Its workers hold the training data, less the validation split, which depends on the seed."""
        problem, evaluation = config.problem, config.evaluation
        split = (evaluation.validation, config.course.seed) if evaluation.validation else None
        where = (problem.data, problem.data_dir, config.reading)
        key = (problem.model, *where, training, config.machine, split, _own_model(config))
        names = self.data(config).inputs.names
        if self._engine is None or self._engine[0] != key:
            self.close()
            rest, held = split_data(config, self.data(config))
            made = make_engine(
                model,
                rest,
                training,
                config.machine.workers,
                held=held,
                timeout=config.machine.task_timeout,
                ray=ray_of(config.machine),
                source=lambda: split_data(config, load_data(config).only(names)),
            )
            self._engine = (key, made)
        return self._engine[1]

    def close(self) -> None:
        if self._engine is not None:
            self._engine[1].close()
            self._engine = None


def _own_model(config: RunConfig) -> tuple[Any, ...] | None:
    """What tells the models of methods apart that make one of their own."""
    method = config.approach.method
    if not is_prepared(method_class(method)):
        return None
    return method, config.course.seed, tuple(own_options(config).items())


def own_options(config: RunConfig) -> dict[str, Any]:
    """Of the method's card, those that were asked for or have a default."""
    own = method_class(config.approach.method).card.options
    options = {key: getattr(config, key) for key in of_some_methods() if key in own}
    return {key: value for key, value in options.items() if value is not None}


# --- the parts of a run --------------------------------------------------------------------------------------------


def load_data(config: RunConfig) -> FederatedData:
    problem = config.problem
    data = load(problem.data, problem.data_dir, reading_of(config), problem.classes)
    if problem.classes is not None and problem.classes != data.classes:
        raise BadInput(
            f"--classes is {problem.classes} and {data.name} has {data.classes} classes: give the same or none"
        )
    return data if problem.input is None else with_inputs(data, InputSpec.of(problem.input))


def with_inputs(data: FederatedData, asked: InputSpec) -> FederatedData:
    """The data with those inputs alone that are asked for by name."""
    found = data.only(asked.names) if set(asked.names) <= set(data.inputs.names) else data
    if not same_inputs(asked, found.inputs):
        kind = "the images of " if data.train.has_images and data.inputs.single else ""
        are = "are" if kind else "has"
        alike = data.inputs.single and str(asked) != str(data.inputs)  # in all but the shape, which says enough
        shown = [str(one) if alike else one.written for one in (asked, data.inputs)]
        raise BadInput(f"--input is {shown[0]} and {kind}{data.name} {are} {shown[1]}: give the same or none")
    return found


def reading_of(config: RunConfig) -> Reading:
    return reading_for(config.reading, config.problem.data, config.problem.model)


def split_data(config: RunConfig, data: FederatedData) -> tuple[FederatedData, Samples | None]:
    """Training and test data, and the validation split, if any."""
    share = config.evaluation.validation
    return hold_out(data, share, config.course.seed) if share else (data, None)


def make_model(
    config: RunConfig, data: FederatedData, with_weights: bool = True, notes: list[str] | None = None
) -> nn.Module:
    """Initialised from the seed alone. `notes`: gets what there is to say of given weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(config.course.seed, "init"))
        shape, task = data.inputs.inputs[0].shape, data.objective.name
        told: list[str] = []
        anew: set[str] = set()
        name = config.problem.model
        model = load_model(name, data.classes, shape, data.vocabulary, task, told, padding=data.padding, anew=anew)
    if config.problem.init is not None:  # what it brings is no more begun anew
        own = anew if name.startswith(PREFIX) else None
        told = load_onto(model, expanded(config.problem.init), own) if with_weights else []
    if notes is not None:
        notes += told
    return model


def make_training(config: RunConfig, data: FederatedData) -> LocalTraining:
    local = config.local
    training = LocalTraining(
        **vars(config.execution),
        epochs=local.epochs,
        fixed_after=local.fixed_after,
        augmentation=data.own_augmentation if local.augmentation is None else local.augmentation,
        device=local.device,
        kernels=None if config.may_use_kernels else False,
        shortened=not config.course.exact,
    )
    return settled(complete(training, data), config.course.rounds)


def make_method(config: RunConfig, graph: ChannelGraph) -> Method:
    approach = config.approach
    return method_named(
        approach.method,
        graph,
        constraints=approach.constraints,
        budgets=approach.budgets,
        execution=config.counted,
        rounds=config.course.rounds,
        seed=config.course.seed,
        accounting=approach.accounting,
        model_name=config.problem.model,
        lean=approach.lean,
        ceilings=approach.ceilings,
        reserve=approach.reserve,
        pretrained=config.pretrained,
        **own_options(config),
    )


def allowance_of(config: RunConfig, method: Method, training: LocalTraining) -> Allowance | None:
    approach = config.approach
    return Allowance.of(method, training.in_round(0), approach.budgets, approach.constraints, approach.accounting)
