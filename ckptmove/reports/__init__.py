"""Reports: what each verb returns, and how it shows as text, HTML and JSON. Prints nothing."""
