"""`python -m strata_device`."""

import sys

from strata_device.cli import main

sys.exit(main())
