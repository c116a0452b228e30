"""`python -m ckptmove`"""

from .cli import main

main()
