"""``python -m ntkgp``: the command line."""

import sys

from ntkgp.cli import main

sys.exit(main())
