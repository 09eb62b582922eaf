"""The command line of compare_q: subcommands and exit statuses.

Exit status 0: all models were scored, or a finished run was shown.  1: some models failed, or the
reference could not be kept, and the others are in the table; or doctor or check found that a number
would be wrong.  2: bad input, no model was scored, or an output could not be written; a closed
standard output (| head) does not count.  4: a condition of --fail-if holds.  128 + its number: a
signal.  gate has its own statuses.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from ...backends.common.errors import CompareQError
from ...backends.common.message_text import one_line
from ..common import output_files
from . import command_line
from .commands import (
    CacheCommand,
    Command,
    DoctorCommand,
    EnginesCommand,
    FlipsCommand,
    GateCommand,
    PackCommand,
    RunCommand,
    ShowCommand,
    WhereCommand,
    WindowsCommand,
)
from .outputs import print_errors


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    if words is None:
        output_files.protect_standard_streams()
        words = sys.argv[1:]
    what_remains = "what was finished is in the cache"
    try:
        command = command_line.parse(words)
        if isinstance(command, GateCommand):
            what_remains = "a gate keeps no scores"
        status = run(command)
    except SystemExit as end:
        # After --help and --version.
        status = int(end.code or 0)
    except CompareQError as error:
        status = print_errors(str(error))
    except OSError as error:
        # A name that is too long, a file without permission, a full disk.
        status = print_errors(one_line(error))
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted; {what_remains}", file=sys.stderr)
        status = 128 + getattr(interrupt, "signal", signal.SIGINT)
    lost_output = output_files.stdout_error()
    if lost_output:
        problem = f"standard output: could not be written: {lost_output}; {output_files.CURE}"
        status = max(status, print_errors(problem))
    return status


def run(command: Command) -> int:
    """Run a command; return its exit status.

    Its module is imported only now, so that --help and show answer sooner.
    """
    match command:
        case RunCommand():
            from . import run_command

            return run_command.run(command)
        case ShowCommand():
            from . import show_command

            return show_command.run(command)
        case GateCommand():
            from . import gate_command

            return gate_command.run(command)
        case PackCommand():
            from . import pack_command

            return pack_command.run(command)
        case WindowsCommand():
            from . import windows_command

            return windows_command.run(command)
        case FlipsCommand():
            from . import flips_command

            return flips_command.run(command)
        case WhereCommand():
            from . import where_command

            return where_command.run(command)
        case DoctorCommand():
            from . import doctor_command

            return doctor_command.run(command.models)
        case CacheCommand():
            from . import cache_command

            return cache_command.run(command)
        case EnginesCommand():
            from . import engines_command

            return engines_command.run()
