"""The command line.

Read in this order:

- `program`: reads the command and calls it
- `commands`: one file a command
- `compare`: methods compared on a problem, with seeds, tables and a page
- `demo`: every method on two small problems

May import every other room but `testing`.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. `import dubito.compare` passes here too, so the commands are loaded on call."""
    from dubito.cli.program import main as run

    return run(argv)
