"""The course of one run: start, steps with evaluations and checkpoints between them, end."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kt_runtime.errors import ConflictError, KtError, NumericsError, UserError
from kt_runtime.files import TEMPORARY_PREFIX, move_directory, write_json
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.recipe.fields import BEST
from kt_runtime.train.resident import Resident
from kt_runtime.train.run import checkpoints, plots, schedule
from kt_runtime.train.run.cadence import Cadence
from kt_runtime.train.run.checkpoints import Checkpoint
from kt_runtime.train.run.display import Display
from kt_runtime.train.run.inputs import Inputs
from kt_runtime.train.run.interruption import Interruption
from kt_runtime.train.run.journal import Journal
from kt_runtime.train.run.result_files import write_results
from kt_runtime.train.run.run_identity import identity, settings
from kt_runtime.train.stages import batches
from kt_runtime.train.stages.evaluation import Best, Evaluator
from kt_runtime.train.stages.objective import Objective, Row, check_finite
from kt_runtime.wire.replies import OptimReply, PublishReply, StatusReply


@dataclass(frozen=True)
class RunResult:
    """`optim_finished_at`: end of the last optimizer step in the resident, Unix time in seconds.

    `checkpoint`: the last one saved, or None. `interrupted`: a later run can resume from it.
    """

    steps: int
    loss_first: float
    loss_last: float
    optim_finished_at: float
    checkpoint: str | None
    published: PublishReply | None
    resumed_from: str | None = None
    interrupted: bool = False


@dataclass
class Training:
    """A running training. Call `start`, then `steps`, then `finish` with the result of `steps`."""

    client: Resident
    session: str
    recipe: Recipe
    inputs: Inputs
    journal: Journal
    objective: Objective
    cadence: Cadence
    display: Display
    interruption: Interruption
    status: StatusReply

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.objective, self.inputs.evaluation, self.recipe)
        self.best = Best.of(self.recipe)
        self.last: Path | None = None
        self.run_number = 0
        self.resumed_from: Path | None = None
        self.optim_finished_at = 0.0
        self._took_best = False
        self.schedule = schedule.Schedule(self.recipe, max(self.cadence.total_steps, 1))

    # Start.

    def start(self, checkpoint: Checkpoint | None) -> None:
        if self.recipe.do_train:
            checkpoints.remove_unfinished(self.recipe.output_dir)
            self.run_number = checkpoints.run_number(self.recipe.output_dir, checkpoint)
        if checkpoint is None:
            if self.recipe.do_train:
                self._start_over()
            self._prepare()
            if self.recipe.do_train and self.recipe.eval_on_start:
                self._evaluate()
            return
        self.journal.restore(checkpoint.step, checkpoint.state["log_history"], checkpoint.ours["journal"])
        self.best.restore(checkpoint.ours["best"], beside=checkpoint.path)
        self.schedule.restore(checkpoint.ours["schedule"])
        self.objective.restore(checkpoint.arrays())
        self.last = self.resumed_from = checkpoint.path
        left = self.cadence.total_steps - checkpoint.step
        self.display.say(
            f"resumed {checkpoint.path} at step {checkpoint.step} of {self.cadence.total_steps} (epoch "
            f"{self.cadence.epoch(checkpoint.step):.2f}): "
            + (f"{left} to go" if left > 0 else "nothing is left to train")
        )
        self._prepare()

    def _start_over(self) -> None:
        """Removes result files that scripts would take for this run's. Checkpoints and adapter stay until replaced."""
        self.journal.begin()
        for name in checkpoints.RESULT_FILES:
            (self.recipe.output_dir / name).unlink(missing_ok=True)

    def _prepare(self) -> None:
        self.objective.prepare(self._coming_rows(), lambda: self.interruption.requested)

    def _coming_rows(self) -> Iterator[Row]:
        """The rows of training and evaluation in the order of their use; a row may come several times."""
        recipe = self.recipe
        if recipe.do_train:
            for step in batches.plan(self.inputs.train, recipe, self.cadence.total_steps, first_step=self.journal.done):
                yield from (row for micro_batch in step for row in micro_batch)
        if recipe.do_eval or recipe.eval_on_start or recipe.eval_strategy != "no":
            yield from (row for rows in self.inputs.evaluation.values() for row in rows)

    # Steps.

    def steps(self) -> bool:
        """Trains to the end; False if interrupted before."""
        if not self.recipe.do_train:
            return True
        self._catch_up_evaluation()
        plan = batches.plan(self.inputs.train, self.recipe, self.cadence.total_steps, first_step=self.journal.done)
        for micro_batches in plan:
            if self.interruption.requested:
                return False
            if self.best.is_exhausted:
                self.display.say(
                    f"stopped after step {self.journal.done}: {self.best.since} evaluations without a better "
                    f"{self.best.key} than {self.best.metric:.4f} (early_stopping_steps)"
                )
                break
            rate = self.schedule.rate(self.journal.done)
            try:
                outcome = self.objective.accumulate(micro_batches)
                check_finite({"loss": outcome.loss, **outcome.metrics})
                answer = self._optim_step(rate)
                check_finite({"grad_norm": answer.grad_norm})
            except NumericsError as error:
                raise self._explained(error, micro_batches, rate) from error
            self.optim_finished_at = answer.finished_at
            self.journal.step(outcome, rate, answer.grad_norm)
            self._after_step(self.journal.done)
        return not (self.interruption.requested and self.journal.done < self.cadence.total_steps)

    def _optim_step(self, rate: float) -> OptimReply:
        recipe = self.recipe
        return self.client.optim_step(
            self.session,
            rate,
            beta1=recipe.adam_beta1,
            beta2=recipe.adam_beta2,
            epsilon=recipe.adam_epsilon,
            weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.max_grad_norm,
            lora_plus_ratio=recipe.loraplus_lr_ratio or 1.0,
        )

    def _after_step(self, step: int) -> None:
        is_better = self.cadence.evaluates(step) and self._evaluate()
        if self.cadence.saves(step) or (is_better and self.keeps_best):
            self._save()
        if self.cadence.publishes(step):
            _, refusal = self._publish()
            if refusal is not None:  # hours of training must not be lost; `finish` reports the error again
                self.display.say(f"step {step} was not published: {refusal}")

    def _evaluate(self) -> bool:
        """True for the best evaluation so far. A resumed run repeats an evaluation that Ctrl-C has ended."""
        figures = self._figures()
        if figures is None:
            return False
        self.journal.evaluated(figures)
        if not self.recipe.tracks_best or not self.journal.done:
            return False
        is_better = self.best.judge(self.journal.done, figures)
        self.schedule.evaluated(figures[self.best.key])
        if is_better and self.keeps_best:
            self.best.checkpoint = str(checkpoints.checkpoint_path(self.recipe.output_dir, self.journal.done))
        return is_better

    def _figures(self) -> dict[str, float] | None:
        """None if Ctrl-C ended the evaluation. Raises NumericsError, naming the step, for NaN or infinity."""
        try:
            return self.evaluator.run(lambda: self.interruption.requested)
        except NumericsError as error:
            self._rescue()
            raise NumericsError(f"evaluation after step {self.journal.done}: {error}{self._where_saved()}") from error

    def _catch_up_evaluation(self) -> None:
        step = self.journal.done
        if step and self.cadence.evaluates(step) and self._evaluation_of(step) is None and self._evaluate():
            self._save()

    def _evaluation_of(self, step: int) -> dict[str, float] | None:
        """The figures of the evaluation after `step` from the journal; None if there was none."""
        entries = [entry for entry in self.journal.history if entry["step"] == step]
        found = next((entry for entry in reversed(entries) if "eval_runtime" in _unnamed(entry)), None)
        return found and {key: value for key, value in found.items() if key not in ("epoch", "step")}

    @property
    def keeps_best(self) -> bool:
        """Whether the best evaluation has a checkpoint, which `save_total_limit` keeps."""
        return self.recipe.load_best_model_at_end or self.recipe.save_strategy == BEST

    # Saving and publishing.

    def _save(self) -> Path:
        path = checkpoints.checkpoint_path(self.recipe.output_dir, self.journal.done)
        temporary = checkpoints.temporary_path(path)
        shutil.rmtree(temporary, ignore_errors=True)  # left by a failed save; the server replaces only its own files
        saved = self.client.save(self.session, str(temporary), optimizer=not self.recipe.save_only_model, replace=True)
        if saved.step != self.journal.done:
            shutil.rmtree(temporary)
            raise ConflictError(
                f"{path}: the session is at step {saved.step}, this run at {self.journal.done}: another trainer uses it"
            )
        checkpoints.finish_checkpoint(
            temporary,
            self.journal.trainer_state(**self.best.hugging_face()),
            {
                "run": self.run_number,
                "identity": identity(self.recipe, self.inputs, self.status.fingerprint),
                "settings": settings(self.recipe),
                "journal": self.journal.state(),
                "best": self.best.state(),
                "schedule": self.schedule.state(),
            },
            self.objective.state(),
        )
        move_directory(temporary, path)
        self.display.say(f"saved {path}")
        if self.recipe.plot_loss and self.recipe.stage == "grpo":  # runs are long, and rewards tell whether they learn
            plots.plot(self.recipe.output_dir, self.journal.history, lambda line: None)
        best = Path(self.best.checkpoint) if self.best.checkpoint else None
        for removed in checkpoints.prune(self.recipe.output_dir, self.recipe.save_total_limit, best):
            self.display.say(f"removed {removed} (save_total_limit: {self.recipe.save_total_limit})")
        self.last = path
        return path

    def _rescue(self) -> None:
        """Saves the steps before a NaN or infinity; the failed step has changed nothing."""
        path = checkpoints.checkpoint_path(self.recipe.output_dir, self.journal.done)
        if self.recipe.do_train and self.journal.done and self.last != path:
            with contextlib.suppress(KtError):  # the caller reports the step's own error
                self._save()

    def _explained(self, error: NumericsError, micro_batches: list[list[Row]], rate: float) -> NumericsError:
        """The error with the step, its rows and advice; saves the steps before it first."""
        self._rescue()
        step, recipe = self.journal.done + 1, self.recipe
        rows = list(dict.fromkeys(row.where for micro_batch in micro_batches for row in micro_batch if row.where))
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        named = f"; rows: {', '.join(rows[:3])}{more}" if rows else ""
        learning = f"{recipe.where('learning_rate')}: learning_rate: {recipe.learning_rate:g}"
        cause = (
            f"most often the rate is too high: lower it ({learning}), or warm up for longer"
            if self.journal.done
            else "nothing was trained yet: it comes from the base model, the adapter at the start, or the rows"
        )
        return NumericsError(
            f"step {step} of {self.cadence.total_steps}, learning rate {rate:.2e}: {error}; {cause}{named}"
            f"{self._where_saved()}"
        )

    def _where_saved(self) -> str:
        return f"; what was trained before is in {self.last}" if self.last else ""

    def _publish(self) -> tuple[PublishReply | None, UserError | None]:
        """The reply, or the server's refusal: another owner has the name, or the adapter is not finite."""
        if not self.recipe.publish:
            return None, None
        try:
            published = self.client.publish(self.session, self.recipe.publish)
        except UserError as error:
            return None, error
        self.display.say(
            f"published {published.name} as version {published.version[:16]} in {published.publish_ms:.0f} ms"
        )
        return published, None

    # End.

    def finish(self, is_whole: bool) -> RunResult:
        """Raises the server's refusal of the last publication only after everything else is written."""
        if not is_whole:
            path = checkpoints.checkpoint_path(self.recipe.output_dir, self.journal.done)
            if self.journal.done and self.last != path:
                self._save()
            return self._result(None, interrupted=True)
        if self.recipe.load_best_model_at_end and self.best.checkpoint and self.best.step != self.journal.done:
            self.display.say(f"the best {self.best.key}, {self.best.metric}, was at step {self.best.step}: taking that")
            self.client.load(self.session, self.best.checkpoint)
            self._took_best = True
        published, refusal = self._publish() if self.recipe.do_train else (None, None)
        results = self.journal.finish() if self.recipe.do_train else {}
        if self.recipe.do_eval and self.inputs.evaluation:
            results |= self._last_evaluation()
        if self.recipe.do_train:
            self._write_adapter(results)
        if self.recipe.plot_loss:
            for path in plots.plot(self.recipe.output_dir, self.journal.history, self.display.say):
                self.display.say(f"wrote {path}")
        if refusal is not None:
            raise ConflictError(f"{refusal}; the trained adapter is in {self.recipe.output_dir}") from refusal
        return self._result(published, interrupted=False)

    def _last_evaluation(self) -> dict[str, float]:
        """The last step's evaluation; runs it if there was none, or if the session now holds the best model."""
        known = None if self._took_best else self._evaluation_of(self.journal.done)
        if known is not None:
            self.journal.finish_evaluation(known)
            return known
        figures = self._figures()
        if figures is None:
            self.display.say("the last evaluation was interrupted: there is no eval_results.json")
            return {}
        self.journal.evaluated(figures)
        self.journal.finish_evaluation(figures)
        return figures

    def _write_adapter(self, results: dict[str, float]) -> None:
        """Copies the adapter from the best or last checkpoint if it has the session's weights, else saves it."""
        output_dir = self.recipe.output_dir
        holds_best = self.recipe.load_best_model_at_end and self.best.checkpoint
        source = Path(self.best.checkpoint) if holds_best and self.best.checkpoint else self.last
        temporary = (output_dir / f"{TEMPORARY_PREFIX}final").resolve()
        if source is None or (not holds_best and source.name != f"{checkpoints.PREFIX}{self.journal.done}"):
            shutil.rmtree(temporary, ignore_errors=True)
            self.client.save(self.session, str(temporary), optimizer=False, replace=True)
            source = temporary
        for reader in write_results(self.recipe, source, Path(self.status.model_directory), results):
            self.display.say(f"{output_dir}: {reader}")
        shutil.rmtree(temporary, ignore_errors=True)
        write_json(output_dir / checkpoints.STATE_FILE, self.journal.trainer_state(**self.best.hugging_face()))

    def _result(self, published: PublishReply | None, *, interrupted: bool) -> RunResult:
        return RunResult(
            steps=self.journal.done,
            loss_first=self.journal.loss_first,
            loss_last=self.journal.loss_last,
            optim_finished_at=self.optim_finished_at,
            checkpoint=str(self.last) if self.last else None,
            published=published,
            resumed_from=str(self.resumed_from) if self.resumed_from else None,
            interrupted=interrupted,
        )


def _unnamed(entry: dict[str, object]) -> set[str]:
    """The entry's keys; keys `eval_NAME_runtime` of named sets become the one key `eval_runtime`."""
    return {"eval_runtime" if key.startswith("eval_") and key.endswith("_runtime") else key for key in entry}
