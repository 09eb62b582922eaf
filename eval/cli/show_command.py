"""``show``: print, write and plot finished runs."""

from __future__ import annotations

from .. import merging
from ..common.output_files import Outputs
from ..specs import spec_files
from . import flag_checks, output_checks, outputs
from .commands import ShowCommand
from .outputs import print_note


def run(command: ShowCommand) -> int:
    """Show the runs of the sources as one; return the exit status."""
    results = merging.load(command.sources)
    results = results.masked(spec_files.matching(results.labels, command.mask))
    unused_flags = flag_checks.check_content(
        command.table,
        command.pictures,
        results.slices,
        results.labels,
        reference=results.reference is not None,
        is_run=False,
    )
    print_note(unused_flags)
    output_checks.check(command.files, command.pictures, command.sources)
    results = results.updated(title=command.pictures.title or results.title)
    written = Outputs(command.verbose)
    outputs.print_table(command.table, results, written)
    status = outputs.write_files(command.files, command.table, command.pictures, results, written)
    if status:
        return status
    return outputs.print_failures(results, command.table.fail_if)
