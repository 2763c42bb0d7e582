"""`python -m ckptdeco` is the command `ckptdeco`."""

import sys

from ckptdeco.cli import main

sys.exit(main())
