"""Train tiers of the built-in ladder and write them in Hugging Face layout.

Several tiers train side by side, each a process of its own on the one device::

    python -m backends.builtin.train --tiers 1 2 3 --minutes 5 7 12 --seed 1 --device cuda
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from backends.builtin.paths import MODELS_DIR
from backends.builtin.tokenizer import build_tokenizer, save_tokenizer
from backends.builtin.train.specs import SPECS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m backends.builtin.train", description=__doc__)
    parser.add_argument("--tiers", type=int, nargs="+", default=sorted(SPECS), choices=sorted(SPECS))
    parser.add_argument("--minutes", type=float, nargs="+", default=[10.0], help="one for all, or one a tier")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[4], help="data processes: one for all, or one a tier"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=MODELS_DIR)
    parser.add_argument("--start-from", type=Path, help="folder of exported tiers to go on from")
    parser.add_argument("--learning-rate-scale", type=float, default=1.0)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    for name in ("minutes", "workers"):
        values = getattr(arguments, name)
        if len(values) not in (1, len(arguments.tiers)):
            parser.error(
                f"--{name} has {len(values)} values; expected 1 or one for each of {len(arguments.tiers)} tiers"
            )
        if len(values) == 1:
            setattr(arguments, name, values * len(arguments.tiers))
    return arguments


def _train_side_by_side(arguments: argparse.Namespace) -> int:
    command = [sys.executable, "-P", "-m", "backends.builtin.train"]
    command += ["--seed", str(arguments.seed), "--device", arguments.device, "--out", str(arguments.out)]
    command += ["--learning-rate-scale", str(arguments.learning_rate_scale)]
    command += ["--start-from", str(arguments.start_from)] if arguments.start_from else []
    command += ["--no-compile"] if arguments.no_compile else []
    runs = [
        subprocess.Popen([*command, "--tiers", str(tier), "--minutes", str(minutes), "--workers", str(workers)])
        for tier, minutes, workers in zip(arguments.tiers, arguments.minutes, arguments.workers, strict=True)
    ]
    return max(run.wait() for run in runs)


def _tokenizer_of(folder: Path, tier: int) -> Tokenizer:
    return Tokenizer.from_file(str(folder / f"tier{tier}" / "tokenizer.json"))


def _train_one(arguments: argparse.Namespace) -> None:
    # Torch is imported here, so that the spawned data workers, which import this file again, do without it.
    from backends.builtin.train.batches import BatchStream
    from backends.builtin.train.loop import RunConfig, Trainer

    spec = SPECS[arguments.tiers[0]]
    tokenizer = build_tokenizer() if arguments.start_from is None else _tokenizer_of(arguments.start_from, spec.tier)
    with TemporaryDirectory() as scratch:
        save_tokenizer(tokenizer, Path(scratch))
        stream = BatchStream(spec.tier, Path(scratch) / "tokenizer.json", arguments.seed, arguments.workers[0])
        config = RunConfig(
            minutes=arguments.minutes[0],
            seed=arguments.seed,
            device=arguments.device,
            folder=arguments.out,
            compile=not arguments.no_compile,
            start_from=arguments.start_from,
            learning_rate_scale=arguments.learning_rate_scale,
        )
        record = Trainer(spec, config, tokenizer, lambda line: print(line, flush=True)).run(stream)
        stream.close()
    print(record, flush=True)


def main() -> int:
    arguments = _arguments()
    if len(arguments.tiers) > 1:
        return _train_side_by_side(arguments)
    _train_one(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
