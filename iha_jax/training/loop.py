"""The training loop: data in, steps, evaluations, checkpoints, and a clean end whatever happens."""

import contextlib
import dataclasses
import itertools
import math
import time
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iha_jax.data import DataPipeline
from iha_jax.training.checkpoint import Checkpoints, load_params
from iha_jax.training.config import DistributedConfig, TrainConfig
from iha_jax.training.display import Display, status_line
from iha_jax.training.evaluate import evaluate
from iha_jax.training.flops import account
from iha_jax.training.hardware import peak_flops
from iha_jax.training.memory import OutOfMemory
from iha_jax.training.metrics import Fanout, JsonLines, MetricsWriter, TensorBoard, read_json_lines
from iha_jax.training.mixing_statistics import mixing_statistics
from iha_jax.training.placement import Placement
from iha_jax.training.processes import Processes
from iha_jax.training.program import StepProgram
from iha_jax.training.sample import make_sampler, prompt_ids, until_end
from iha_jax.training.serialization import differences, from_json, to_json, to_plain
from iha_jax.training.signals import StopRequested, StopSignals
from iha_jax.training.state import Params, TrainState
from iha_jax.training.step import make_eval_step, split_micro_batches
from iha_jax.training.trained import run_and_step

# What may change between a run and its continuation without a word.
_FREE_TO_CHANGE = ("directory", "resume", "log.", "checkpoint.", "sample.", "evaluation.", "distributed.")


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient."""


class Trainer:
    """A run: ``resume``, ``compile``, ``train``, ``finish``, in this order.

    The caller holds the run's lock and listens for signals. With several processes, all of them call the same methods.

    Attributes:
      config: of the run.
      state: parameters, optimizer and counters, as of the last completed step.
      placement: the devices it lives on.
    """

    def __init__(
        self,
        config: TrainConfig,
        stop: StopSignals,
        display: Display | None = None,
        processes: Processes | None = None,
    ):
        # What "auto" means is settled once and kept with the run.
        self.config = config = dataclasses.replace(config, model=config.model.resolve())
        self._stop = stop
        self._processes = processes or Processes()
        self.display = display or Display(
            config.steps, bar=config.log.progress, line_every=config.log.every, quiet=not self._processes.first
        )
        self._started = time.perf_counter()
        self._pipeline = DataPipeline(config.data)
        if self._pipeline.tokenizer.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"model.vocab_size must be at least the tokenizer's {self._pipeline.tokenizer.vocab_size} ids, "
                f"got {config.model.vocab_size}"
            )
        self.placement = Placement(config.mesh)
        self.placement.check(config)

        self._program = StepProgram(config, self.placement)
        self._functions, self.num_parameters = self._program.functions, self._program.num_parameters
        self._memory = OutOfMemory(config, self.placement, self._program)
        with self._memory.explained("making the first parameters"):
            self.state: TrainState = self.placement.create(self._program.initial_state, self._functions.axes)
        self.account = account(config.model, config.micro_batch_size, config.data.sequence_length)
        self._bytes_per_target = self._pipeline.bytes_per_target()
        self._checkpoints = Checkpoints(config.run_directory / "checkpoints", config.checkpoint, self._processes)
        here = self.placement.rows_here(config.micro_batch_size)
        self._iterator = self._pipeline.training_batches(
            config.batch_size, [i * config.micro_batch_size + row for i in range(config.micro_batches) for row in here]
        )
        self._done = 0  # steps completed: the host's copy of state.step
        self._progress: dict[str, Any] = {"evaluated": 0, "data_crc": 0, "tokens": 0.0}
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._losses: list[float] = []
        self._last_loss: tuple[int, float] | None = None
        self._tokens_per_second = 0.0
        self._tracing = False

    # 1. Where the run stands.

    def resume(self) -> None:
        """Reads the newest checkpoint, if the directory has one; opens the metrics.

        Raises:
          FileExistsError: there is a run, and the configuration says never to resume.
          FileNotFoundError: there is none, and the configuration says to resume.
          ValueError: the run there is of another model or optimizer.
        """
        config, directory = self.config, self.config.run_directory
        steps = self._checkpoints.steps()
        if steps and config.resume == "never":
            raise FileExistsError(f"{directory} already has a run at step {steps[-1]}: give this one another --name")
        if not steps and config.resume == "must":
            raise FileNotFoundError(f"{directory} has no checkpoint to resume from")
        if steps:
            self._report_differences()
            restored = self._checkpoints.restore(self.state, self._iterator)
            if restored is not None:
                self.state, self._progress = restored.state, restored.progress
                self._done = int(self.state.step)
                self.display.message(f"resuming {directory} at step {self._done}")
        elif config.start_from is not None:
            # Its own place, not this run's: what is sharded is read sharded.
            start, step = run_and_step(config.start_from)
            step, params = load_params(start, self.state.params, step)
            self.state = dataclasses.replace(self.state, params=params)
            self.display.message(f"starting with the parameters of {start}, step {step}")
        writers: list[MetricsWriter] = []
        if self._processes.first:
            temporary = directory / "config.json.tmp"
            temporary.write_text(to_json(dataclasses.replace(config, distributed=DistributedConfig())))
            temporary.replace(directory / "config.json")
            writers.append(JsonLines(directory / "metrics.jsonl", self._done))
            self._losses = [m["loss"] for m in read_json_lines(directory / "metrics.jsonl") if "loss" in m]
            if config.log.tensorboard:
                writers.append(TensorBoard(directory / "tensorboard", self._done))
        self._writer = Fanout(writers)

    # 2. Programs.

    def compile(self) -> None:
        """Compiles the step; a signal meanwhile is heard at once."""
        config = self.config
        begun = time.perf_counter()
        with self._guarded("compiling the step"):
            self._step = self._memory.compiled = self._stop.run(self._program.lower(self.state).compile)
        where = "" if self.placement.mesh is None else f" on {self.placement.describe()}"
        self.display.message(
            f"{config.name}: {self.num_parameters:,} parameters{where}, compiled in {time.perf_counter() - begun:.0f} s"
        )
        self._eval_rows = config.evaluation.batch_size or config.micro_batch_size
        self._evaluation = None

    # 3. Steps.

    def train(self) -> None:
        """Runs to the last step.

        Raises:
          StopRequested: a signal came; the state is saved.
          NonFiniteError: too many non-finite steps in a row; nothing non-finite was saved.
        """
        config = self.config
        self.display.start(self._done)
        try:
            with self._guarded("training"):
                self._evaluate_and_save_if_due()
                self._reset_window()
                while self._done < config.steps:
                    self._stop.check()
                    self._profile()
                    self._one_step()
                    self._evaluate_and_save_if_due()
                self._flush()
        finally:
            self._end_profile()
            self.display.stop()

    def _one_step(self) -> None:
        begun = time.perf_counter()
        batch = next(self._iterator)
        self._window_wait += time.perf_counter() - begun
        batch = split_micro_batches(batch, self.config.micro_batches)
        self.state, metrics = self._step(self.state, self.placement.batch(batch, self.config.micro_batch_size))
        self._done += 1
        self._window_steps += 1
        # Read a step's numbers only when the next is under way: the device never waits for the host.
        self._flush()
        self._pending = (self._done, metrics)

    def _flush(self) -> None:
        """Reports the step before this one."""
        if self._pending is None:
            return
        step, device_metrics = self._pending
        self._pending = None
        values: dict[str, Any] = {k: v.item() for k, v in jax.device_get(device_metrics).items()}
        self._progress["tokens"] += values["tokens"]
        seen = values.pop("data_checksum").to_bytes(4, "little")
        self._progress["data_crc"] = zlib.crc32(seen, self._progress["data_crc"])
        if values["nonfinite"]:
            self.display.message(
                f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}: not finite, step left out "
                f"({values['nonfinite']} in a row, {values['nonfinite_total']} in all)"
            )
        if values["nonfinite"] >= self.config.max_nonfinite:
            self._writer.write(step, values)
            saved = self._checkpoints.steps()
            raise NonFiniteError(
                f"{values['nonfinite']} steps in a row were not finite, up to step {step}; the last checkpoint is "
                f"{saved[-1] if saved else 'none'}. Lower optimizer.peak-lr or clip-norm, or look at the data there"
            )
        if step % self.config.log.every == 0 or step == self.config.steps:
            seconds = time.perf_counter() - self._window_begun
            steps = max(self._window_steps, 1)
            self._tokens_per_second = steps * self.config.tokens_per_step / seconds
            flops = self._tokens_per_second * self.account.model_training_per_token
            peak = peak_flops(jax.devices()[0])
            values |= {
                "model_flops_per_second": flops,
                "mfu": None if peak is None else flops / (peak * len(self.state.step.sharding.device_set)),
                "seconds_per_step": seconds / steps,
                "tokens_per_second": self._tokens_per_second,
                "data_wait": self._window_wait / seconds,
                "tokens_total": self._progress["tokens"],
                "data_crc": self._progress["data_crc"],
            }
            self._writer.write(step, values)
            self._losses.append(values["loss"])
            self._reset_window()
        if step % self.config.log.every == 0 or step == self.config.steps or step == 1:
            self.display.update(step, status_line({"tokens_per_second": self._tokens_per_second, **values}))

    def _evaluate_and_save_if_due(self) -> None:
        config, step = self.config, self._done
        if step == 0 or step == config.steps:
            return  # the last evaluation and checkpoint are finish's
        evaluate = step % config.evaluation.every == 0 and self._progress["evaluated"] < step
        save = step % config.checkpoint.every == 0
        if not (evaluate or save):
            return
        self._flush()  # which may begin another window
        paused = time.perf_counter()
        if evaluate:
            self._evaluate(config.evaluation.rows)
        if save:
            self._save()
        self._window_begun = getattr(self, "_window_begun", paused) + time.perf_counter() - paused

    def _reset_window(self) -> None:
        self._window_begun, self._window_steps, self._window_wait = time.perf_counter(), 0, 0.0

    def _evaluate(self, rows: int | None) -> dict[str, float]:
        batches = self._pipeline.held_out_batches(self._eval_rows, rows)
        first = next(batches, None)
        if first is None:
            return {}
        if self._evaluation is None:
            with self.placement.active():
                step = jax.jit(make_eval_step(self._functions)).lower(self.state.params, self.placement.batch(first))
                mixing = jax.jit(mixing_statistics, out_shardings=self.placement.whole).lower(self.state.params)
            self._evaluation = self._stop.run(step.compile), self._stop.run(mixing.compile)
        eval_step, statistics = self._evaluation
        found = evaluate(
            eval_step,
            self.state.params,
            map(self.placement.batch, itertools.chain([first], batches)),
            self._bytes_per_target,
            self._stop.check,
        )
        mixing = {name: value.item() for name, value in jax.device_get(statistics(self.state.params)).items()}
        self._writer.write(self._done, {**{f"held_out/{k}": v for k, v in found.items()}, **mixing})
        self._progress["evaluated"] = self._done
        self._last_loss = (self._done, found["loss"])
        self.display.message(
            f"step {self._done}: held-out loss {found['loss']:.4f}, {found['bits_per_byte']:.3f} bits per byte"
        )
        return found

    def _save(self) -> None:
        if self._done in self._checkpoints.steps():
            return
        loss = self._last_loss[1] if self._last_loss and self._last_loss[0] == self._done else None
        self._checkpoints.save(self.state, self._iterator, dict(self._progress), loss)

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """Saves the last completed step when a signal ends the block; explains a lack of memory."""
        try:
            with self._memory.explained(doing):
                yield
        except StopRequested:
            self.save_and_wait()
            raise

    def save_and_wait(self) -> None:
        """Saves the last completed step, unless it is saved, and returns when that is on disk."""
        self._flush()
        self._save()
        self._checkpoints.wait()
        self.display.message(f"saved step {self._done} in {self.config.run_directory}; the same command resumes")

    def _profile(self) -> None:
        """Starts and ends the XProf trace where its steps begin and end."""
        start, count = self.config.log.profile_start, self.config.log.profile_steps
        if start is None:
            return
        if self._done == start and not self._tracing:
            jax.profiler.start_trace(str(self.config.run_directory / "profile"))
            self._tracing = True
        elif self._done == start + count:
            self._end_profile()

    def _end_profile(self) -> None:
        """Writes the trace under way, if any: also when the run ends, or is stopped, inside its window."""
        if not self._tracing:
            return
        self._tracing = False
        jax.block_until_ready(self.state)
        jax.profiler.stop_trace()
        self.display.message(f"profile of the steps up to {self._done} in {self.config.run_directory / 'profile'}")

    # 4. The end.

    def finish(self) -> dict[str, Any]:
        """Evaluates, saves, samples and prints the summary; returns what the summary says."""
        config = self.config
        with self._guarded("evaluating and sampling"):
            found = self._evaluate(config.evaluation.final_rows)
            self._save()
            self._checkpoints.wait()
            results: dict[str, Any] = {"step": self._done, "parameters": self.num_parameters, **found}
            if found and self._processes.first and self._pipeline.tokenizer.vocab_size <= 2048:
                nats = self._pipeline.fit_bigram().nats_per_token(
                    self._pipeline.held_out_batches(self._eval_rows, config.evaluation.final_rows)
                )
                results["bigram_bits_per_byte"] = nats / math.log(2) / self._bytes_per_target
            if config.sample.prompt:
                self._sample()
        self._summary(results)
        return results

    def close(self) -> None:
        """Ends the threads of the data, the checkpoints and the metrics."""
        with contextlib.ExitStack() as each:  # the others are closed though one fails
            if hasattr(self, "_writer"):
                each.callback(self._writer.close)
            each.callback(self._checkpoints.close)
            each.callback(self._iterator.close)

    def _sample(self) -> None:
        options = self.config.sample
        prompt = np.asarray(prompt_ids(self._pipeline.tokenizer, options.prompt))  # of no device: all processes have it
        sampler = make_sampler(self._functions, options.tokens, options.temperature)

        def sample(params: Params) -> jax.Array:
            return sampler(params, jnp.asarray(prompt), jax.random.key(self.config.seed))

        with self.placement.active(batch=(), sequence=()):  # one row, some tokens: whole on every device
            lowered = jax.jit(sample, out_shardings=self.placement.whole).lower(self.state.params)
        ids = jax.device_get(self._stop.run(lowered.compile)(self.state.params))
        self.display.completion(options.prompt, until_end(self._pipeline.tokenizer, ids))

    def _summary(self, results: dict[str, Any]) -> None:
        rows = [
            ("parameters", f"{self.num_parameters:,}"),
            ("model FLOPs, forward and backward", f"{self.account.model_training_per_token / 1e6:,.1f} M per token"),
            ("… of these in attention", f"{3 * self.account.attention_forward_per_token / 1e6:,.1f} M per token"),
            ("steps", f"{self._done:,} of {self.config.tokens_per_step:,} tokens"),
        ]
        if self._tokens_per_second:
            rate = self._tokens_per_second * self.account.model_training_per_token
            rows.append(("speed", f"{self._tokens_per_second:,.0f} tokens/s, {rate / 1e9:,.1f} GFLOP/s"))
        rows.append(("time since start", f"{time.perf_counter() - self._started:.0f} s"))
        if "bits_per_byte" in results:
            rows.append(("held-out bits per byte", f"{results['bits_per_byte']:.3f}"))
        if "bigram_bits_per_byte" in results:
            bigram = results["bigram_bits_per_byte"]
            rows.append(("… of a byte bigram", f"{bigram:.3f}"))
            gain = 1 - results["bits_per_byte"] / bigram
            rows.append((f"… {'better' if gain >= 0 else 'worse'} by", f"{abs(gain):.1%}"))
        if skipped := self._pipeline.skipped:
            rows.append(("documents skipped", ", ".join(f"{count} {reason}" for reason, count in skipped.items())))
        rows.append(("checkpoint", str(self.config.run_directory / "checkpoints" / str(self._done))))
        rows.append(("metrics", str(self.config.run_directory / "metrics.jsonl")))
        self.display.summary(self.config.name, rows, self._losses)

    def _report_differences(self) -> None:
        """Says what changed in the configuration since the run began."""
        path = self.config.run_directory / "config.json"
        if not path.is_file():
            return
        old = to_plain(from_json(TrainConfig, path.read_text()))
        for name, (before, now) in differences(old, to_plain(self.config)).items():
            if not name.startswith(_FREE_TO_CHANGE):
                self.display.message(f"note: {name} was {before} when this run was last saved and is {now} now")
