"""`python -m molt.agents` is the command `molt-agent`."""

import sys

from molt.agents.cli import main

sys.exit(main())
