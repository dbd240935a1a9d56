"""The subcommands of ``ntkgp``: each module has a NAME, a HELP line, its arguments, and what it runs."""
