"""What one operating system has and another lacks: calls on files, locks, signals, names.

Everything else calls these, and asks nobody which system it is. What a system lacks has something
in its place here, or is refused by name.
"""

import sys

WINDOWS = sys.platform == "win32"
