"""The command line: one file a verb. Parses and renders; what a verb does is `emmy.api`'s."""

from emmy.cli.entry import main

__all__ = ["main"]
