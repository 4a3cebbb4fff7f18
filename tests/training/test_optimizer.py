"""Which parameters are decayed, how fast each moves, and Muon kept to the matrices."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from iha_jax.models import Transformer
from iha_jax.training.config import OptimizerConfig, ParameterGroup
from iha_jax.training.optimizer import decay_mask, kind_of, make_optimizer, multipliers, norms_by_kind, schedule
from iha_jax.training.state import ModelFunctions


def _functions(config):
    make = nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
    return ModelFunctions(make)


def _parameters(functions, seed=0):
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(rng.normal(size=p.shape), p.dtype) for path, p in functions.params.items()}


def _model(tiny, **options):
    return dataclasses.replace(tiny().model, **options)


def test_kinds_of_a_real_model(tiny):
    config = tiny(
        model=_model(tiny, use_bias=True, normalize_qk=True, norm="layer", tied_embeddings=False, mlp="swiglu")
    )
    kinds = {path: kind_of(path) for path in _functions(config).params}
    expected = {
        "embedding.table": "embedding",
        "embedding.head_kernel": "embedding",
        "final_norm.scale": "norm",
        "final_norm.bias": "norm",
        "layers.0.attention.query_kernel": "matrix",
        "layers.0.attention.out_kernel": "matrix",
        "layers.0.attention.out_bias": "bias",
        "layers.0.attention.query_norm.scale": "norm",
        "layers.0.attention.mixing_query": "mixing",
        "layers.0.attention.mixing_key": "mixing",
        "layers.0.attention.mixing_value": "mixing",
        "layers.0.attention.collapse": "mixing",
        "layers.0.attention_norm.scale": "norm",
        "layers.1.mlp.gate_kernel": "matrix",
        "layers.1.mlp.down_bias": "bias",
    }
    assert expected.items() <= kinds.items(), kinds
    # Nothing small slips in among the decayed.
    functions = _functions(config)
    assert all(functions.params[p].ndim >= 2 for p, kind in kinds.items() if kind in ("matrix", "embedding"))


def test_scanned_layers_decay_the_same_parameters(tiny):
    unrolled, scanned = (
        decay_mask(OptimizerConfig(), list(_functions(tiny(model=_model(tiny, num_layers=4, scan_layers=s))).params))
        for s in (False, True)
    )

    def decayed(mask):
        return {path.split(".", 2)[-1]: value for path, value in mask.items()}

    assert decayed(unrolled) == decayed(scanned)
    assert any(path.startswith("cycle.") for path in scanned)


def _updates(config, functions, params, gradient):
    optimizer = make_optimizer(config, params, functions.axes)
    return jax.jit(lambda params, gradient: optimizer.update(gradient, optimizer.init(params), params)[0])(
        params, gradient
    )


def test_the_mixing_multiplier_changes_the_mixings_update_by_exactly_its_factor(tiny):
    config = tiny()
    functions = _functions(config)
    params, gradient = _parameters(functions), _parameters(functions, seed=1)
    plain = _updates(config, functions, params, gradient)
    options = dataclasses.replace(config.optimizer, mixing_lr_multiplier=0.125)
    scaled = _updates(dataclasses.replace(config, optimizer=options), functions, params, gradient)
    mixing = [path for path in params if kind_of(path) == "mixing"]
    assert len(mixing) == 4
    for path in params:
        factor = 0.125 if path in mixing else 1.0  # a power of two: exact
        np.testing.assert_array_equal(scaled[path], np.asarray(plain[path]) * factor, err_msg=path)


def test_only_matrices_and_embeddings_are_decayed(tiny):
    config = tiny(
        optimizer=OptimizerConfig(peak_lr=1.0, final_lr=0.0, warmup_steps=0, weight_decay=0.5, clip_norm=None)
    )
    functions = _functions(config)
    params = _parameters(functions)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates = _updates(config, functions, params, zero)
    for path, update in updates.items():
        factor = -0.5 if kind_of(path) in ("matrix", "embedding") else 0.0
        np.testing.assert_allclose(update, factor * np.asarray(params[path]), rtol=1e-6, err_msg=path)


def test_groups_by_path_win_and_a_pattern_without_a_parameter_is_an_error(tiny):
    groups = (ParameterGroup(r"^embedding\.", lr_multiplier=2.0, weight_decay=False),)
    options = OptimizerConfig(groups=groups, mixing_lr_multiplier=3.0)
    paths = list(_functions(tiny()).params)
    assert multipliers(options, paths)["embedding.table"] == 2.0
    assert multipliers(options, paths)["layers.0.attention.collapse"] == 3.0
    assert multipliers(options, paths)["layers.0.mlp.up_kernel"] == 1.0
    assert not decay_mask(options, paths)["embedding.table"]
    config = tiny(optimizer=dataclasses.replace(options, warmup_steps=1, groups=(ParameterGroup("embeding"),)))
    functions = _functions(config)
    with pytest.raises(ValueError, match=r"'embeding' matches no parameter"):
        make_optimizer(config, functions.params, functions.axes)


def test_schedule(tiny):
    config = tiny(steps=110, optimizer=OptimizerConfig(peak_lr=8e-4, final_lr=8e-6, warmup_steps=10))
    rate = schedule(config)
    np.testing.assert_allclose([rate(0), rate(4), rate(9), rate(10)], [8e-5, 4e-4, 8e-4, 8e-4], rtol=1e-6)
    np.testing.assert_allclose(rate(60), (8e-4 + 8e-6) / 2, rtol=1e-6)
    np.testing.assert_allclose([rate(110), rate(500)], [8e-6, 8e-6], rtol=1e-6)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adam(tiny, scan_layers):
    model = _model(tiny, num_layers=2 if not scan_layers else 4, scan_layers=scan_layers)
    options = OptimizerConfig(name="muon", peak_lr=1.0, final_lr=0.0, warmup_steps=0, weight_decay=0.0, clip_norm=None)
    config = tiny(model=model, optimizer=options)
    functions = _functions(config)
    params, gradient = _parameters(functions), _parameters(functions, seed=1)
    updates = _updates(config, functions, params, gradient)
    adam = _updates(
        dataclasses.replace(config, optimizer=dataclasses.replace(options, name="adamw")), functions, params, gradient
    )
    shapes = {"query_kernel": (16, 16), "out_kernel": (16, 16), "up_kernel": (16, 64), "down_kernel": (64, 16)}
    seen = set()
    for path, update in updates.items():
        if kind_of(path) != "matrix":
            np.testing.assert_array_equal(update, adam[path], err_msg=path)
            continue
        name = path.rsplit(".", 1)[-1]
        if name not in shapes:
            continue
        seen.add(name)
        for matrix in np.asarray(update).reshape(-1, *shapes[name]):
            singular = np.linalg.svd(matrix, compute_uv=False) / (0.2 * max(shapes[name]) ** 0.5)
            # Five Newton-Schulz steps bring singular values near 1, not to it.
            assert singular.max() < 1.4, (path, singular)
            assert np.median(singular) > 0.6, (path, singular)
    assert seen == set(shapes)


def test_norms_by_kind():
    tree = {"layers.0.mlp.up_kernel": jnp.full((2, 2), 2.0), "final_norm.scale": jnp.full((4,), 3.0, jnp.bfloat16)}
    chex.assert_trees_all_close(norms_by_kind(tree), {"matrix": 4.0, "norm": 6.0})
