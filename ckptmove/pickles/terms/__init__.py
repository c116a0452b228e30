"""Terms: a graph of inert nodes as plain JSON values, and back.

Values that JSON has stand for themselves: null, booleans, finite floats, integers of at most 63
bits, text without surrogates, lists, and dicts whose keys are such text, without repetition and
without "$". Everything else is an object: "$" gives its kind, and "of" its content:

    dict       [[key, value], …]             set, frozenset, tuple    [item, …]
    int        "-0x1f…"                      float   "inf", "-inf", or the bits of a NaN in hex
    bytes      base64                        text    base64 of UTF-8 with surrogates
    name       "module:name"                 persistent    the persistent id
    call       "module:name", or a term; and optionally "args" (a list; a term if the tuple is
               shared), "how" (the opcode, unless it is REDUCE), "kwargs", "items", "pairs",
               and "state" if there was a BUILD
    shared     the first use of a value that is used more than once; "as" is its number, from 0
    again      no "of": a further use of the value with the number "as", even within itself

Long text, bytes, integers and names are shared as well, so terms are never much longer than the
pickle. All empty tuples are one object, and so are equal names, as in Python. Everything here takes
linear time, and only the depth of the JSON text is limited.

`to_terms(graph)` returns the term and `term_json(term)` its JSON; `parse_term(text)` and
`from_terms(term)` are the reverse.
"""

from .reading import from_terms
from .spelling import MAX_BITS, Term, TooLong, to_terms
from .text import (
    JsonExtent,
    check_texts,
    extent_of,
    has_long_number,
    json_parts,
    parse_term,
    term_json,
)

__all__ = [
    "MAX_BITS",
    "JsonExtent",
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
