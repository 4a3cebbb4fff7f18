"""Matching FLOPs: what is found is the best there is, by trying all; what ships is matched."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax.models import IHAConfig, MHAConfig, ModelConfig, Transformer
from iha_jax.training.cli import load
from iha_jax.training.flop_matching import main, match_flops, table
from iha_jax.training.flops import account
from iha_jax.training.optimizer import kind_of, make_optimizer
from iha_jax.training.state import ModelFunctions, initial_state
from iha_jax.training.step import make_train_step

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "compare"
COMPARED = ("global_local", "talking_heads", "differential", "iha")
REFERENCE = ModelConfig(max_length=128, num_layers=6, model_dim=32, num_heads=4, pattern=("mha",))
IHA = dataclasses.replace(REFERENCE, pattern=("iha", "iha", "mha"), iha=IHAConfig(num_pseudo_heads=3))


def ratio(config, tokens=128, count="model"):
    cost, reference = (getattr(account(c, tokens=tokens), f"{count}_training_per_token") for c in (config, REFERENCE))
    return cost / reference


def off(config, **options):
    return abs(ratio(config, **options) - 1)


def with_window(config, window):
    return dataclasses.replace(config, iha=dataclasses.replace(config.iha, window=window))


@pytest.mark.parametrize("count", ["visible", "full"])
def test_the_window_found_is_the_best_of_all(count):
    match = match_flops(REFERENCE, with_window(IHA, 90), adjust=("window",), count=count)
    name = "model" if count == "visible" else "full"
    best = min(range(1, 129), key=lambda window: off(with_window(IHA, window), count=name))
    assert match.config.iha_window == best
    assert off(match.config, count=name) <= 0.02
    np.testing.assert_allclose(
        (match.ratio, match.full_ratio), (ratio(match.config), ratio(match.config, count="full"))
    )
    assert match.changes == (f"iha.window: 90 -> {best}",)


def test_a_match_stays_as_it_is():
    match = match_flops(REFERENCE, dataclasses.replace(REFERENCE, pattern=("differential",)))
    assert (match.ratio, match.full_ratio, match.changes) == (1.0, 1.0, ())
    # At its own tolerance a variant is left alone, and moved where the tolerance is tighter.
    loose = off(IHA)
    assert match_flops(REFERENCE, IHA, tolerance=1.01 * loose).changes == ()
    assert match_flops(REFERENCE, IHA, tolerance=0.99 * loose).changes != ()


def test_the_schedule_is_changed_where_windows_may_not_be():
    """A wide window and one global layer in three is too dear or too cheap; another share of global layers is not."""
    variant = with_window(IHA, 1)
    with pytest.raises(ValueError, match=r"adjusting nothing.*the closest is"):
        match_flops(REFERENCE, variant, adjust=())
    patterns = [("iha",) * count + ("mha",) for count in range(1, 6)] + [("iha",) * 6]
    ratios = {pattern: off(dataclasses.replace(variant, pattern=pattern)) for pattern in patterns}
    tolerance = 1.01 * min(ratios.values())
    match = match_flops(REFERENCE, variant, adjust=("schedule",), tolerance=tolerance)
    assert match.config.pattern == min(ratios, key=ratios.get)
    assert match.config.iha_window == 1
    assert match.changes[0].startswith("pattern: iha iha mha -> ")


def test_the_width_pays_for_talking():
    variant = dataclasses.replace(REFERENCE, pattern=("talking_heads",), mlp_dim=256)
    match = match_flops(REFERENCE, variant, adjust=("width",))
    best = min(range(8, 512, 8), key=lambda width: off(dataclasses.replace(variant, mlp_dim=width)))
    assert match.config.mlp_dim == best
    assert match.changes == (f"mlp_dim: 256 -> {best}",)


def test_wrong_requests_are_named():
    with pytest.raises(ValueError, match="depth"):
        match_flops(REFERENCE, IHA, adjust=("depth",))
    local = dataclasses.replace(REFERENCE, pattern=("local", "mha"), local=MHAConfig(window=4))
    with pytest.raises(ValueError, match=r"within 0.0%.*mlp_dim: 128 -> "):
        match_flops(REFERENCE, local, adjust=("width",), tolerance=1e-6)


@pytest.mark.parametrize("name", COMPARED)
def test_the_compared_models_cost_the_same(name):
    reference, config = (load(str(CONFIGS / f"{n}.py")) for n in ("global_mha", name))
    found = match_flops(reference.model, config.model, adjust=())
    assert found.changes == ()
    assert abs(found.ratio - 1) <= 0.02
    # They differ in attention and, where that pays for it, in the width of the feed-forward network.
    own = {field: getattr(config.model, field) for field in ("pattern", "local", "iha", "mlp_dim")}
    same = dataclasses.replace(reference, name=config.name, model=dataclasses.replace(reference.model, **own))
    assert same == config
    state = jax.eval_shape(lambda: nnx.state(Transformer(config.model, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == account(config.model).parameters


def test_the_account_is_printed(capsys):
    printed = table(load(str(CONFIGS / "iha.py")).model)
    rows = {line.split()[0]: line.split() for line in printed.splitlines()}
    assert rows["iha"][:3] == ["iha", "4", "13"]
    assert rows["mha"][:3] == ["mha", "1", "all"]
    # By hand: 2 D H (2 N + 2 K) and 4 D F.
    assert rows["iha"][4] == f"{2 * 256 * 256 * 4 / 1e6:.3f}"
    assert rows["iha"][9] == f"{4 * 256 * 1024 / 1e6:.3f}"
    main([str(CONFIGS / "global_mha.py"), str(CONFIGS / "iha.py"), "--count", "full", "--adjust", "width"])
    out = capsys.readouterr().out
    assert "to match: mlp_dim: 1024 -> " in out
    assert "by the full count" in out
    with pytest.raises(SystemExit):
        main([str(CONFIGS / "global_mha.py"), str(CONFIGS / "global_local.py"), "--adjust", "", "--tolerance", "1e-9"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["global_mha", *COMPARED])
def test_the_compared_models_train(name):
    """Two steps on one batch: everything stays finite, and all parameters move but λ's constant start."""
    config = load(str(CONFIGS / f"{name}.py"))
    functions = ModelFunctions(Transformer(config.model, rngs=nnx.Rngs(0)))
    optimizer = make_optimizer(config, functions.params, functions.axes)
    state = initial_state(functions, optimizer, 0)
    rng = np.random.default_rng(0)
    shape = (1, 2, 512)
    batch = {
        "inputs": rng.integers(0, 258, shape, dtype=np.int32),
        "targets": rng.integers(0, 258, shape, dtype=np.int32),
        "positions": np.broadcast_to(np.arange(512, dtype=np.int32), shape),
        "segment_ids": np.ones(shape, np.int32),
        "weights": np.ones(shape, np.float32),
    }
    step, losses = jax.jit(make_train_step(config, functions, optimizer)), []
    for _ in range(2):
        state, metrics = step(state, jax.tree.map(jnp.asarray, batch))
        losses.append(float(metrics["loss"]))
        assert metrics["nonfinite"] == 0
    assert losses[1] < losses[0]
    for path, value in state.params.items():
        assert bool((value != functions.params[path]).any()) != path.endswith("lambda_init"), path


def test_kinds_of_the_baselines_parameters():
    assert kind_of("layers.0.attention.talking_logits") == "mixing"
    assert kind_of("layers.0.attention.lambda_key_1") == kind_of("layers.0.attention.lambda_init") == "norm"
    assert kind_of("layers.0.attention.second_key_kernel") == "matrix"
