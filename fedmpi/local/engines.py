"""Choice of the engine for the local work: merged where it is exact, otherwise batched or sequential.

Only this module imports `local.batched`, which a run can do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedmpi.common.decorators import UPDATES
from fedmpi.common.errors import UserError
from fedmpi.data.schema import DataDescription
from fedmpi.local.hooks import Hooks
from fedmpi.local.merged import MergedEngine
from fedmpi.local.optimizers import is_plain_sgd, rule_of
from fedmpi.local.sequential import LocalEngine, SequentialEngine
from fedmpi.local.traits import forward_traits
from fedmpi.local.work import batch_rows
from fedmpi.models.flat import FlatModel
from fedmpi.models.isolation import why_untraceable
from fedmpi.tasks.losses import LOSS_ALONE

if TYPE_CHECKING:
    from fedmpi.config import Config
    from fedmpi.local.batched.engine import BatchedEngine


OF_ONE_ARRAY = "samples of several arrays, and outputs with logits, are read one client at a time"
"""Reason to train clients of such a model sequentially."""
LARGEST_BATCH = 64 << 20
"""Bytes of a client's activations on a CPU above which batching gains nothing: less than those of resnet18."""


def choose_engine(config: Config, sequential: SequentialEngine) -> LocalEngine:
    """Return the engine that `local.engine` names, or for "auto" the one that fits."""
    wanted, model, source = config.local.engine, sequential.model, sequential.source
    forward_traits(model, source.description)  # rejects a model that does not fit the data, on every rank
    named = f'{wanted}: as local.engine = "{wanted}" says'
    if wanted == "sequential":
        return LocalEngine(sequential, sequential, named)
    not_batched = _why_one_by_one(config, model, sequential.hooks) or why_not_batched(model, source.description)
    if wanted == "batched":
        if not_batched is not None:
            raise UserError(f'local.engine = "batched" is not possible here: {not_batched}; choose "auto"')
        return LocalEngine(sequential, batched_engine(sequential, config), named)
    batched = None if not_batched else batched_engine(sequential, config)
    if batched is not None and model.device.type == "cpu":
        sizes = source.sizes[source.sizes > 0]
        usual = batch_rows(rule_of(config.local, 0.0), int(np.median(sizes)) if len(sizes) else 1)
        activations = batched.net.values_per_row * usual * model.initial.element_size()
        if activations > LARGEST_BATCH:
            not_batched = f"a batch of one client has {activations >> 20} MiB of activations"
    rest = sequential if batched is None or not_batched else batched
    others = f"{rest.name} ({not_batched})" if not_batched else rest.name
    if not_merged := why_not_merged(config, sequential):
        return LocalEngine(sequential, rest, f"auto: {others}; nothing is merged: {not_merged}")
    said = f"auto: one-step clients are merged, the others {others}"
    return LocalEngine(sequential, rest, said, MergedEngine(sequential))


def why_not_merged(config: Config, sequential: SequentialEngine) -> str | None:
    """Return why clients of one step cannot be merged into one gradient, or None."""
    observer, hooks = sequential.observe, sequential.hooks
    if not is_plain_sgd(config.local.optimizer):
        return f"local.optimizer = {config.local.optimizer!r} is not linear in the gradient"
    if config.task.loss.options.get("class_weights"):
        return "task.loss.class_weights: each batch is divided by the sum of its weights"
    if config.local.clip_norm is not None:
        return "local.clip_norm scales each client's gradient"
    if config.topology.name == "mediators":
        return "mediators carry one model from client to client"
    own_updates = {
        "clipping, compression, attacks, diagnostics or clients.sampler": observer is not None,
        f"server.aggregator = {config.server.aggregator.name!r}": config.server.aggregator.name != "mean",
        f"server.weights = {config.server.weights.name!r}": hasattr(config.server.weights.object, "after"),
        "server.exact": config.server.exact,
    }
    if needing := [what for what, needs in own_updates.items() if needs]:
        return f"{needing[0]}: every client's own update is needed"
    if hooks is not None and hooks.alone:
        return hooks.alone
    model = sequential.model
    traits = forward_traits(model, sequential.source.description)
    if traits.keeps:
        return "the forward pass changes parameters, buffers (batch norm) or attributes, or draws random numbers"
    if traits.couples:
        return "a sample's outputs depend on the other samples of its batch, or on random numbers of the model's own"
    if model.adapts:
        return OF_ONE_ARRAY
    if model.hooked:
        return "hooks may clip or normalize the gradients of a batch"
    if not model.plain and (reason := why_untraceable(model.module)):
        return f"torch.fx cannot trace the forward pass: {reason}"
    return LOSS_ALONE if traits.loss_couples else None


def _why_one_by_one(config: Config, model: FlatModel, hooks: Hooks | None) -> str | None:
    """Return why clients cannot be batched, or None."""
    if config.topology.name == "mediators":
        return "mediators carry one model from client to client"
    if config.server.exact:
        return "server.exact: the rounding of a stack depends on its clients"
    if {*UPDATES} & {*config.clients.sampler.marks.get("measures", ())}:
        return "clients.sampler measures updates: the rounding of a stack depends on its clients"
    if model.personal and (
        model.embeddings or config.local.proximal_mu or (hooks and (hooks.corrects or hooks.proximal_mu))
    ):
        return "local.personal with word vectors, a proximal term or corrections"
    if model.copies:
        return "model.copies: each client trains the copy that it chooses"
    if config.local.optimizer.foreign:
        return f'local.optimizer = "{config.local.optimizer.name}" steps on the parameters of one client'
    if hooks is not None and (hooks.own_loss or hooks.trains):
        own = "objective" if hooks.own_loss else "train"
        return f"local.algorithm = {hooks.part.name!r} has its own {own}()"
    if model.embeddings and (config.local.clip_norm or config.local.optimizer.values.get("weight_decay")):
        return (
            "local.clip_norm and weight_decay concern the vectors of all words, not only of those in a client's texts"
        )
    if hooks is not None and hooks.corrects and model.embeddings:
        return "corrections move the vectors of all words, not only of those in a client's texts"
    return None


def why_not_batched(model: FlatModel, description: DataDescription) -> str | None:
    """Return the reason why the batched engine cannot train a model with its loss, None if it can."""
    traits = forward_traits(model, description)
    if model.adapts:
        return OF_ONE_ARRAY
    if not model.plain and (traits.keeps or traits.couples or model.hooked):
        return "its forward pass keeps something, draws random numbers, joins the samples of a batch, or has hooks"
    try:
        from fedmpi.local.batched.layers import NotStackable
        from fedmpi.local.batched.translation import translate
    except ImportError:
        return "fedmpi.local.batched is missing"
    try:
        translate(model.module, description, model.stacked_forms)
    except NotStackable as reason:
        return str(reason)
    return LOSS_ALONE if traits.loss_couples else None


def batched_engine(sequential: SequentialEngine, config: Config) -> BatchedEngine:
    """Build the batched engine; on a GPU, decide how many clients it trains at once."""
    from fedmpi.local.batched.engine import BatchedEngine

    engine = BatchedEngine(sequential)
    if engine.model.device.type != "cpu":
        engine.clients_at_once(rule_of(config.local, 0.0), engine.model.initial)
    return engine
