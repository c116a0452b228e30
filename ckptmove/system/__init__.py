"""Calls that differ between operating systems: on files, locks, signals and names.

Other modules call these functions and never ask which system they run on. If a system lacks a call,
a function here replaces it, or refuses with an error that names it.
"""

import sys

WINDOWS = sys.platform == "win32"
