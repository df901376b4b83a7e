"""The command line: its commands, and the exit codes of errors."""

import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from fsdpctl import __version__
from fsdpctl.errors import STOP_SIGNALS, FsdpctlError, SignalError, UsageError
from fsdpctl.io.activity import DISPLAY, QUIET, is_first_process
from fsdpctl.io.output import open_stdout
from fsdpctl.io.texts import refuse_credentials


class CommandInfo(NamedTuple):
    """A command, whose module is imported when it runs or shows its own help."""

    module: str  # name in fsdpctl.commands
    takes_settings: bool
    help: str  # at most 50 characters
    examples: tuple[str, ...] = ()  # command lines without `fsdpctl`
    function: str = ""  # function of the module; "": the command's name


COMMANDS = {
    "train": CommandInfo(
        "train", True, "Train a model, or resume a run.",
        ("train", "train model=hf model.path=DIR data.path=chats.jsonl model.lora.rank=16",
         "train model=llama3_1b data=text data.path=my_text/ --dry-run")),
    "estimate-memory": CommandInfo(
        "estimate", True, "Estimate peak memory per rank before a run.",
        ("estimate-memory model=llama3_8b cluster=h100 --all-strategies",
         "estimate-memory model=llama3_8b cluster=a100_80 --fit micro_batch")),
    "convert": CommandInfo("convert", True, "Write a recipe from another tool's file.",
                           ("convert run.yml --out recipe.yaml",)),
    "status": CommandInfo("status", False, "Show the state and progress of a run.", ("status",)),
    "compare": CommandInfo(
        "compare.command", True, "Compare variants by short runs or simulation.",
        ("compare strategy=full_shard,shard_optimizer,no_shard --steps 5",
         "compare --simulate model=llama3_8b cluster=h100 strategy=full_shard,shard_grad_op")),
    "compare-runs": CommandInfo("compare_runs", False, "Show how two existing runs differ.",
                                ("compare-runs runs/a runs/b",)),
    "sample": CommandInfo(
        "sample", False, "Generate text from a checkpoint or a model.",
        ('sample runs/latest --prompt "Once upon a time"', 'sample my_model --chat --prompt "Hi"')),
    "evaluate": CommandInfo(
        "evaluate", True, "Compute loss, perplexity and bits per byte.",
        ("evaluate runs/latest", "evaluate DIR data=text data.path=other.txt data.val_fraction=0")),
    "consolidate-checkpoint": CommandInfo(
        "consolidate", False, "Export a checkpoint to Hugging Face, GGUF or PEFT.",
        ("consolidate-checkpoint runs/latest my_model",
         "consolidate-checkpoint runs/latest my_model --merge --dtype bfloat16")),
    "shard-checkpoint": CommandInfo(
        "checkpoint", False, "Convert a Hugging Face model to a checkpoint.",
        ("shard-checkpoint DIR my_checkpoint --world-size 8",)),
    "inspect-checkpoint": CommandInfo(
        "checkpoint", False, "Show a checkpoint's run, files and tensors.",
        ("inspect-checkpoint runs/latest",)),
    "verify-checkpoint": CommandInfo(
        "consolidate", False, "Verify a checkpoint, or an export and its base.",
        ("verify-checkpoint runs/latest", "verify-checkpoint my_model --base Qwen/Qwen3-0.6B")),
    "tokenize": CommandInfo("training_data", False, "Tokenize text into token files.",
                            ("tokenize my_text/ tokens.bin --tokenizer DIR",)),
    "data": CommandInfo("training_data", False, "Show the training samples of one step.",
                        ("data --run runs/latest --step 10",)),
    "list": CommandInfo("listing", False, "List settings, options and recipes.",
                        ("list", "list strategy", "list optimizer.lr"), "list_choices"),
}  # fmt: skip
# Names of similar commands in other tools.
_SYNONYMS = {
    "export": "consolidate-checkpoint", "merge": "consolidate-checkpoint RUN DIR --merge",
    "chat": "sample SRC --chat", "generate": "sample", "eval": "evaluate", "estimate":
    "estimate-memory", "fit": "estimate-memory --fit micro_batch", "run": "train", "finetune":
    "train", "resume": "train", "config": "list", "preprocess": "tokenize", "import": "convert",
    "inspect": "inspect-checkpoint", "verify": "verify-checkpoint", "version": "--version",
}  # fmt: skip
_QUIET_OPTIONS = ("-q", "--quiet")  # options of every command
_QUIET_HELP = "-q or --quiet hides plans and progress; results, warnings and errors remain."
_FREE_TEXT_OPTIONS = ("--prompt",)  # options whose value may be any text
_HELP = {"help_option_names": ["-h", "--help"]}
_WIDEST_HELP = 120  # columns


class _Commands(TyperGroup):
    """The commands, each of which is imported when it is requested."""

    def __init__(self, **attributes: Any) -> None:
        """Create the group, which lists the commands and suggests them for unknown ones."""
        super().__init__(**{**attributes, "commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command; None if it is unknown."""
        if (info := COMMANDS.get(cmd_name)) is None:
            return None
        single_command = typer.Typer(rich_markup_mode=None, add_completion=False)
        settings: dict[str, Any] = {**_HELP, "max_content_width": _WIDEST_HELP}
        if info.takes_settings:
            settings["ignore_unknown_options"] = True
        module = import_module(f"fsdpctl.commands.{info.module}")
        function = getattr(module, info.function or cmd_name.replace("-", "_"))
        lines = "\n".join(f"  fsdpctl {each}" for each in info.examples)
        epilog = f"\b\nExamples:\n{lines}\n\n{_QUIET_HELP}"
        single_command.command(cmd_name, context_settings=settings, epilog=epilog)(function)
        return typer.main.get_command(single_command)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command in `args`; the error for another tool's command names fsdpctl's."""
        command = _SYNONYMS.get(args[0]) if args and args[0] not in COMMANDS else None
        if command is not None:
            raise UsageError(f"{args[0]}: no such command; use fsdpctl {command}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, info.help) for name, info in COMMANDS.items()])


def print_version(value: bool) -> None:
    """Print versions and devices, and exit."""
    if not value:
        return
    import torch
    from torch.cuda import nccl

    from fsdpctl.commands.printing import say

    say(f"fsdpctl {__version__}", f"python {sys.version.split()[0]}", f"torch {torch.__version__}")
    if torch.cuda.is_available():
        say(f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl.version()))}")
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            say(f"device {index}: {device.name}, {device.total_memory / (1 << 30):.0f} GiB")
    else:
        say("devices: CPU only")
    raise typer.Exit


# click.ClickException, which newer versions of typer contain.
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]


app = typer.Typer(
    name="fsdpctl",
    cls=_Commands,
    no_args_is_help=True,
    context_settings={**_HELP, "max_content_width": _WIDEST_HELP},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train PyTorch models with fully sharded data parallelism.\n\n"
    "`fsdpctl train` needs no settings: it trains a small model on text from this machine.",
)


@app.callback()
def root_options(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the versions of fsdpctl, torch, CUDA and NCCL, and the devices.",
        callback=print_version,
        is_eager=True,
    ),
) -> None:
    """Define the options of `fsdpctl` itself."""


def _raise_signal(signum: int, frame: FrameType | None) -> None:
    raise SignalError(signum)


def _print_error(message: str) -> None:
    from fsdpctl.commands.printing import print_error  # slow to import

    print_error(message)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """After an error or a signal in the block, print one line and exit with its code."""
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, _raise_signal)
    try:
        yield
    except (FsdpctlError, SignalError) as error:
        for text in error.args:
            _print_error(str(text))
        sys.exit(error.exit_code)
    except _ParserError as error:
        from fsdpctl.config.compose import TRAIN_OPTIONS  # slow to import

        message = error.format_message() if hasattr(error, "format_message") else str(error)
        is_of_train = getattr(error, "option_name", "") in TRAIN_OPTIONS
        _print_error(f"{message}{'; `fsdpctl train` has this option' * is_of_train}")
        sys.exit(UsageError.exit_code)
    except (MemoryError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        _print_error("a file or directory is nested too deeply" if is_deep else "out of memory")
        sys.exit(UsageError.exit_code)
    except OSError as error:
        location = f"{error.filename}: " if error.filename else ""
        with contextlib.suppress(OSError):
            _print_error(f"{location}{error.strerror or error}")
        sys.exit(UsageError.exit_code)
    finally:
        DISPLAY.stop()


def _refuse_repeated(args: Iterable[str]) -> None:
    """Raise UsageError if an option is repeated: the parser would silently use the last value."""
    counts = Counter(each.partition("=")[0] for each in args if each.startswith("--"))
    for name, count in counts.items():
        if count > 1 and len(name) > 2 and "." not in name:  # neither "--" nor --a.b=v
            raise UsageError(f"{name}: given {count} times; pass it once")


def main() -> None:
    """Run the command line. An error is printed in one line and determines the exit code."""
    typed = list(pairwise(["", *sys.argv[1:]]))  # each argument with the previous one
    args = [x for before, x in typed if x not in _QUIET_OPTIONS or before in _FREE_TEXT_OPTIONS]
    if len(args) < len(typed):
        os.environ[QUIET] = "1"
    args = args or ["--help"]
    sys.stdout = output = open_stdout(sys.stdout)
    with exit_on_error():
        # Credentials are rejected before a message or a file contains them.
        for previous, each in typed:
            name = each.partition("://")[0].partition("=")[0]
            if previous not in _FREE_TEXT_OPTIONS and name not in _FREE_TEXT_OPTIONS:
                refuse_credentials(each, name)
        _refuse_repeated(each for previous, each in typed if previous not in _FREE_TEXT_OPTIONS)
        if is_first_process():
            DISPLAY.start(sys.stderr, f"fsdpctl {args[0]}")
        code = app(args, standalone_mode=False)
        if not code:
            output.check()  # raises if text was lost
        sys.exit(code if isinstance(code, int) else 0)
