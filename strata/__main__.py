"""`python -m strata`: the same as the `strata` command."""

import sys

from strata.core.importing import leave_current_folder

leave_current_folder()  # before anything that is not Python's own is imported

from strata.cli import main  # noqa: E402

sys.exit(main())
