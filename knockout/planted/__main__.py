"""`python -m knockout.planted train | problems`: another planted model, and problems for it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from knockout.errors import KnockoutError, UsageError
from knockout.files import write_text
from knockout.planted import MODEL_FOLDER
from knockout.planted.language import Language, load_language, problems

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "train":
            _train(given)
        else:
            _problems(given)
    except KnockoutError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m knockout.planted", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train a model and write its checkpoint")
    train.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    train.add_argument("--seed", type=int, default=0, help="of weights and texts")
    train.add_argument(
        "--config", type=Path, help="JSON of the language; missing keys are as in the package"
    )
    for name in ("hidden", "layers", "heads", "steps", "settling", "rows", "threads"):
        train.add_argument(f"--{name}", type=int)
    make = commands.add_parser("problems", help="write fresh problems as JSONL, for data_dir")
    make.add_argument("--out", type=Path, required=True, help="such as DIR/planted.jsonl")
    make.add_argument("--model", type=Path, default=MODEL_FOLDER, help="a planted checkpoint")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("-n", type=int, default=1000, help="how many")
    return parser


def _train(given: argparse.Namespace) -> None:
    from knockout.planted.train import Training, train

    language = load_language(given.config) if given.config else Language()
    sizes = {
        f.name: getattr(given, f.name)
        for f in dataclasses.fields(Training)
        if getattr(given, f.name, None) is not None
    }
    if given.out.exists() and any(given.out.iterdir()):
        raise UsageError(f"{given.out} is not empty; name a new folder")
    train(language, given.out, Training(**sizes), lambda line: print(line, flush=True))
    print(f"wrote {given.out}")


def _problems(given: argparse.Namespace) -> None:
    language = load_language(given.model / "language.json")
    lines = [json.dumps(record) for record in problems(language, given.seed, given.n)]
    write_text(given.out, "\n".join(lines) + "\n")
    print(f"wrote {len(lines)} problems to {given.out}")


if __name__ == "__main__":
    sys.exit(main())
