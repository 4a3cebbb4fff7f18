"""The trainer: configuration, optimizer, step, checkpoints, loop."""

from iha_jax.extras import needed

with needed("optax", "training"):  # here, once: what is below imports it in several places
    import optax as _  # noqa: F401
