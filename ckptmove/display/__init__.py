"""How reports show: as text, as HTML, as JSON. Prints nothing."""
