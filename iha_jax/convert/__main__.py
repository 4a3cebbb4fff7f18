"""The command line: ``python -m iha_jax.convert from-hf DIR OUT --pseudo-heads 4``, ``… to-hf RUN OUT``."""

import argparse
import dataclasses
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from flax import traverse_util

from iha_jax.convert.huggingface import read_huggingface, write_huggingface
from iha_jax.convert.pseudo_heads import with_pseudo_heads
from iha_jax.data import DataConfig
from iha_jax.models import unstack_parameters
from iha_jax.training.checkpoint import save_params
from iha_jax.training.config import OptimizerConfig, TrainConfig
from iha_jax.training.serialization import to_json
from iha_jax.training.state import Params
from iha_jax.training.trained import open_trained

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts one way or the other.

    Args:
      arguments: of the command line, default the process's.
    """
    options = _parser().parse_args(arguments)
    try:
        print(options.run(options))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    return 0


def from_hf(options: argparse.Namespace) -> str:
    """Writes a run's directory, to be trained on, generated from, and evaluated."""
    out: pathlib.Path = options.out.expanduser().absolute()
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: give another directory")
    model, params = read_huggingface(options.directory, options.dtype)
    if options.pseudo_heads is not None:
        model, params = with_pseudo_heads(
            model,
            params,
            options.pseudo_heads,
            layers=tuple(kind == "iha" for kind in options.pattern),
            collapse=options.collapse,
            seed=options.seed,
        )
    if options.max_length is not None:
        model = dataclasses.replace(model, max_length=options.max_length)
    tokenizer = out / "tokenizer"
    files = [f for f in (options.directory.expanduser() / name for name in _TOKENIZER_FILES) if f.is_file()]
    config = TrainConfig(
        name=out.name,
        directory=str(out.parent),
        start_from=str(out),
        model=model,
        data=DataConfig(tokenizer=str(tokenizer) if files else "bytes", sequence_length=min(model.max_length, 1024)),
        optimizer=OptimizerConfig(peak_lr=1e-5, final_lr=1e-6, warmup_steps=100),
    )
    out.mkdir(parents=True, exist_ok=True)
    if files:
        tokenizer.mkdir()
        for file in files:
            shutil.copyfile(file, tokenizer / file.name)
    save_params(out, params)
    (out / "config.json").write_text(to_json(config))  # last: without it there is no run
    pseudo = f", {model.pseudo_heads} pseudo-heads in layers of kind iha" if model.uses("iha") else ""
    tail = "" if files else "; there was no tokenizer beside it, data.tokenizer is 'bytes'"
    return f"{out}: {model.num_layers} layers, {sum(x.size for x in params.values()):,} parameters{pseudo}{tail}"


def to_hf(options: argparse.Namespace) -> str:
    """Writes safetensors, config.json and a note."""
    trained = open_trained(options.checkpoint)
    model, params = trained.config.model, trained.params
    if model.scan_layers:
        params = _unstacked(params, trained)
        model = dataclasses.replace(model, scan_layers=False)
    write_huggingface(options.out, model, params)
    tokenizer = pathlib.Path(trained.config.data.tokenizer)
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, options.out / name)
    return f"{options.out}: step {trained.step} of {trained.config.name}"


def _unstacked(params: Params, trained) -> Any:
    nested = traverse_util.unflatten_dict({tuple(_number(part) for part in k.split(".")): v for k, v in params.items()})
    flat = traverse_util.flatten_dict(unstack_parameters(nested, trained.config.model))
    return {".".join(map(str, path)): x for path, x in flat.items()}


def _number(part: str) -> str | int:
    return int(part) if part.isdecimal() else part


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m iha_jax.convert", description="Hugging Face checkpoints (Llama, Mistral, Qwen) in and out."
    )
    commands = parser.add_subparsers(required=True, metavar="from-hf | to-hf")
    read = commands.add_parser("from-hf", help="read a directory with config.json and safetensors")
    read.add_argument("directory", type=pathlib.Path, help="config.json, *.safetensors, tokenizer files")
    read.add_argument("out", type=pathlib.Path, help="a new run: train.py, iha_jax.generate and the rest take it")
    read.add_argument("--pseudo-heads", type=int, metavar="P", help="add pseudo-heads; the model starts as it was")
    read.add_argument(
        "--pattern",
        nargs="+",
        choices=("iha", "mha"),
        default=["iha"],
        help="which layers get them, a cycle (default all): iha iha iha iha mha is the paper's",
    )
    read.add_argument("--collapse", choices=("per_head", "across_heads"), default="per_head")
    read.add_argument("--max-length", type=int, metavar="T", help="context length, if not the checkpoint's")
    read.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default the checkpoint's")
    read.add_argument("--seed", type=int, default=0, help="of the mixing tensors' noise")
    read.set_defaults(run=from_hf)
    write = commands.add_parser("to-hf", help="write a directory with config.json and safetensors")
    write.add_argument("checkpoint", help="a run's directory (its newest checkpoint), or one of its checkpoints/STEP")
    write.add_argument("out", type=pathlib.Path, help="a new or empty directory")
    write.set_defaults(run=to_hf)
    return parser


if __name__ == "__main__":
    sys.exit(main())
