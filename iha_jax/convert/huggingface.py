"""Directories of safetensors: a model's parameters under Hugging Face's names and under ours.

A linear layer is stored there as ``[out, in]`` with heads and their dimensions merged, here as ``[in, heads, H]``;
nothing but axes changes on the way, so that a round trip is exact to the last bit. Pseudo-heads have no name there:
their mixing tensors keep ours, and ``config.json`` has our configuration under ``iha_jax``.
"""

import dataclasses
import importlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from iha_jax.convert.configs import dtype_of, from_huggingface, to_huggingface
from iha_jax.extras import needed
from iha_jax.json_text import parse_json_object
from iha_jax.models import ModelConfig
from iha_jax.training.serialization import from_plain, to_plain

Params = Mapping[str, Any]
"""Path → array, of NumPy or jax, as the training state has them."""

_OURS = "iha_jax"
_SHARD_BYTES = 5 * 10**9
_NOTE = """# {name}

Written by iha_jax: {layers} layers, {parameters:,} parameters, {dtype}.

{what}

Read it back with `python -m iha_jax.convert from-hf THIS_DIRECTORY OUT`.
"""
_PLAIN = (
    "`config.json` and the weights are those of `{architecture}`; Transformers and what builds on it can load them."
)
_MIXED = (
    "Layers {layers} mix their heads (Interleaved Head Attention, arXiv 2602.21371, P = {pseudo}). Transformers has no "
    "such layer: it would load the weights without the tensors `*.self_attn.iha.*` and compute something else."
)


class _Entry(NamedTuple):
    """One parameter: its name there, its path here, and its shape there and here."""

    name: str
    path: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    swapped: bool = False  # [out, in] there, [in, out] here

    def to_ours(self, x: np.ndarray) -> np.ndarray:
        return (x.T if self.swapped else x).reshape(self.shape)

    def to_theirs(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.stored[::-1]).T if self.swapped else x.reshape(self.stored)


def read_huggingface(directory: str | os.PathLike[str], dtype: str | None = None) -> tuple[ModelConfig, dict[str, Any]]:
    """A model in a directory as Hugging Face keeps them, or as `write_huggingface` wrote it.

    Args:
      directory: with ``config.json`` and ``*.safetensors``, one file or several with an index.
      dtype: of parameters and computation; default as ``config.json`` says.

    Returns:
      The configuration, and path → array of the model with ``scan_layers=False``, in the host's memory.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the model can't be expressed here; a tensor is missing, unknown, or of another shape.
    """
    directory = pathlib.Path(directory).expanduser()
    described = _read_json(directory / "config.json")
    if _OURS in described:
        config = from_plain(ModelConfig, described[_OURS], f"{directory / 'config.json'}: {_OURS}")
        config = dataclasses.replace(config, scan_layers=False)
    else:
        try:
            config = from_huggingface(described, dtype or dtype_of(described))
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{directory / 'config.json'}: {reason}") from error
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    entries = {entry.name: entry for entry in _entries(config)}
    files = _files(directory)
    _check_names(directory, entries, files)
    params = {}
    for file in sorted({*files.values()}):
        with _open(directory / file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                entry = entries.get(name)
                if entry is None or files[name] != file:
                    continue
                x = np.asarray(tensors.get_tensor(name))
                if x.shape != entry.stored:
                    raise ValueError(f"{file}: {name} must have shape {entry.stored}, got {x.shape}")
                params[entry.path] = np.ascontiguousarray(entry.to_ours(x)).astype(jnp.dtype(config.param_dtype))
    return config, {entry.path: params[entry.path] for entry in entries.values()}


def write_huggingface(
    directory: str | os.PathLike[str], config: ModelConfig, params: Params, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Writes ``config.json``, ``*.safetensors`` and a note; Transformers knows a model without pseudo-heads.

    Args:
      directory: new, or empty.
      config: of the model.
      params: path → array of the model with ``scan_layers=False``.
      shard_bytes: the most of one file, in bytes.

    Raises:
      FileExistsError: there is something in the directory; it is left as it is.
      ValueError: the configuration has no counterpart there.
    """
    config = config.resolve()
    if config.scan_layers:
        raise ValueError("scan_layers must be False: unstack the parameters first (iha_jax.models.unstack_parameters)")
    described = to_huggingface(config)
    mixed = [i for i, kind in enumerate(config.layer_kinds) if kind == "iha"]
    described[_OURS] = to_plain(config)
    directory = pathlib.Path(directory).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty: give another directory")
    save = _safetensors("flax").save_file
    shards: list[dict[str, jax.Array]] = [{}]
    size = total = 0
    for entry in _entries(config):
        x = jnp.asarray(np.ascontiguousarray(entry.to_theirs(np.asarray(params[entry.path]))))
        if size + x.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][entry.name] = x
        size, total = size + x.nbytes, total + x.nbytes
    if len(shards) == 1:
        save(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
    else:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            save(shard, directory / name, metadata={"format": "pt"})
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    what = _PLAIN.format(architecture=described["architectures"][0])
    if mixed:
        what = _MIXED.format(layers=", ".join(map(str, mixed)), pseudo=config.pseudo_heads)
    note = _NOTE.format(
        name=directory.name,
        layers=config.num_layers,
        parameters=sum(int(np.prod(x.shape)) for x in params.values()),
        dtype=config.param_dtype,
        what=what,
    )
    (directory / "README.md").write_text(note)
    # Last: a directory without it is no model, so that one cut off isn't taken for one.
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def _entries(config: ModelConfig) -> Iterator[_Entry]:
    """Every parameter of a model, in the order of its layers."""
    d, n, k, h, f = config.model_dim, config.num_heads, config.kv_heads, config.dim_per_head, config.hidden_dim

    def plain(name: str, path: str, *shape: int) -> _Entry:
        return _Entry(name, path, shape, shape)

    yield plain("model.embed_tokens.weight", "embedding.table", config.vocab_size, d)
    for i, kind in enumerate(config.layer_kinds):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        attention = f"{theirs}.self_attn"
        for projection, heads in (("query", n), ("key", k), ("value", k)):
            name, path = f"{attention}.{projection[0]}_proj", f"{ours}.attention.{projection}"
            yield _Entry(f"{name}.weight", f"{path}_kernel", (heads * h, d), (d, heads, h), swapped=True)
            if config.has_bias("qkv"):
                yield _Entry(f"{name}.bias", f"{path}_bias", (heads * h,), (heads, h))
        out = f"{attention}.o_proj"
        yield _Entry(f"{out}.weight", f"{ours}.attention.out_kernel", (d, n * h), (n, h, d), swapped=True)
        if config.has_bias("out"):
            yield plain(f"{out}.bias", f"{ours}.attention.out_bias", d)
        if config.normalize_qk:
            yield plain(f"{attention}.q_norm.weight", f"{ours}.attention.query_norm.scale", h)
            yield plain(f"{attention}.k_norm.weight", f"{ours}.attention.key_norm.scale", h)
        if kind == "iha":
            p = config.pseudo_heads
            collapse = (n, p) if config.iha.collapse == "per_head" else (n, n, p)
            for name, shape in {
                "mixing_query": (n, n, p),
                "mixing_key": (k, k, p),
                "mixing_value": (k, k, p),
                "collapse": collapse,
            }.items():
                yield plain(f"{attention}.iha.{name}", f"{ours}.attention.{name}", *shape)
        for projection, name in (("gate", "gate_proj"), ("up", "up_proj")):
            yield _Entry(f"{theirs}.mlp.{name}.weight", f"{ours}.mlp.{projection}_kernel", (f, d), (d, f), swapped=True)
            if config.has_bias("mlp"):
                yield plain(f"{theirs}.mlp.{name}.bias", f"{ours}.mlp.{projection}_bias", f)
        yield _Entry(f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.down_kernel", (d, f), (f, d), swapped=True)
        if config.has_bias("mlp"):
            yield plain(f"{theirs}.mlp.down_proj.bias", f"{ours}.mlp.down_bias", d)
        yield plain(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.scale", d)
        yield plain(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.scale", d)
    yield plain("model.norm.weight", "final_norm.scale", d)
    if not config.tied_embeddings:
        yield _Entry("lm_head.weight", "embedding.head_kernel", (config.vocab_size, d), (d, config.vocab_size), True)


def _files(directory: pathlib.Path) -> dict[str, str]:
    """Tensor → the file that has it."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        found = _read_json(index).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
            raise ValueError(f"{index} must have a weight_map from tensors to files")
        for file in {*found.values()}:
            # A name, not a path: an index must not lead out of its directory.
            if pathlib.PurePath(file).name != file or not (directory / file).is_file():
                raise FileNotFoundError(f"{index} names {file!r}, which is not in {directory}")
        return found
    files = sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        raise FileNotFoundError(
            f"{directory} must have one *.safetensors file, or several and model.safetensors.index.json; there are "
            f"{[file.name for file in files]}"
        )
    with _open(files[0]) as tensors:
        return dict.fromkeys(tensors.keys(), files[0].name)


def _check_names(directory: pathlib.Path, entries: dict[str, _Entry], files: dict[str, str]) -> None:
    # Old checkpoints keep the frequencies of the rotation, which follow from the configuration; a tied model may keep
    # its table twice.
    ignored = ("lm_head.weight",)
    unknown = sorted(
        name for name in {*files} - {*entries} if name not in ignored and not name.endswith("rotary_emb.inv_freq")
    )
    missing = sorted({*entries} - {*files})
    if missing or unknown:
        raise ValueError(
            f"{directory}: by its config.json the model has {len(entries)} tensors, but "
            + " and ".join(
                f"{len(names)} {what}, {names[0]} first"
                for names, what in ((missing, "are missing"), (unknown, "are unknown"))
                if names
            )
        )


def _open(file: pathlib.Path) -> Any:
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return _safetensors().safe_open(file, framework="flax")
    except (OSError, ImportError):
        raise
    except Exception as error:  # the package's own, of no exported type
        raise ValueError(f"{file} is no safetensors file: {error}") from error


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"no {file.name} in {file.parent}")
    return parse_json_object(file.read_bytes(), str(file))


def _safetensors(part: str = "") -> Any:
    with needed("safetensors", "converting checkpoints"):
        return importlib.import_module("safetensors" + (f".{part}" if part else ""))
