"""Estimates the memory and the step time of a configuration: trace, plan and replay."""

import json
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpctl.config.compose import Composed
from fsdpctl.config.decoder_config import model_type_of
from fsdpctl.config.schema import Config, Filled, Resolved
from fsdpctl.data.data_set import DataSet
from fsdpctl.engine.offloaded_inputs import host_inputs_bytes
from fsdpctl.errors import UsageError
from fsdpctl.estimate.cluster_specs import device_of, host_of, network_of, with_specs
from fsdpctl.estimate.planned_steps import plan_of_fullest_rank, plan_training, planned_steps
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.traced_model import TracedModel
from fsdpctl.io import files
from fsdpctl.io.activity import doing
from fsdpctl.io.run_files import ESTIMATE
from fsdpctl.plan.batch_plan import tokens_per_rank
from fsdpctl.plan.step_plan import MeshPosition
from fsdpctl.plan.strategy import FSDP2, FSDPCTL
from fsdpctl.predict.hardware import GroupShape
from fsdpctl.predict.memory_recorder import MemoryRecorder
from fsdpctl.predict.model_pass import ModelPass
from fsdpctl.predict.peak import StepEstimate, UnevenStepError, estimate_steps
from fsdpctl.predict.simulator import SimulatedStep, StepSimulator
from fsdpctl.predict.step_recorder import RankGroup, Steps
from fsdpctl.predict.task_recorder import Machine, TaskRecorder
from fsdpctl.resolve.attention_kernel import kernel_of
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.machine import with_cluster_ranks
from fsdpctl.resolve.prepare import Prepared, prepare
from fsdpctl.resolve.rules import check_trained_params
from fsdpctl.resolve.run_data import open_estimated_data
from fsdpctl.resolve.run_plan import RunPlan

_MAX_TRACED_MODELS = 64
# The time of a step with more passes is extrapolated from steps with three and with two passes.
_SIMULATED_PASSES = 3
_traced_models: OrderedDict[tuple[object, ...], TracedModel] = OrderedDict()


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """The predicted time of a step after the first step, in seconds."""

    seconds: float
    exposed_communication: float
    simulated: SimulatedStep  # a step with at most three passes
    tokens: int  # per step, of all ranks

    def extended(self, shorter: "StepPrediction", more: int) -> "StepPrediction":
        """Add `more` passes; `shorter` is the prediction for a step with one pass less.

        Each additional pass takes the difference of the two predictions.
        """

        seconds = self.seconds + more * (self.seconds - shorter.seconds)
        exposed = self.exposed_communication
        exposed += more * (exposed - shorter.exposed_communication)
        return replace(self, seconds=seconds, exposed_communication=exposed)


class Estimator:
    """An estimator of the memory and the step time of plans.

    An estimator caches the estimate of each plan. A model is traced once per process.
    """

    def __init__(self) -> None:
        self._estimates: dict[RunPlan, RunEstimate | UsageError] = {}
        self._data: dict[object, DataSet | UsageError] = {}

    def prepare(self, composed: Composed, *, all_strategies: bool = False) -> Prepared:
        """Prepare a configuration for its cluster, as `resolve.prepare`; data is opened once."""
        prepared = prepare(
            composed, ESTIMATE_ROLE, open_data=self._read, all_strategies=all_strategies
        )
        if prepared.data_or_error is not None:
            self._data[_data_key(prepared.config)] = prepared.data_or_error
        return prepared

    def _read(self, config: Config) -> DataSet:
        if (source := _data_key(config)) not in self._data:
            try:
                self._data[source] = open_estimated_data(config)
            except UsageError as error:
                self._data[source] = error
        return self.data_of(config)

    def data_of(self, config: Config) -> DataSet:
        """Return the data of a prepared configuration; UsageError if it could not be read."""
        data = self._data.get(_data_key(config), UsageError("data: not read"))
        if isinstance(data, UsageError):
            raise data
        return data

    def estimate(self, plan: RunPlan) -> RunEstimate:
        """Estimate a run; UsageError if its optimizer or engine does not support the model."""
        if plan not in self._estimates:
            try:
                self._estimates[plan] = self._estimate(plan)
            except UsageError as error:
                self._estimates[plan] = error
        estimate = self._estimates[plan]
        if isinstance(estimate, UsageError):
            raise estimate
        return estimate

    def estimate_if_fits(self, plan: RunPlan) -> RunEstimate | None:
        """Return the estimate of a run if the run is supported and fits, else None."""
        with suppress(UsageError):
            if (estimate := self.estimate(plan)).fits:
                return estimate
        return None

    def _estimate(self, plan: RunPlan) -> RunEstimate:
        plan = replace(plan, config=with_cluster_ranks(plan.config))
        config, batches, traced = plan.config, plan.batches, self.traced_model(plan.config)
        check_trained_params(config, traced.units)
        model_pass, last = _model_pass(plan, traced), traced.units[-1]
        training = plan_training(config, traced.units, batches.num_micro_batches)
        recorder = MemoryRecorder(model_pass, last.name, last_is_head=last.kind == "head")
        training = plan_of_fullest_rank(config.engine.name, training)
        steps = planned_steps(config, traced.units, training, recorder)
        step = _replay(config, recorder, steps)
        frozen_bytes = sum(
            param.numel * training.step_plan.dtypes_of(layout).compute.itemsize
            for layout in training.step_plan.all_layouts()
            for param in layout.params
            if not param.trainable
        )
        params = (param for unit in traced.units for param in unit.params if param.trainable)
        itemsize = training.dtypes.master.itemsize
        saved = sum(training.states.saved(param, itemsize) for param in params)
        inputs_bytes = host_inputs_bytes(model_pass.offloaded.values())
        return RunEstimate(
            plan=plan, num_params=traced.num_params, num_trained=traced.num_trained,
            num_active=traced.num_active, frozen_bytes=frozen_bytes, saved_states_bytes=saved,
            rank=training.step_plan.position.rank, step=step,
            host_model_bytes=training.host_model_bytes + inputs_bytes,
            assumed_packages=traced.packages, shared_bytes=training.step_plan.shared_bytes,
        )  # fmt: skip

    def predict(self, plan: RunPlan) -> StepPrediction:
        """Predict a training step on the hardware that the plan's cluster describes.

        UsageError if the hardware specs are incomplete.
        """
        traced, passes = self.traced_model(plan.config), plan.batches.num_micro_batches
        prediction = _simulate(plan, traced, min(passes, _SIMULATED_PASSES))
        if passes <= _SIMULATED_PASSES:
            return prediction
        shorter = _simulate(plan, traced, _SIMULATED_PASSES - 1)
        return prediction.extended(shorter, passes - _SIMULATED_PASSES)

    def traced_model(self, config: Filled) -> TracedModel:
        """Return the traced model of a configuration, for any activation checkpointing."""
        train, precision, device = config.train, config.precision, config.launch.device
        key = (
            config.model, precision.param_dtype, device, kernel_of(config), train.context_parallel,
            train.mlp_chunk_tokens, config.data.masks_documents, config.engine.emulated,
        )  # fmt: skip
        if key not in _traced_models:
            with doing("tracing the model"):
                _traced_models[key] = TracedModel(config)
            if len(_traced_models) > _MAX_TRACED_MODELS:
                _traced_models.popitem(last=False)
        return _traced_models[key]


def _data_key(config: Config) -> object:
    return config.data, config.model.path, config.train.seed


def _replay(config: Resolved, recorder: MemoryRecorder, steps: Steps) -> StepEstimate:
    draws = config.engine.name == FSDPCTL and not config.model.is_pretrained
    device, allocator = str(config.launch.device), config.launch.allocator
    try:
        return estimate_steps(recorder, steps, device=device, allocator=allocator, draws=draws)
    except UnevenStepError as error:  # for example with the blocks of Gemma 3n
        reason = "memory cannot be estimated with this recomputation"
        raise UsageError(f"model: {model_type_of(config.model)}: {reason}") from error


def _model_pass(plan: RunPlan, traced: TracedModel) -> ModelPass:
    micro, train = plan.batches.micro_batch_size, plan.config.train
    length = tokens_per_rank(train.seq_len, train.context_parallel)
    checkpointing = plan.config.activation_checkpointing
    return traced.model_pass(micro, length, train.loss_chunk_tokens or 0, checkpointing)


def _simulate(run: RunPlan, traced: TracedModel, passes: int) -> StepPrediction:
    config, plan = run.config, plan_training(run.config, traced.units, passes)
    machine = _machine(config, plan.step_plan.position)
    recorder = TaskRecorder(_model_pass(run, traced), machine)
    steps = planned_steps(config, traced.units, plan, recorder)
    simulator = StepSimulator()
    # The first step leaves collectives in flight, which end in the second.
    for _ in range(2):
        steps.step()
        step = simulator.run(recorder.take())
    if config.engine.name == FSDP2:
        num_tensors = sum(param.trainable for unit in traced.units for param in unit.params)
        step.seconds += config.engine.emulated.seconds_per_tensor * num_tensors
    tokens = run.batches.global_batch_size * config.train.seq_len
    return StepPrediction(step.seconds, step.exposed_communication, step, tokens)


def _machine(config: Resolved, position: MeshPosition) -> Machine:
    ranks, nodes = config.num_ranks, config.launch.nnodes
    context, ranks_per_node = config.train.context_parallel, ranks // nodes
    size, replicas = position.num_shards, position.num_replicas
    # The ranks of REPLICAS are on different nodes, unless a node has several replicas.
    num_nodes = replicas if size >= ranks_per_node else nodes
    groups = {
        RankGroup.SHARD: GroupShape(size, -(-size // ranks_per_node)),
        RankGroup.REPLICAS: GroupShape(replicas, num_nodes),
        RankGroup.WORLD: GroupShape(ranks, nodes),
        RankGroup.CONTEXT: GroupShape(context, -(-context // ranks_per_node)),
    }
    return Machine(device_of(config), network_of(config), host_of(config), groups)


def write_estimate(run_dir: Path, estimate: RunEstimate, estimator: Estimator) -> None:
    """Write the estimate of a run into its directory, with the predicted step time on GPUs."""
    text = json.dumps({**estimate.to_dict(), **_prediction(estimate.plan, estimator)}, indent=2)
    files.write_atomic(run_dir / ESTIMATE, text + "\n")


def _prediction(plan: RunPlan, estimator: Estimator) -> dict[str, float | str]:
    if plan.config.launch.device == "cpu":
        return {}
    config, source = with_specs(plan.config)
    try:
        seconds = estimator.predict(replace(plan, config=config)).seconds
    except UsageError:
        return {}  # a run starts without a prediction
    return {"predicted_step_seconds": seconds, "prediction_source": source}
