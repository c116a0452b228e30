"""Show manifests and reports as text for people: one file a verb. Gives strings, prints nothing."""
