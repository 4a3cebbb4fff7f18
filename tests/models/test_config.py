"""The model's configuration: what it derives and what it refuses."""

import dataclasses

import pytest

from iha_jax.models import IHAConfig, MHAConfig, ModelConfig, RopeConfig


def test_auto_window_is_a_number_of_the_configured_length():
    config = ModelConfig(max_length=512, num_heads=4, model_dim=64)
    assert config.iha_window == 512 // (2 * 4**2)
    resolved = config.resolve()
    assert resolved.iha.window == 16
    assert resolved.iha.num_pseudo_heads == 4
    # A longer context later leaves the trained layers as they are.
    assert dataclasses.replace(resolved, max_length=4096).iha_window == 16
    assert ModelConfig(max_length=16).iha_window == 1
    assert ModelConfig(iha=IHAConfig(window=None)).iha_window is None


def test_pattern_repeats_with_a_remainder():
    config = ModelConfig(num_layers=7, pattern=("iha", "local", "mha"))
    assert config.layer_kinds == ("iha", "local", "mha", "iha", "local", "mha", "iha")
    assert (config.num_repeats, config.num_cycled_layers) == (2, 6)
    assert config.window("local") == 512


def test_gated_and_ungated_defaults_are_of_one_size():
    assert (
        ModelConfig(model_dim=192, mlp="gelu").hidden_dim * 2 == ModelConfig(model_dim=192, mlp="swiglu").hidden_dim * 3
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_dim": 100}, "model_dim=100 is no multiple of num_heads=8"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=8"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"num_layers": 0}, "num_layers must be a whole number >= 1, got 0"),
        ({"pattern": ()}, "at least one"),
        ({"pattern": ("iha", "mah")}, "'mah'"),
        ({"mlp": "swigelu"}, "'swigelu'"),
        ({"dtype": "f32"}, "'f32'"),
        ({"remat": "all"}, "'all'"),
        ({"dropout": 1.0}, "got 1.0"),
        ({"logits_soft_cap": 0.0}, "got 0.0"),
        ({"iha": IHAConfig(init="exact")}, "rope_positions"),
        ({"pattern": ("differential",), "num_kv_heads": 1}, "num_heads=8 and num_kv_heads=1"),
    ],
)
def test_contradictions_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_parts_check_themselves():
    with pytest.raises(ValueError, match=r"iha.window.*got 0"):
        IHAConfig(window=0)
    with pytest.raises(ValueError, match="window"):
        MHAConfig(window=-1)
    with pytest.raises(ValueError, match="theta"):
        RopeConfig(theta=0.5)
    with pytest.raises(ValueError, match="sideways"):
        IHAConfig(causal="sideways")
    assert ModelConfig(iha=IHAConfig(init="exact", rope_positions="token")).iha.init == "exact"
