"""The command `outrider`: generate, serve, demo, fetch, config, doctor, simulate, bench.

Knows: arguments, terminals, exit codes.
Refuses to know: how anything is done. Ray is imported only by the commands that need it.

Exit codes: 0 done, 2 an error of ours or of the arguments (one line, no traceback), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.arguments import add_arguments as add_bench_arguments
from cluster.errors import ConfigError, OutriderError, RequestError
from deploy.doctor.arguments import add_arguments as add_doctor_arguments
from deploy.simulation.arguments import add_arguments as add_simulate_arguments

if TYPE_CHECKING:
    from deploy.local import ServeFile

#: How often `serve` looks whether its application still stands, in seconds.
WATCH_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        with _terminable():
            return command(arguments)
    except OutriderError as error:
        message = "\n".join(f"  {line}" if i else line for i, line in enumerate(str(error).splitlines()))
        print(f"outrider: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("outrider: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider", description="Speculative decoding that changes only the speed.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _generate_arguments(commands.add_parser("generate", help="answer one prompt in this process, without Ray"))
    serve = commands.add_parser("serve", help="serve the OpenAI API on this machine, on a Ray of its own")
    _config_argument(serve)
    serve.add_argument("--host", help="address to listen on; default: the config's")
    serve.add_argument("--port", type=int, help="default: the config's")
    serve.add_argument("--no-speculation", action="store_true", help="draft nothing")
    serve.set_defaults(command=_serve)
    demo = commands.add_parser("demo", help="serve, ask three questions, show speeds, end")
    _config_argument(demo)
    demo.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (default: %(default)s)")
    demo.set_defaults(command=_demo)
    fetch = commands.add_parser("fetch", help="bring models into the cache, downloading what is published in parts")
    fetch.add_argument("models", nargs="+", metavar="MODEL", help="aliases")
    fetch.add_argument("--gguf", type=Path, metavar="DIR", help="only the GGUF as published, into DIR, for llama.cpp")
    fetch.set_defaults(command=_fetch)
    config = commands.add_parser("config", help="check a config file and print every value")
    _config_argument(config)
    config.set_defaults(command=_config)
    doctor = commands.add_parser("doctor", help="examine this machine and this configuration, and say what to change")
    add_doctor_arguments(doctor)
    doctor.set_defaults(command=_doctor)
    bench = commands.add_parser("bench", help="measure against vLLM, transformers and llama.cpp where installed")
    add_bench_arguments(bench)
    bench.set_defaults(command=_bench)
    add_simulate_arguments(commands.add_parser("simulate", help="measure a pair on devices that are only emulated"))
    return parser


def _config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="Serve config file (default: ray_config.yaml)")


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    add("--model", default="smollm2-135m", help="alias or directory of safetensors (default: %(default)s)")
    add("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (default: %(default)s)")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--seed", type=int, metavar="S", help="default: a random one, shown by --stats")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="divide the model among N processes")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--draft", default="ngram", choices=("ngram", "none"), help="how to draft (default: %(default)s)")
    add("--no-speculation", action="store_true", help="the same as --draft none")
    add("--stats", action="store_true", help="print figures to standard error at the end")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--chat", action="store_true", help="as a user's turn (the default where the model can chat)")
    shape.add_argument("--raw", action="store_true", help="continue the text as it stands")
    parser.set_defaults(command=_generate)


# -- generate --------------------------------------------------------------------------------


def _generate(arguments: argparse.Namespace) -> int:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    began = time.monotonic()
    request_of, config = _generation(arguments)  # wrong arguments are told before the model is loaded
    if config.target.tensor_parallel == 1:
        from cluster.build import assemble

        return _answer(arguments, text, began, request_of, assemble(config, _progress))
    from deploy.followers import Followers

    with Followers(config) as followers:
        from cluster.build import assemble

        assembly = assemble(followers.config, _progress, followers.meeting)
        code = _answer(arguments, text, began, request_of, assembly)
        assembly.engine.close()
    return code


def _answer(
    arguments: argparse.Namespace, text: str, began: float, request_of: Callable[[tuple[int, ...]], Any], assembly: Any
) -> int:
    """Print the answer of an assembled engine to `text`."""
    tokenizer = assembly.tokenizer
    if arguments.chat and not tokenizer.has_chat_template:
        raise RequestError("this model has no chat template: leave out --chat", "--chat")
    chat = not arguments.raw and tokenizer.has_chat_template
    ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    assembly.engine.submit(request_of(tuple(ids)))
    ready, first, last = time.monotonic(), None, None
    while assembly.engine.has_work:
        for delta in assembly.engine.step():
            first, last = first or time.monotonic(), delta
            print(delta.text, end="", flush=True)
    ended = time.monotonic()
    print()
    if arguments.stats and last is not None and first is not None:
        _print_stats(last.statistics, request_of(tuple(ids)).sampling.seed, first - began, ended - ready)
    return 0


def _generation(arguments: argparse.Namespace) -> tuple[Callable[[tuple[int, ...]], Any], Any]:
    from cluster.config import parse
    from cluster.request import Request, Sampling

    sampling = Sampling(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=secrets.randbits(62) if arguments.seed is None else arguments.seed,
        stop=tuple(arguments.stop),
    )
    drafting = arguments.draft == "ngram" and not arguments.no_speculation
    config = parse(
        {
            "target": {
                "model": arguments.model,
                "dtype": arguments.dtype,
                "tensor_parallel": arguments.tensor_parallel,
            },
            "drafts": [{"kind": "ngram"}] if drafting else [],
            "scheduler": {"max_sequences": 1},
        }
    )
    return lambda prompt: Request("generate", prompt, sampling), config


def _print_stats(statistics: Any, seed: int, first_s: float, took_s: float) -> None:
    drafted, accepted = statistics.drafted, statistics.accepted
    share = f"{accepted / drafted:.0%}" if drafted else "nothing drafted"
    per_step = statistics.output_tokens / max(1, statistics.rounds)
    for line in (
        f"prompt            {statistics.prompt_tokens} tokens",
        f"answer            {statistics.output_tokens} tokens in {took_s:.2f} s, prompt included: "
        f"{statistics.output_tokens / took_s:.1f} tokens/s",
        f"first token       {first_s:.2f} s after the start of the command",
        f"drafts accepted   {share} ({accepted} of {drafted})",
        f"tokens per step   {per_step:.2f}",
        f"seed              {seed}",
    ):
        print(line, file=sys.stderr)


# -- serve, demo, fetch, doctor, bench, config --------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    from deploy.local import LocalServing

    file = _serve_file(arguments)
    file = replace(file, host=arguments.host or file.host, port=file.port if arguments.port is None else arguments.port)
    if arguments.no_speculation:
        file = file.without_speculation()
    _print_config(file)
    with LocalServing(file, _progress) as serving:
        _progress(f"ready at {file.url}/v1 (Ctrl-C ends it)")
        while True:
            time.sleep(WATCH_S)
            serving.check()


def _demo(arguments: argparse.Namespace) -> int:
    from deploy.demo import run

    return run(_serve_file(arguments), _progress, arguments.max_tokens)


def _fetch(arguments: argparse.Namespace) -> int:
    from cluster.model.load import locate, locate_gguf

    for model in arguments.models:
        if arguments.gguf is not None:
            print(locate_gguf(model, arguments.gguf, _progress))
        else:
            print(locate(model, _progress, download=True).directory)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from deploy.doctor.command import run

    return run(arguments, _serve_file(arguments), _progress)


def _bench(arguments: argparse.Namespace) -> int:
    from benchmarks.peers.command import run

    return run(arguments, _progress)


def _config(arguments: argparse.Namespace) -> int:
    _print_config(_serve_file(arguments), sys.stdout)
    return 0


def _serve_file(arguments: argparse.Namespace) -> ServeFile:
    from deploy.local import ServeFile

    path = arguments.config
    if path is None:
        beside = Path(__file__).resolve().parent.parent / "ray_config.yaml"
        path = next((place for place in (Path("ray_config.yaml"), beside) if place.is_file()), None)
    if path is None:
        raise ConfigError("no ray_config.yaml here: name one with --config")
    return ServeFile.read(path)


def _print_config(file: ServeFile, out: Any = None) -> None:
    from cluster.config import describe

    in_force = file.config.model_copy(update={"knobs": file.knobs})
    for line in describe(in_force):
        print(line, file=out or sys.stderr)


# -- terminals -------------------------------------------------------------------------------


def _progress(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: through its `with` blocks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
