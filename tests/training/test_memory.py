"""Too little memory is answered with the account of the run, and with what to try."""

import dataclasses
import re
import sys

import jax
import pytest

import train
from iha_jax.training.config import MeshConfig
from iha_jax.training.display import Display
from iha_jax.training.loop import Trainer
from iha_jax.training.memory import OutOfMemory, OutOfMemoryError, is_out_of_memory, memory_account, needed_bytes
from iha_jax.training.placement import Placement
from iha_jax.training.program import StepProgram
from iha_jax.training.serialization import to_json
from iha_jax.training.signals import StopSignals

GPU = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 137438953472 bytes."
TPU = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 40.23G of 15.75G "
    "hbm. Exceeded hbm capacity by 24.48G.\nTotal hbm usage >= 40.7G"
)


class XlaRuntimeError(RuntimeError):
    """JAX's error by the name it had before `jax.errors.JaxRuntimeError`."""


def parts(config):
    config = dataclasses.replace(config, model=config.model.resolve())
    placement = Placement(config.mesh)
    return config, placement, StepProgram(config, placement)


def message(config, error, doing="training", compiled=None):
    memory = OutOfMemory(*parts(config))
    memory.compiled = compiled
    with pytest.raises(OutOfMemoryError) as raised, memory.explained(doing):
        raise error
    return str(raised.value)


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, XlaRuntimeError, ValueError])
@pytest.mark.parametrize("text", [GPU, TPU, "INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"])
def test_lack_of_memory_by_every_name(kind, text):
    assert is_out_of_memory(kind(text))


def test_other_errors_pass_unchanged(tiny):
    memory = OutOfMemory(*parts(tiny()))
    for error in (jax.errors.JaxRuntimeError("INTERNAL: it broke"), KeyError("RESOURCE_EXHAUSTED"), ValueError("no")):
        with pytest.raises(type(error)) as raised, memory.explained("training"):
            raise error
        assert raised.value is error


def test_the_account_by_hand(tiny):
    config = tiny(batch_size=8, micro_batches=2)
    found = memory_account(*parts(config))
    embedding, norms, layers = 258 * 16, 5 * 16, 2 * (4 * 16 * 16 + 2 * 16 * 64)
    mixing = 3 * 2 * 2 * 2 + 2 * 2  # of the one layer of kind iha: N 2, P 2
    assert found.params == 4 * (embedding + norms + layers + mixing)
    assert found.gradients == 2 * found.params  # the sum and the next
    assert 2 * found.params <= found.optimizer < 2 * found.params + 100  # two moments and counters
    assert found.residuals == 4 * (4 * 32 * 16 * 2)
    assert found.logits == 4 * (4 * 32 * 258)
    assert found.batch == 4 * (5 * 8 * 32)


def test_the_account_of_one_device_of_a_mesh(tiny):
    alone = memory_account(*parts(tiny(batch_size=8)))
    shared = memory_account(*parts(tiny(batch_size=8, mesh=MeshConfig(fsdp=2, context=2))))
    assert shared.residuals == alone.residuals // 4
    assert shared.batch == alone.batch // 4
    assert 0.4 * alone.params < shared.params < 0.6 * alone.params  # norms and mixing are whole everywhere


def test_the_message_has_what_was_asked_the_account_and_three_ways_out(tiny):
    said = message(tiny(batch_size=8, micro_batches=2), jax.errors.JaxRuntimeError(TPU), "compiling the step")
    assert said.startswith("out of memory while compiling the step, on one device: 4 rows of 32 tokens at a time (8 in")
    assert "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error" in said
    assert "Total hbm usage" not in said  # one line of the compiler's is enough
    assert "the compiler would have used 40.2 GiB" in said
    for name in ("parameters", "optimizer", "gradients", "blocks' inputs", "logits", "together"):
        assert re.search(rf"^ +[\d.]+ (bytes|KiB|MiB)  {name}", said, flags=re.MULTILINE), name
    assert "1. fewer rows at a time: --micro-batches 4" in said
    assert "2. --model.remat dots or full" in said
    assert "3. more devices: --mesh.fsdp above 1" in said
    assert "python -m tpu.plan" in said


def test_what_is_done_already_is_not_proposed(tiny):
    config = tiny(batch_size=4, micro_batches=4)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat="full"))
    said = message(config, XlaRuntimeError(GPU))
    assert "--data.sequence-length below 32" in said
    assert "--model.remat is 'full' already" in said


def test_with_a_compiled_step_the_figures_are_xlas(tiny):
    compiled = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((100, 100), "float32")).compile()  # any will do
    said = message(tiny(), jax.errors.JaxRuntimeError(GPU), compiled=compiled)
    [size] = re.findall(r"([\d.]+) KiB  state and batch", said)
    assert float(size) == pytest.approx(compiled.memory_analysis().argument_size_in_bytes / 1024, abs=0.06)
    assert "temporaries" in said


def test_what_the_compiler_says_it_needed():
    assert needed_bytes(TPU) == round(40.23 * 2**30)
    assert needed_bytes(GPU) is None


def test_a_model_larger_than_memory_ends_train_py_with_the_account(tiny, tmp_path, monkeypatch):
    config = tiny()
    huge = dataclasses.replace(config.model, vocab_size=2**30, model_dim=2**14)  # 64 TiB of float32

    def create(*_):  # the allocation itself would be tried with memory that other tests need
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.")

    monkeypatch.setattr(Placement, "create", create)
    path = tmp_path / "config.json"
    path.write_text(to_json(dataclasses.replace(config, model=huge)))
    monkeypatch.setattr(sys, "argv", ["train.py", str(path)])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back what main replaces
    with pytest.raises(SystemExit, match=r"^error: out of memory while making the first parameters") as ended:
        train.main()
    assert re.search(r"64\.\d TiB  parameters", ended.value.code)
    assert "Try, the state being most of it, the third first:" in ended.value.code


@pytest.mark.parametrize("where", ["compile", "train"])
def test_a_run_that_runs_out_later_is_explained_too(tiny, where, monkeypatch):
    config = tiny()
    with StopSignals(lambda text: None) as stop:
        trainer = Trainer(config, stop, Display(config.steps, bar=False, line_every=10**9))

        def fails(*_):
            raise jax.errors.JaxRuntimeError(GPU)

        try:
            trainer.resume()
            if where == "compile":
                monkeypatch.setattr(trainer._program, "lower", fails)
            else:
                trainer._step = fails  # in place of what compile makes
            with pytest.raises(OutOfMemoryError, match="compiling the step" if where == "compile" else "training"):
                getattr(trainer, where)()
        finally:
            trainer.close()
