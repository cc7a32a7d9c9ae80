"""``torchrun --nproc-per-node N -m sparseprefill.adapters.star ask|demo``."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence


def parser() -> ArgumentParser:
    """The commands and their options."""
    made = ArgumentParser("sparseprefill.adapters.star", description="Star Attention over the processes of torchrun.")
    commands = made.add_subparsers(dest="command", required=True)
    shared = ArgumentParser(add_help=False)
    add = shared.add_argument
    add("--block-size", type=int, help="tokens of a block; by default a quarter of the context, 32768 above 131072")
    add("--anchor-length", type=int, help="tokens of the anchor; by default one block")
    add("--tile", type=int, default=128, help="sizes are rounded to whole tiles (128)")
    add("--inner", help="a method that runs inside each block; by default dense attention")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="by default a GPU if there is one")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--timeout", type=float, default=120.0, help="seconds that a process waits for the others in one place (120)")
    add("--seed", type=int, default=0)
    ask = commands.add_parser("ask", parents=[shared], help="answer questions about a text file")
    ask.add_argument("--model", required=True, help="name or folder of a causal language model of transformers")
    ask.add_argument("--context", required=True, help="file with the text")
    ask.add_argument("--question", required=True, action="append", help="repeat for several")
    ask.add_argument("--conversation", action="store_true", help="a question sees those before it, and their answers")
    ask.add_argument("--plain", action="store_true", help="no chat template")
    ask.add_argument("--max-new-tokens", type=int, default=128)
    ask.add_argument("--temperature", type=float, default=0.0, help="0 (the default) decodes greedily")
    ask.add_argument("--tensor-parallel", type=int, default=1, help="processes that share one copy of the weights (1)")
    demo = commands.add_parser("demo", parents=[shared], help="needles in a long text, by the embedded model")
    demo.add_argument("--tokens", type=int, default=8192)
    demo.add_argument("--questions", type=int, default=4, help="of each family")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a known error is one line on standard error, and exit status 1 at once."""
    from sparseprefill.errors import SparsePrefillError

    given = parser().parse_args(arguments)
    try:
        from . import commands

        {"ask": commands.ask, "demo": commands.demo}[given.command](given)
    except (SparsePrefillError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a collective that others never joined would hold up an orderly end


if __name__ == "__main__":
    main()
