"""Further heads on a model, for methods that train with more than the model's own output (Method.prepare).

Their parameters are the prepared model's, so they are sent, trained, averaged and saved like all others; the final
model.safetensors leaves them out.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.core.seeds import derive
from strata.graph.inputs import InputSpec, arguments_of
from strata.graph.tied import with_aliases

if TYPE_CHECKING:
    from strata.methods.base import Method

MAIN = "output"  # the model's own


class WithHeads(nn.Module):
    """A model and further heads on parts of it: returns {"output": the model's own, name: that head's, ...}.

    `heads` is by the names of the outputs; `places` says of each which part of the model it stands on: the head takes
    what that part returns.
    """

    def __init__(
        self, model: nn.Module, inputs: InputSpec, heads: Mapping[str, nn.Module], places: Mapping[str, str]
    ) -> None:
        super().__init__()
        for name in heads:
            if name == MAIN or "." in name:
                raise BadInput(f"a head has a name without dots other than {MAIN!r}, not {name!r}")
            part_of(model, places[name])
        self.model = model
        self.heads = nn.ModuleDict(heads)
        self.places = dict(places)
        self.inputs = inputs

    def forward(self, *inputs: Tensor) -> dict[str, Any]:
        found: dict[str, Tensor] = {}

        def hook(name: str) -> Any:
            def after(module: nn.Module, given: Any, value: Tensor) -> None:
                found[name] = self.heads[name](value)  # at once: what follows may change the value in place

            return after

        handles = [part_of(self.model, at).register_forward_hook(hook(name)) for name, at in self.places.items()]
        try:
            returned = called(self.model, self.inputs, inputs)
        finally:
            for handle in handles:
                handle.remove()
        return {MAIN: returned, **{name: found[name] for name in self.heads}}


def with_classifiers(model: nn.Module, inputs: InputSpec, places: Sequence[str]) -> WithHeads:
    """A linear classifier on the mean over positions of what each of these parts returns, named head1, head2, ...

    Each has as many outputs as the model.
    """
    seen: dict[str, Tensor] = {}

    def hook(at: str) -> Any:
        def after(module: nn.Module, given: Any, value: Tensor) -> None:
            seen[at] = value

        return after

    handles = [part_of(model, at).register_forward_hook(hook(at)) for at in places]
    was_training = model.training
    try:
        with torch.no_grad():
            returned = called(model.eval(), inputs, inputs.example(2))
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    if not isinstance(returned, Tensor):
        raise BadInput(f"{type(model).__name__} returns {type(returned).__name__}, not one tensor of scores")
    names = [f"head{number}" for number in range(1, len(places) + 1)]
    heads = {name: _classifier(seen[at].shape, returned.shape[-1]) for name, at in zip(names, places, strict=True)}
    return WithHeads(model, inputs, heads, dict(zip(names, places, strict=True)))


def _classifier(shape: torch.Size, classes: int) -> nn.Module:
    if len(shape) == 4:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(shape[1], classes))
    if len(shape) == 2:
        return nn.Linear(shape[1], classes)
    raise BadInput(f"a classifier stands on [batch, channels] or [batch, channels, height, width], not {tuple(shape)}")


def part_of(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise BadInput(f"{type(model).__name__} has no part named {name!r} to put a head on") from None


def called(model: nn.Module, inputs: InputSpec, values: Sequence[Tensor]) -> Any:
    args, kwargs = arguments_of(model, inputs).of(dict(zip(inputs.names, values, strict=True)))
    return model(*args, **kwargs)


def prepared_model(
    method: type[Method], model: nn.Module, inputs: InputSpec, seed: int, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """The model as the method wants it. What it adds is initialised from the seed alone. `options`: of the method's
    card; `prepare` gets those that it has parameters for."""
    taken = inspect.signature(method.prepare).parameters
    own = {name: value for name, value in (options or {}).items() if name in taken and value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, "prepared"))
        return method.prepare(model, inputs, **own)


def is_prepared(method: type[Method]) -> bool:
    """Whether the method has a model of its own made of the given one."""
    from strata.methods.base import Method

    return method.prepare.__func__ is not Method.prepare.__func__  # type: ignore[attr-defined]


def plain_names(whole: nn.Module, model: nn.Module) -> dict[str, str]:
    """What the plain model calls the entries of the prepared one's state; those that it lacks are left out."""
    prefix = next((name for name, part in whole.named_modules() if part is model), None)
    if prefix is None:
        raise BadInput(f"{type(whole).__name__} must hold the {type(model).__name__} that it was prepared from")
    start = f"{prefix}." if prefix else ""
    return {start + name: name for name in model.state_dict()}


def plain_state(whole: nn.Module, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The plain model's state, of the prepared one's: what it lacks is left out, or merged where `whole` does that."""
    merge: Any = getattr(whole, "merged", dict)
    merged = merge(state)
    names = plain_names(whole, model)
    return with_aliases(model, {names[name]: tensor for name, tensor in merged.items() if name in names})
