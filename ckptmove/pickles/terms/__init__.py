"""Terms: a graph of inert nodes as plain JSON values, and back.

What JSON has stands for itself: null, booleans, finite floats, integers of at most 63 bits, text
without surrogates, lists, and dicts whose keys are such text, none twice and none "$". All else is
an object whose "$" says what it is, and whose "of" is what it is made of:

    dict       [[key, value], …]             set, frozenset, tuple    [item, …]
    int        "-0x1f…"                      float   "inf", "-inf", or the bits of a NaN in hex
    bytes      base64                        text    base64 of UTF-8 with surrogates
    name       "module:name"                 persistent    the persistent id
    call       "module:name", or a term; then, where there is any, "args" (a list; a term where the
               tuple is shared), "how" (the opcode, but for REDUCE), "kwargs", "items", "pairs",
               and "state" where there was a BUILD
    shared     what is used more than once, where it is first met; "as" numbers these from 0
    again      no "of": where the one of that number is met again, be it within itself

Long text, bytes, integers and names are shared as well, so terms are never much longer than the
pickle. Empty tuples are all one, and so are names: to Python they are. Everything here takes linear
time, and only the JSON text has a greatest depth.

`to_terms(graph)` gives the term and `term_json(term)` its JSON; `parse_term(text)` and
`from_terms(term)` go back.
"""

from .reading import from_terms
from .spelling import Term, TooLong, to_terms
from .text import check_texts, extent_of, has_long_number, json_parts, parse_term, term_json

__all__ = [
    "Term",
    "TooLong",
    "check_texts",
    "extent_of",
    "from_terms",
    "has_long_number",
    "json_parts",
    "parse_term",
    "term_json",
    "to_terms",
]
