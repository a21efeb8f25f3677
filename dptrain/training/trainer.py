"""The trainer: the training loop, evaluation, prediction, and saving and loading of parameters.

The command line is a client of this module.

    from dptrain import Trainer

    trainer = Trainer("model0", "digits", epochs=4, seed=3)
    trainer.fit()
    trainer.evaluate()["accuracy"]

The same script runs on several ranks as ``mpirun -n 4 python script.py``.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.arguments import named_arguments
from dptrain.attributes import Sealed, read_only
from dptrain.backends.replica import Replica
from dptrain.comm.agreement import agree
from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.launching.launcher import find_launch
from dptrain.comm.node.activity import CALLBACK, EVALUATING, TRAINING
from dptrain.comm.signals import SIGNALS, StopRequest
from dptrain.comm.world import AgreedError, World
from dptrain.data import Dataset
from dptrain.data.base import AugmentFunction, Samples
from dptrain.data.loading.loader import BatchSource
from dptrain.data.object_networks import default_network_of
from dptrain.data.sources.objects import dataset_from
from dptrain.errors import UserError, shown
from dptrain.files import writing
from dptrain.measure.efficiency import Baseline
from dptrain.measure.machine.load import Clock
from dptrain.measure.step_record import EVALUATION
from dptrain.network.files import get_network
from dptrain.network.network import Network
from dptrain.network.zoo import recipe
from dptrain.notes import notes_shown
from dptrain.runs.settings import NO_LOGGER
from dptrain.texts import command_line
from dptrain.training.averaging import averaged_parameters, averaged_replica, has_average
from dptrain.training.balance import Balancer, Shares
from dptrain.training.baseline import InterleavedBaseline, open_loader
from dptrain.training.callbacks import Callback, Checkpoints, ExperimentLog, MetricsLog, Progress
from dptrain.training.digests.comparison import StateChecks, explaining_corruption
from dptrain.training.divergence import StableRate, raise_not_finite
from dptrain.training.engines import StepResult
from dptrain.training.evaluation.evaluation import (
    Score,
    open_test_data,
    prepare_score,
    results_of,
    score_in_detail,
    scored_text,
    weights_of,
)
from dptrain.training.evaluation.metrics import Metrics, check_metrics
from dptrain.training.evaluation.model import INSTEAD_OF_METHODS
from dptrain.training.evaluation.quality import Quality
from dptrain.training.history import History
from dptrain.training.job import Job, assemble, with_size_of_weights
from dptrain.training.output.progress import Progress as RunningState
from dptrain.training.output.summary import (
    Conclusion,
    conclude,
    nothing_left,
    print_stop_advice,
)
from dptrain.training.persistence.best_state import BestState
from dptrain.training.persistence.checkpoints import (
    Checkpoint,
    CheckpointStore,
    replica_arrays,
    restore_replica,
)
from dptrain.training.persistence.persistence import load_checkpoint, set_rate
from dptrain.training.persistence.snapshotting import Snapshots
from dptrain.training.profiling.energy import TrainingEnergy
from dptrain.training.resources import average_statistics, share_state
from dptrain.training.schedules import Schedule
from dptrain.training.selection import Selection
from dptrain.training.setting_names import resolved_name, unknown_setting
from dptrain.training.settings import GivenSettings, Settings, load_settings
from dptrain.training.settings import settings as all_settings
from dptrain.training.spec import RunSpec, job_settings

Method = TypeVar("Method", bound=Callable[..., Any])


def _exclusive(method: Method) -> Method:
    """Refuse calls of a method while another call uses the trainer; see `Trainer._using`."""

    @wraps(method)
    def call(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        with self._using(method.__name__):
            return method(self, *args, **kwargs)

    return cast("Method", call)


class Trainer(Sealed):
    """Train a network on a data set, on one rank or on many.

    Attributes are read-only; the arrays in `parameters` and `statistics` can be replaced. Settings
    are fixed when the trainer is made.

    Args:
        network: a `Network`, the name of one (`dptrain describe` lists them), a .toml file, or an
            .onnx file, which also contains the initial parameters; None for the default of the
            setting `network`, which the data decides.
        data: the name of a data set as for ``dptrain train --data``; None for data that `fit`
            receives, or without it for that of the recipe of a named network, which the first use
            opens; arrays ``(x_train, y_train, x_test,
            y_test)`` or ``(x, y)``; a mapping with these names; or any object that
            `dptrain.data.sources.objects` describes. A named network gets the channels or
            columns of the data and its number of classes or target columns; one of your own must
            have them.
        classes: names of the labels of arrays and objects: a list in the order of the labels 0, 1,
            …, or a mapping from label to name; None if labels are integers without names.
        callbacks: objects that run after steps and epochs; see `dptrain.training.callbacks`.
        augment: a function that changes each training sample in each epoch, before the changes of
            other settings; None for none. It receives an image (C, H, W), uint8 if the data has
            8-bit pixels and float32 inputs otherwise, or a vector (F,), and a
            `numpy.random.Generator` by seed, epoch and sample. It returns an array of the same
            shape and type, which may be the one that it received. Worker processes call it, with
            ``workers``.
        metrics: functions by name, which evaluations call with the predictions of all samples, as
            `predict` returns them, and their targets, int64 (n,) classes or values (n, F). The
            history has their results as ``validation_NAME``, the summary as ``test_NAME``.
        progress: show the progress on standard output of rank 0.
        world: the ranks; None for all ranks that the launcher started.
        **settings: settings with the names of the command line, for example ``batch_size=64``.
            Without `run_dir`, no files are written. `schedule` may be a function: ``f(progress)``
            is a factor of the learning rate, for a progress from 0 at first to 1 at the end.

    Attributes:
        callbacks: the callbacks, and those that write files; a list to which more can be added.
        history: one record per epoch.

    Raises:
        ReadOnlyError: an assignment to an attribute.
        UserError: a mistake of the user, or a difference between the ranks; on every rank.

    Examples:
        >>> trainer = Trainer("mlp-8", "irradiance?samples=200", epochs=1, progress=False)
        >>> len(trainer.fit())
        1
        >>> sorted(trainer.evaluate())
        ['loss', 'mae', 'r2', 'rmse', 'samples', 'scored']
    """

    _instead_of_pickle = "use trainer.save(FOLDER), and dptrain.load(FOLDER) to read it"
    _instead_of: ClassVar[Mapping[str, str]] = {
        **INSTEAD_OF_METHODS,
        "predict_classes": "use dptrain.load(RUN_DIR).predict_classes(x), or predict(x).argmax(1)",
        "get_params": "a Trainer is no estimator of scikit-learn; its settings are in spec",
        "set_params": "settings are fixed when a trainer is made: Trainer(..., NAME=VALUE)",
        "compile": "settings are arguments of the trainer: Trainer(..., optimizer='adam')",
        "train": "call fit()",
    }

    def __init__(
        self,
        network: Network | str | None = None,
        data: Any = None,
        *,
        classes: Any = None,
        callbacks: Sequence[Callback] = (),
        augment: AugmentFunction | None = None,
        metrics: Metrics | None = None,
        progress: bool = True,
        world: World | None = None,
        **settings: Any,
    ) -> None:
        world = _ranks(world, settings.get("timeout"))
        _check_callbacks(callbacks)
        self._metrics = check_metrics(metrics)
        named = network if network is None or isinstance(network, Network) else str(network)
        graph = call_on_all_ranks(
            world, lambda: get_network(named) if isinstance(named, str) else named
        )
        settings, function = _split_schedule(settings)
        given = call_on_all_ranks(world, lambda: _settings(network, data, settings))

        def fill(data: Any) -> Settings:
            filled = given if data is None else replace(given, data=_data_name(data))
            is_object = not (data is None or isinstance(data, str))
            if filled.network is None and is_object and filled.network_of_weights is None:
                filled = replace(filled, network=default_network_of(data, classes))
            return filled.with_recipe(graph)

        def open_job(data: Any, weights: Any = None) -> Job:
            chosen = call_on_all_ranks(world, lambda: fill(data))
            known = graph or call_on_all_ranks(world, chosen.load_network)
            source = _Source(data, classes, augment, function, weights)
            return _assemble(
                chosen, world, known, source, keeps_run=chosen.run_dir is not None,
                progress=progress,
            )  # fmt: skip

        # Without data, `fit` may receive some.
        job = None if data is None else open_job(data)
        self._world = world
        has_data = graph is not None and recipe(graph, given.optimizer).data is not None
        self._has_recipe = isinstance(network, str) and has_data
        shown_progress = [Progress()] if progress else []
        self._start([*shown_progress, *callbacks], job, open_job if data is None else None)

    @classmethod
    @named_arguments("a run continues in its own directory")
    def resume(
        cls,
        run_dir: str | os.PathLike[str],
        data: Any = None,
        *,
        classes: Any = None,
        callbacks: Sequence[Callback] = (),
        augment: AugmentFunction | None = None,
        metrics: Metrics | None = None,
        progress: bool = True,
        world: World | None = None,
        **settings: Any,
    ) -> Trainer:
        """Return a trainer that continues a run from its newest checkpoint.

        Args:
            run_dir: the run directory.
            data: the data of the run if it was made of Python objects; None opens it by its name.
            classes: as for the class.
            augment: the function of the run, if it had one.
            callbacks, metrics, progress, world: as for the class.
            **settings: settings that replace those of the run, for example ``steps=2000``.
        """
        world = _ranks(world, settings.get("timeout"))
        _check_callbacks(callbacks)
        named = {"data": data} if isinstance(data, str) else {}
        settings, function = _split_schedule(settings)
        chosen = call_on_all_ranks(
            world, lambda: load_settings({**settings, **named, "resume": str(run_dir)}, {})
        )
        trainer = cls.__new__(cls)
        trainer._metrics = check_metrics(metrics)
        graph = call_on_all_ranks(world, chosen.load_network)
        source = _Source(data, classes, augment, function)
        job = _assemble(chosen, world, graph, source, keeps_run=True, progress=progress)
        trainer._start([*([Progress()] if progress else []), *callbacks], job)
        return trainer

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        world: World,
        *,
        callbacks: Sequence[Callback] = (),
        keeps_run: bool = True,
    ) -> Trainer:
        """Return a trainer for settings with the recipe filled in, as the command line makes it.

        Args:
            settings: from `dptrain.training.settings.load_settings`.
            world: the ranks; every rank calls this method.
            callbacks: as for the class. No progress is shown unless a callback shows it.
            keeps_run: write a run directory, a new one in ``runs/`` unless the settings name one.
        """
        trainer = cls.__new__(cls)
        trainer._metrics = {}
        trainer._start(
            callbacks, assemble(settings, world, keeps_run=keeps_run, allows_balance=True)
        )
        return trainer

    def _start(
        self,
        callbacks: Sequence[Callback],
        job: Job | None,
        open_job: Callable[[Any, Any], Job] | None = None,
    ) -> None:
        # Checkpoints come last, so that the metrics of a step are written before its checkpoint.
        self._snapshots = Snapshots()
        logs = MetricsLog(), ExperimentLog()
        writers = Checkpoints(), self._snapshots
        self._checks = StateChecks(writers)
        self.callbacks = [*callbacks, *logs, self._checks, *writers]
        self.history = History()
        self._turn = threading.RLock()
        self._task: str | None = None
        self._stop_requested = False
        self._is_closed = False
        self._summary: Mapping[str, Any] | None = None
        self._open_job = open_job
        self._job: Job | None = None
        if job is not None:
            self._use(job)
        self.seal()

    def _use(self, job: Job) -> None:
        """Train a job from its first step on."""
        self._job = job
        counts_correct = job.network.loss.targets != "values"
        self._progress = RunningState(job.first_step, counts_correct, selection=job.selection)
        self._averaged: Replica | None = None
        self._average_received_at = job.replica.updates
        self._engine_is_open = False
        self._engine_scope = ExitStack()
        self._baseline = InterleavedBaseline(job, job.first_step)
        self._balancer = Balancer(job, job.first_step)

    # What a user reads.

    @property
    def job(self) -> Job:
        """The parts of the job, assembled."""
        if self._job is None:
            # Opening needs all ranks, and one alone may read an attribute.
            if self._has_recipe and self._world.size == 1:
                return self._opened()
            advice = "fit(), or fit(x, y)" if self._has_recipe else "fit(x, y)"
            data = "DATA" if self._has_recipe else "(x, y)"
            raise UserError(
                f"the trainer has no data yet; call {advice}, or pass the data: "
                f"Trainer(network, {data})"
            )
        return self._job

    def _opened(self) -> Job:
        """Return the job, with the data of the network's recipe if there is no other; all ranks
        call this.
        """
        if self._job is None and self._has_recipe and self._open_job is not None:
            self._use(self._open_job(None, None))
        return self.job

    @property
    def progress(self) -> RunningState:
        """The running state: step, loss, throughput."""
        assert self.job is not None
        return self._progress

    @property
    def best(self) -> Checkpoint | None:
        """On rank 0, the best checkpoint by the validation data; None if there is none."""
        return self.job.best.checkpoint

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """Results of the last `fit`, as in ``summary.json``, read-only; None before."""
        return self._summary

    @property
    def spec(self) -> RunSpec:
        """The resolved specification of the run."""
        return self.job.run_spec

    @property
    def network(self) -> Network:
        """The network."""
        return self.job.network

    @property
    def data(self) -> Dataset:
        """The data set."""
        return self.job.dataset

    @property
    def parameters(self) -> Mapping[str, NDArray[Any]]:
        """Parameters by name, for example ``conv1.weight`` (K, C, R, S).

        Reading returns a read-only copy; ``trainer.parameters[name] = array`` replaces one.

        These are the parameters of training, also if evaluations use their moving average.
        """
        return self.job.replica.parameters

    @property
    def statistics(self) -> Mapping[str, NDArray[Any]]:
        """Statistics by name, for example ``bn1.running_mean`` (C,), like `parameters`."""
        return self.job.replica.statistics

    @property
    def step(self) -> int:
        """Number of completed steps, including those before a resume."""
        return self.progress.step

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step; `set_learning_rate` sets it."""
        return self.job.schedule.rate(self.step)

    @property
    def ends_epoch(self) -> bool:
        """True if the last completed step ended an epoch, or training."""
        spec, progress = self.job.spec, self._progress
        return progress.step % spec.epoch_steps == 0 or self.is_last_step

    @property
    def is_last_step(self) -> bool:
        """True if no step follows: all are done, a stop was requested, or training ends early."""
        return self._progress.step == self.job.spec.steps or self._ends_early

    @property
    def _ends_early(self) -> bool:
        return self._progress.stopped or self._progress.selection.ends_training

    def _advice(self, name: str, value: Any) -> str | None:
        if name == "parameters":
            return "assign single arrays: trainer.parameters['NAME'] = array"
        if name in ("stop_training", "should_stop", "stopped"):
            return "call trainer.stop() in a callback"
        if resolved_name(name)[0] == "learning_rate":
            return f"call trainer.set_learning_rate({value!r}), for example in a callback"
        if name in ("callback", "callbacks"):
            return "pass callbacks=[...] to Trainer, or add to the list trainer.callbacks"
        named, advice = resolved_name(name)
        if named is None:
            return advice
        return (
            f"settings are fixed when a trainer is made: use Trainer(..., {named}={value!r}), or "
            f"Trainer.resume(RUN_DIR, {named}={value!r}) to continue a run"
        )

    def __repr__(self) -> str:
        job = self._job
        if job is None:
            return "Trainer(without data yet)"
        return (
            f"Trainer({job.network.name} on {job.dataset.name}, {job.spec.backend} "
            f"{job.spec.precision}, {job.world.size} rank{'s' * (job.world.size > 1)}, "
            f"step {self.step} of {job.spec.steps})"
        )

    # Training.

    @named_arguments("settings are arguments of the trainer: Trainer(network, data, batch_size=64)")
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        epochs: int | None = None,
        stop: StopRequest | None = None,
    ) -> History:
        """Train until all steps of the job are done, or until a stop is requested.

        With `epochs`, training continues for so many epochs, also if all steps were made. It
        continues with the present parameters: those of the best epoch after complete training.
        Schedules that depend on the length of the run begin anew with the first of these steps, and
        `patience` counts from there. ``dptrain train --resume RUN --epochs TOTAL`` does the same
        with the parameters of the last step.

        Ctrl-C, SIGTERM and `stop` stop training after the current step; `fit` then returns and can
        be called again to continue. It makes no steps if all are made, if the accuracy
        `until_accuracy` was reached, or if the last `patience` evaluations were no improvement; a
        line of the progress, or a warning without progress, then says why.

        If training was not stopped, it ends with the best parameters by the validation data, and
        they are evaluated on the test data.

        Args:
            x, y: training data, as ``data=(x, y)`` of the class, or `x` alone as ``data=x``, for a
                trainer that was made without data.
            sample_weight: numbers (n,), the weights of the samples of `x` in the training loss,
                which is the weighted mean Σ wᵢ lᵢ / Σ wᵢ over each minibatch; `class_weights` is a
                further factor. None weights all alike. Evaluations during training do not use it.
            epochs: passes over the training data from now on; None completes those of the trainer.
            stop: a stop request that may have been made before; None makes a new one.

        Returns:
            The history, one record per epoch.

        Raises:
            UserError: `fit` is running already, also in another thread; the trainer is closed; or
                it has other data.
            CorruptedError: replicas differ, state has changed between two updates, or a gradient
                that was computed twice differs; the message names the rank and the tensor.
            DivergedError: the loss is not finite; the message names the step, the layer and the
                rank.
        """
        with self._using("fit"), ExitStack() as stack:
            self._check_open()
            self._receive(x, y, sample_weight)
            self._extend(epochs)
            request = stack.enter_context(StopRequest()) if stop is None else stop
            request.listen(*SIGNALS)
            self.progress.stopped, self._stop_requested = False, False
            self._warn_if_over()
            self._open_engine(stack)
            self._prepare_evaluations()
            # A full garbage collection visits some 40,000 objects and delays all ranks by 20 ms.
            # Before training it releases the memory of former engines and trainers.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            for callback in self.callbacks:
                stack.callback(callback.close)
                callback.on_fit_begin(self)
            self._baseline = InterleavedBaseline(self.job, self.step)
            stack.callback(self._baseline.close)
            stack.callback(self.job.world.activity.enter, 0, 0)
            self._balancer = Balancer(self.job, self.step)
            self._stable_rate = StableRate()
            load = Clock.now()
            with explaining_corruption(self.job):
                self._train(request)
            self._end_training()
            self._finish(self._conclude(self._baseline.result(), load))
        return self.history

    def _receive(self, x: Any, y: Any, sample_weight: Any) -> None:
        """Use the data that `fit` receives; all ranks call this."""
        if x is None and y is not None:
            raise UserError("fit() received y without x; call fit(x, y)")
        if x is None and sample_weight is not None:
            raise UserError(
                "fit() received sample_weight without x; call fit(x, y, sample_weight=w), or pass "
                "the weights with the data: Trainer(network, {'x': x, 'y': y, 'sample_weight': w})"
            )
        if x is None:
            self._opened()
            return
        if self._open_job is None or (self._job is not None and self.step):
            raise UserError(
                "fit(x, y) would replace the data of the trainer; fit() and fit(epochs=N) train "
                "with its data; for other data make another Trainer(network, (x, y)), which can "
                "begin with the parameters of a file: weights=FILE"
            )
        if self._job is not None and self._job.keeps_run:
            raise UserError(
                f"the trainer has made the run directory for the data {self._job.dataset.name}; "
                "pass the data to the trainer: Trainer(network, (x, y), run_dir=...)"
            )
        self._use(self._open_job(x if y is None else (x, y), sample_weight))
        self._open_job = None

    def _extend(self, epochs: int | None) -> None:
        """Change the length of training; all ranks call this."""
        job = self.job
        agree(job.world, {"epochs of fit": epochs})
        if epochs is None:
            return

        def extend() -> bool:
            declared = next(each for each in all_settings() if each.name == "epochs")
            return job.extend(self.step, declared.check(epochs, "epochs"))

        if call_on_all_ranks(job.world, extend):
            self.progress.begin_again()
            job.selection = self.progress.selection

    def set_learning_rate(self, rate: float | None) -> None:
        """Set the learning rate of all steps that follow, in place of the schedule.

        Every rank calls this method with the same rate, for example in ``AfterEpoch``. Checkpoints
        store the rate, so that a resumed run continues with it. On a GPU, steps that are enqueued
        already keep theirs; none are after an epoch, or when ``AfterStep`` calls its function.

        Args:
            rate: above 0; None returns to the schedule.

        Raises:
            UserError: the rate is out of range, or differs between the ranks; on every rank.
        """
        job = self.job

        def changed() -> Schedule:
            declared = next(each for each in all_settings() if each.name == "learning_rate")
            return replace(job.schedule, fixed=declared.check(rate, "learning rate"))

        job.schedule = call_on_all_ranks(job.world, changed)
        agree(job.world, {"learning rate": job.schedule.fixed})

    def stop(self) -> None:
        """Stop training after the next complete step, as a signal does.

        Callbacks of any rank may call it, for example ``AfterEpoch``; `fit` then returns.

        Raises:
            UserError: `fit` is not running.
        """
        if self._task != "fit":
            raise UserError(
                "stop() has no effect, because fit() is not running; call it in a callback"
            )
        self._stop_requested = True

    @contextmanager
    def _using(self, task: str) -> Iterator[None]:
        """Refuse a call while another one uses the replica.

        Callbacks may call `evaluate`, `predict` and `save` in the thread of `fit`.
        """
        name = type(self).__name__
        if not self._turn.acquire(blocking=False):
            raise UserError(
                f"{name}.{task}() was called while another thread runs {name}.{self._task}(); "
                f"wait until it ends, or make a {name} for each thread"
            )
        outer = self._task
        try:
            if outer is not None and (task in ("fit", "load") or outer != "fit"):
                raise UserError(
                    f"{name}.{task}() was called inside of {name}.{outer}(), which has not ended; "
                    f"call {task}() after it"
                )
            self._task = outer or task
            yield
        finally:
            self._task = outer
            self._turn.release()

    def _check_open(self) -> None:
        """Refuse to train in a run directory that another process may use."""
        if self._is_closed and self._job is not None and self._job.keeps_run:
            raise UserError(
                "the trainer is closed, and another process may continue its run; use "
                "Trainer.resume(RUN_DIR)"
            )

    def _warn_if_over(self) -> None:
        """Say why no step is left, unless the progress says it."""
        shows = any(isinstance(callback, Progress) for callback in self.callbacks)
        reason = nothing_left(self.job, self.step)
        if reason is not None and not shows and self.job.world.is_rank_zero:
            warnings.warn(f"fit() makes no step: {reason}", UserWarning, stacklevel=4)

    def _train(self, stop: StopRequest) -> None:
        """Make all steps that are left; shares of the ranks change between some of them."""
        job = self.job
        with TrainingEnergy(job, self.step) as energy:
            if not self._has_steps_left():
                return
            self._report_shares()
            job.recorder.restart()
            energy.after_step(self.step)
            shares: Shares | None = job.shares
            while shares is not None:
                with self._open_loader() as batches:
                    shares = self._make_steps(batches, stop, energy)
                if shares is not None:
                    self._divide(shares)

    def _make_steps(
        self, batches: BatchSource, stop: StopRequest, energy: TrainingEnergy
    ) -> Shares | None:
        """Make steps until training ends, or until the ranks receive other shares.

        Returns:
            The other shares; None if training ends.
        """
        job, engine, progress = self.job, self.job.engine, self._progress
        enter = job.world.activity.enter
        for step in range(self.step, job.spec.steps):
            is_last = step + 1 == job.settings.stop_after
            stops = stop.requested or self._stop_requested or is_last
            enter(TRAINING, step + 1)
            engine.requires_guard = self._checks.is_due(self, step + 1)
            engine.step(batches, job.schedule.rate(step), stop=stops)
            waits = self._needs_parameters(step + 1)
            for result in engine.results(wait=waits):
                if not math.isfinite(result.loss):
                    # Then no rank made an update, and a corrupt replica may be the cause.
                    self._checks.compare(job, self.step)
                    raise_not_finite(job, result, self._stable_rate)
                self._stable_rate.add(result.loss, result.learning_rate)
                self._after_step(result)
            if waits or progress.stopped:
                if self._ends_early:
                    return None
                if self._baseline.is_due(self.step):
                    self._baseline.run_block(self.step)
            energy.after_step(step + 1)
            if waits and self._balancer.is_due(self.step):
                shares = self._balancer.next_shares(self.step)
                if shares is not None:
                    return shares
        return None

    # Short steps take 35 to 70 µs on a GPU, so that what follows does little in most steps.

    def _after_step(self, result: StepResult) -> None:
        job, progress = self._job, self._progress
        assert job is not None
        progress.add(result)
        progress.stopped = progress.stopped and progress.step < job.spec.steps
        if job.spec.batch_norm == "rank" and self._reads_statistics():
            self._average_statistics()
        ends_epoch = self.ends_epoch
        if ends_epoch and self._is_evaluation_due():
            self._evaluate_validation_data()
            # The evaluation may end training, which is then complete.
            progress.stopped = progress.stopped and not progress.selection.ends_training
        job.world.activity.enter(CALLBACK, progress.step)
        for callback in self.callbacks:
            callback.on_step(self, result)
        if ends_epoch:
            self._end_epoch()

    def _end_epoch(self) -> None:
        record = self.progress.epoch_record(self.job.spec)
        self.history.append(record)
        for callback in self.callbacks:
            callback.on_epoch(self, record)
        if self.step % self.job.spec.epoch_steps == 0:
            self.progress.begin_epoch()

    def _needs_parameters(self, step: int) -> bool:
        """Return True if anything reads the parameters after step number `step`."""
        job = self.job
        spec = job.spec
        ends = spec.steps, job.settings.stop_after, self._baseline.due, self._balancer.due
        if step in ends:
            return True
        if not step % spec.epoch_steps and self._evaluates_after(step):
            return True
        return any(callback.needs_parameters(self, step) for callback in self.callbacks)

    def _is_evaluation_due(self) -> bool:
        if self.step == self.job.spec.steps:
            return self.job.dataset.validation is not None
        return self._evaluates_after(self.step)

    def _evaluates_after(self, step: int) -> bool:
        """Return True if step number `step` ends an epoch with an evaluation."""
        spec = self.job.spec
        if self.job.dataset.validation is None:
            return False
        epoch, rest = divmod(step, spec.epoch_steps)
        return not rest and bool(spec.evaluate_every) and epoch % spec.evaluate_every == 0

    def _reads_statistics(self) -> bool:
        """Return True if anything reads the running statistics after the last completed step."""
        is_saved = self.job.keeps_run and self.step % self.job.spec.checkpoint_every == 0
        is_kept = self._snapshots.needs_parameters(self, self.step)
        return self._is_evaluation_due() or is_saved or is_kept or self.is_last_step

    def _average_statistics(self) -> None:
        """Average running statistics if each rank has its own; all ranks call this."""
        job = self.job
        if job.spec.batch_norm == "rank":
            count = min(job.spec.batch_size, len(job.dataset.train))
            average_statistics(job.world, job.replica, job.sampler(count).shard_size(count))

    def _prepare_evaluations(self) -> None:
        """Do once, before the first step, what evaluations on a device need."""
        job = self.job
        if job.dataset.validation is None or not self._has_steps_left():
            return
        if job.keeps_best and job.spec.best_by != "none":
            job.best.prepare(job.replica)
        if job.validation_at is not None and not self._metrics and not job.spec.shards:
            prepare_score(
                job.replica,
                job.dataset.validation,
                job.world,
                job.shares.counts,
                job.validation_at,
            )

    def _evaluate_validation_data(self) -> None:
        job = self.job
        assert job.dataset.validation is not None
        job.world.activity.enter(EVALUATING, self.step)
        before_ns = sum(job.recorder.totals_ns.values())
        with job.recorder.between(EVALUATION):
            with self._averaged_parameters():
                found, _ = self._score(job.dataset.validation, quality=False)
            self.progress.add_score(found, job.spec, before_ns)
            job.schedule = replace(job.schedule, reductions=self.progress.selection.reductions)
            if self.progress.is_best and job.keeps_best:
                job.best.keep(job.replica, self.step, job.checkpoint_facts().to_mapping())

    def _score(
        self,
        samples: Samples,
        *,
        quality: bool = True,
        weights: NDArray[np.float64] | None = None,
    ) -> tuple[Score, Quality | None]:
        """Return the score with the metrics of the user, and the quality of predictions."""
        job = self.job
        return score_in_detail(
            job.replica,
            samples,
            job.world,
            job.dataset.preprocessing,
            job.shares.counts,
            self._metrics,
            quality=quality,
            first=job.validation_at if samples is job.dataset.validation else None,
            weights=weights,
        )

    def _end_training(self) -> None:
        """Restore the best parameters and evaluate them on the test data, unless stopped.

        A request that arrives during the last step stops nothing: a resumed run would have no step
        left.
        """
        job = self.job
        if self.progress.stopped:
            return
        with job.recorder.between(EVALUATION):
            self._restore_best()
            # A run that had ended keeps its results.
            if job.recorder.steps or self._written_summary() is None:
                with self._averaged_parameters(), self._test_errors():
                    found = self._score(job.dataset.test)
                self.progress.test_score, self.progress.test_quality = found

    @contextmanager
    def _test_errors(self) -> Iterator[None]:
        """Say that training is complete if test samples cannot be read."""
        try:
            yield
        except UserError as error:
            run = self.job.run
            if run is None:
                raise
            kind = AgreedError if isinstance(error, AgreedError) else UserError
            raise kind(
                f"{error}; training is complete: correct the test data, and use "
                f"{command_line('evaluate', run.path)}"
            ) from None

    def _averaged_parameters(self) -> AbstractContextManager[None]:
        """Let parameters be their moving average in this context, if there is one."""
        self._average_received_at = self.job.replica.updates
        return averaged_parameters(self.job.world, self.job.replica, self.job.spec.strategy)

    def _restore_best(self) -> None:
        """Set all ranks to the state of the best checkpoint, if it is not that of the last step."""
        job = self.job
        step = self.progress.selection.best_step
        if step in (-1, self.step):
            return
        call_on_rank_zero(job.world, lambda: job.best.restore(job.replica))
        with job.replica.parameters.write_flat():
            share_state(job.world, job.replica, mixed=job.is_mixed)
        self.progress.restored_step = step

    def _written_summary(self) -> dict[str, Any] | None:
        """Return the summary that the run wrote when it ended after the last completed step."""
        written = None if self.job.run is None else self.job.run.summary_of(self.step)
        found: dict[str, Any] | None = self.job.world.broadcast_json(written)
        return found

    def _has_steps_left(self) -> bool:
        return self.step < self.job.spec.steps and not self._ends_early

    def _open_engine(self, stack: ExitStack) -> None:
        if self._engine_is_open:
            self.job.reopen_engine()
        self._engine_scope = stack.enter_context(ExitStack())
        self._engine_scope.enter_context(self.job.engine)
        self._engine_is_open = True

    def _divide(self, shares: Shares) -> None:
        """Continue with other shares of the ranks; all ranks call this between two steps."""
        self._engine_scope.close()
        self.job.divide(shares)
        self._engine_scope.enter_context(self.job.engine)
        # The memory of the replica before, which is in a reference cycle.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._report_shares()

    def _report_shares(self) -> None:
        """Show and record unequal shares."""
        if self.job.shares.counts:
            for callback in self.callbacks:
                callback.on_shares(self)

    @contextmanager
    def _open_loader(self) -> Iterator[BatchSource]:
        job = self.job
        job.input_times.starts.append(job.recorder.steps)
        with open_loader(
            job,
            range(self.step, job.spec.steps),
            batch_size=job.spec.batch_size,
            **job.passes,
            times=job.input_times,
        ) as batches:
            yield batches

    def _conclude(self, baseline: Baseline, load: Clock | None) -> Conclusion:
        job = self.job
        if not job.recorder.steps:
            # No step was left. The run keeps its summary, if it wrote one before it ended.
            written = self._written_summary()
            if written is not None:
                return Conclusion(written, (), ())
        return conclude(job, self.progress, baseline, load)

    def _finish(self, conclusion: Conclusion) -> None:
        self._summary = read_only(conclusion.summary)
        if self.job.run is not None:
            self.job.run.write_quality(self.progress.test_quality, self.job.dataset)
            self.job.run.write_summary(conclusion.summary)
        for callback in self.callbacks:
            callback.on_fit_end(self, conclusion)

    # Evaluation and prediction.

    @named_arguments()
    @_exclusive
    def evaluate(
        self,
        data: Any = None,
        y: Any = None,
        *,
        classes: Any = None,
        sample_weight: Any = None,
    ) -> dict[str, Any]:
        """Evaluate the network on the test split of its data, or on other data.

        Every rank calls this method and evaluates a share of the samples.

        Args:
            data: None for the test split; else as for the class.
            y: targets, if `data` has the samples alone.
            classes: names of the labels of `data`, as for the class. Integers without names are
                matched with the classes of the network by their value, never by their position.
            sample_weight: numbers (n,), weights of the evaluated samples in ``loss``, ``accuracy``,
                ``mae``, ``rmse`` and ``r2``; None uses those that `data` has, if any. Other results
                count the samples alike, and `metrics` receive no weights.

        Returns:
            ``scored`` (which samples were evaluated), ``notes`` (what was left out or converted of
            other data, if anything was), ``samples`` (their number), ``loss`` (mean over samples)
            and, unless the network predicts values, ``accuracy``; the `metrics` of the class;
            further results of each class or of values, see
            `dptrain.training.evaluation.evaluation.results_of`.
        """
        job = self._opened()
        notes: tuple[str, ...] = ()
        self._average_statistics()
        data = data if y is None else (data, y)
        if data is None:
            samples = job.dataset.test
            scored = f"the test split of {job.dataset.name}, {len(samples):,} samples"
        else:
            samples, scored, notes = open_test_data(
                data,
                job.spec.data,
                job.network,
                job.dataset.preprocessing,
                job.world,
                seed=job.spec.seed,
                classes=classes,
            )
        weights = weights_of(samples, job.world, sample_weight, is_passed=data is not None)
        with self._averaged_parameters():
            found = self._score(samples, weights=weights)
        mentioned = {"notes": list(notes)} if notes else {}
        return {"scored": scored_text(scored, weights), **mentioned, **results_of(*found)}

    @named_arguments()
    @_exclusive
    def predict(self, x: ArrayLike) -> NDArray[np.float32]:
        """Return the predictions for raw samples; each rank computes what it is passed.

        Args:
            x: raw samples as the training data stores them, for example uint8 images
                (n, H, W, C) or (n, C, H, W), or rows (n, F); see `Preprocessing.apply` for more.
                The preprocessing of the data set is applied.

        Returns:
            (n, F): probabilities of the classes, or predicted values in the unit of the data.

        Raises:
            UserError: the samples do not fit the preprocessing; the message names the difference.
                Or only rank 0 has the moving average of the parameters.
        """
        preprocessing, replica = self.job.dataset.preprocessing, self.job.replica
        if has_average(replica):
            self._require_average()
            self._averaged = replica = averaged_replica(replica, self._averaged)
        predictions = replica.predict(preprocessing.apply(x))
        return np.asarray(preprocessing.to_values(predictions), np.float32)

    def _require_average(self) -> None:
        """Refuse a rank that has not received the present average of the parameters."""
        job = self.job
        is_old = self._average_received_at != job.replica.updates
        if is_old and job.spec.strategy == "central" and not job.world.is_rank_zero:
            raise UserError(
                f"rank {job.world.rank} has no moving average of the parameters after step "
                f"{self.step}, because with --strategy central rank 0 computes it; predict on rank "
                "0, or call evaluate() on all ranks first"
            )

    # Files.

    @named_arguments()
    @_exclusive
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint: parameters, running statistics, optimizer state, step and settings.

        Every rank calls this method; rank 0 writes.

        Args:
            path: a folder, which is made; `Trainer.load` and `dptrain.load` read it.

        Returns:
            The folder.

        Raises:
            UserError: the checkpoint cannot be written; on every rank.
        """
        job, folder = self._opened(), Path(path)

        def write() -> None:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            facts = job.checkpoint_facts()
            store = CheckpointStore(folder)
            step = self.progress.restored_step or self.step
            store.save(step, replica_arrays(job.replica), facts.to_mapping())

        self._average_statistics()
        call_on_rank_zero(job.world, write)
        return folder

    @named_arguments()
    @_exclusive
    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore parameters, statistics, optimizer state and step number from a checkpoint or run.

        Every rank calls this method; rank 0 reads the files. A trainer with a run directory refuses
        it, because the files of a run describe the steps that were made in it.

        Args:
            path: a run directory, or a folder that `save` wrote.

        Raises:
            UserError: there is no valid checkpoint, it is of another network, or the trainer has a
                run directory; on every rank.
        """
        job = self._opened()
        if job.keeps_run:
            raise UserError(
                "load() would put parameters of other steps into the run directory of this "
                "trainer; continue that run with Trainer.resume(PATH), begin with its parameters "
                "as weights=FILE, or leave out run_dir"
            )

        def read() -> tuple[int, float | None]:
            checkpoint = load_checkpoint(Path(path))
            restore_replica(job.replica, checkpoint)
            return checkpoint.step, set_rate(checkpoint, job.spec)

        step, rate = job.world.broadcast_json(call_on_rank_zero(job.world, read))
        job.schedule = replace(job.schedule, fixed=rate, reductions=0)
        share_state(job.world, job.replica, mixed=job.is_mixed)
        self._average_received_at = job.replica.updates
        job.selection = selection = Selection.of(job.spec)
        self._progress = RunningState(step, self.progress.counts_correct, selection=selection)
        job.best = BestState()

    # As a context manager, the trainer releases the run directory.

    def close(self) -> None:
        """Release the run directory, so that another process can continue the run."""
        self._is_closed = True
        if self._job is not None and self._job.run is not None:
            self._job.run.release()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def connect_ranks(timeout: float | None = None) -> World:
    """Return all ranks that the launcher started; one process without a launcher needs no MPI.

    If there are several ranks, an exception that a script does not catch ends all of them.
    """
    if find_launch(os.environ).size == 1:
        return World.single()
    from dptrain.comm.launching.script import end_job_on_exception

    end_job_on_exception()
    # `Settings` refuses a timeout that is no number, on every rank.
    return World.connect(timeout=timeout if isinstance(timeout, int | float) else 300.0)


class _Source(NamedTuple):
    """The arguments of `Trainer` that are objects, from which its data and schedule are made."""

    data: Any
    classes: Any
    augment: AugmentFunction | None
    schedule: Callable[[float], float] | None
    weights: Any = None


def _split_schedule(
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], Callable[[float], float] | None]:
    """Return the settings with the schedule as text, and the function of the schedule."""
    schedule = settings.get("schedule")
    if not callable(schedule):
        return dict(settings), None
    return {**settings, "schedule": "function"}, schedule


def _assemble(
    chosen: Settings,
    world: World,
    network: Network,
    source: _Source,
    *,
    keeps_run: bool,
    progress: bool,
) -> Job:
    agree(world, job_settings(chosen))
    if progress and keeps_run:
        print_stop_advice(world)
    network = with_size_of_weights(chosen, network, world)

    def open_objects() -> Dataset | None:
        data, classes, augment, _, weights = source
        is_plain = classes is None and augment is None and weights is None
        if is_plain and (data is None or isinstance(data, str)):
            return None
        if not (augment is None or callable(augment)):
            raise UserError(
                f"augment is {augment!r}; expected a function of an image and a generator"
            )
        dataset = dataset_from(
            chosen.data if data is None else data,
            network,
            seed=chosen.seed,
            ranks_per_node=world.local_size,
            classes=classes,
            weights=weights,
        )
        return replace(dataset, augment=augment)

    shows = progress and world.is_rank_zero
    with notes_shown(lambda note: print(f"data: {note}")) if shows else nullcontext():
        dataset = call_on_all_ranks(world, open_objects)
        return assemble(
            chosen,
            world,
            network=network,
            dataset=dataset,
            keeps_run=keeps_run,
            quiet=not progress,
            allows_balance=True,
            function=source.schedule,
        )


def _check_callbacks(callbacks: Any) -> None:
    if isinstance(callbacks, Sequence):
        wrong = [item for item in callbacks if not isinstance(item, Callback)]
        if not wrong:
            return
        found = f"contains {wrong[0]!r}"
    else:
        found = f"is {callbacks!r}"
    raise UserError(
        f"callbacks {found}; expected a list of Callback objects, such as [AfterStep(function)]"
    )


def _settings(network: Network | str | None, data: Any, given: Mapping[str, Any]) -> GivenSettings:
    named = dict(given)
    if "resume" in named:
        raise UserError("Trainer starts a new run; use Trainer.resume(RUN_DIR) to continue one")
    if network is not None:
        named["network"] = network.name if isinstance(network, Network) else str(network)
    if data is not None:
        named["data"] = _data_name(data)
    for name in named:
        if name not in GivenSettings.__dataclass_fields__ or name == "origins":
            raise UserError(unknown_setting("Trainer has no setting", name))
    chosen = GivenSettings(**named, origins=dict.fromkeys(named, "argument"))
    if chosen.run_dir is None and (chosen.tensorboard or chosen.logger != NO_LOGGER):
        name = "tensorboard" if chosen.tensorboard else "logger"
        raise UserError(f"{name} writes files to the run directory; set run_dir too")
    return chosen


def _data_name(data: Any) -> str:
    return data if isinstance(data, str) else "arrays"


def _ranks(world: Any, timeout: Any) -> World:
    """Return the ranks: those that a caller passes, or all that the launcher started."""
    if world is None:
        return connect_ranks(timeout)
    if not isinstance(world, World):
        raise UserError(
            f"world is {shown(repr(world))}; leave it out: the launcher decides about the ranks, "
            "as in mpirun -n 4 python script.py"
        )
    return world
